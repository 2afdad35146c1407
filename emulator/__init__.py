"""Runs generated Gluon kernels on a CPU, with the asynchrony of the hardware and a check of every hand-over.

A generated file is plain Python.  `source` loads it, unmodified, with our own modules in place of Triton's; roles become
coroutines of a scheduler (`program`), copies and matrix products become operations that take effect later, memories
(`memory`) remember who wrote and read each cell, and barriers (`barriers`) carry what their arrivals knew.  What the
hardware leaves to chance is decided adversarially or at random; what no barrier orders is reported as a race.
"""
