"""Forecasts against our own measurements."""
