"""Generated kernels: `make kernels` writes them; nothing here is edited by hand."""
