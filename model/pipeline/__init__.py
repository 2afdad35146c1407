"""The loop of a kernel as a dataflow graph."""
