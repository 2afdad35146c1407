"""Kernels in portable Triton: variant and pipeline to what their templates read."""
