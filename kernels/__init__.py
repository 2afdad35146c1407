"""The kernels that ship, as generated, and the operator users call."""
