"""The what-if against GPUs that differ in little."""
