"""Measuring attention kernels so that five percent means something: the protocol, as a library and as `tilecast measure`."""
