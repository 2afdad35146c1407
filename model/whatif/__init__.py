"""Forecasts for machines that do not exist."""
