"""Loops of kernels that serve: the portable one, those whose warps multiply apart, and latent attention."""
