"""From rows of microbenchmarks to facts of a machine file."""
