"""Warp-specialised kernels of anybody: the steady loops of their roles, simulated instruction by instruction."""
