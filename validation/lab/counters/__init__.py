"""Hardware counters of kernels (Nsight Compute) beside what the model says each unit does."""
