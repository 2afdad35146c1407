"""What is asked of a kernel: the workload, the variant's knobs, and what is legal."""
