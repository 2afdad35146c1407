"""Variants of serving kernels for Hopper."""
