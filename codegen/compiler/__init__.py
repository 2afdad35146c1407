"""What the compiler makes of a kernel, read without a GPU."""
