"""What items of serving kernels cost around their loops."""
