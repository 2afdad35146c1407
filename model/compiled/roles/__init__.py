"""Warp-specialised kernels, ours and others: the steady loops of their roles, simulated instruction by instruction."""
