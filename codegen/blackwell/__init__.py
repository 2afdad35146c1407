"""Kernels for Blackwell (Gluon: tcgen05, tensor memory): variant and pipeline to what their templates read."""
