"""Prediction against reality: published points, measurements, comparison."""
