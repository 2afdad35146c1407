"""Loops of kernels that serve: the portable one, from e4m3 bytes, and latent attention."""
