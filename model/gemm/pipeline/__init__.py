"""The stream of tiles of a GEMM kernel as a pipeline (`build.py`)."""
