"""Forecast against measured ratios of kernels that differ in one thing."""
