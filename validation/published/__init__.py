"""Forecasts against published measurements."""
