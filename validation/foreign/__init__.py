"""Kernels that are not ours: forecasts from their machine code against measured launches."""
