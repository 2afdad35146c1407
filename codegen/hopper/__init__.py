"""Kernels for Hopper (Gluon: TMA, wgmma): variant and pipeline to what their templates read."""
