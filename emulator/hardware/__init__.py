"""Memory, barriers, engines and warps, with happens-before."""
