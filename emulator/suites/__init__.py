"""Test suites written for a GPU, with the launches of their Gluon kernels on the CPU."""
