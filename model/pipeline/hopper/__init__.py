"""What compilers make of the loops of Hopper's forward kernels, before they are compiled."""
