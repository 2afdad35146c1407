"""Programs of a backward launch that add to their head's sums one after the other."""
