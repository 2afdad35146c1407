"""D = beta C + alpha A B on the shipped kernels."""
