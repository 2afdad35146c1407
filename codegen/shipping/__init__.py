"""What leaves the generator for good: the kernels that ship, the Hub package, the loops at hand."""
