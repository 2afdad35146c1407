"""The battery: the problems that `tilecast emulate FILE` puts to a generated kernel, and what of the kernel they reached."""
