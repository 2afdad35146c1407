"""A process that may be lost: what a kernel does to it, it does not do to the run that asked it."""
