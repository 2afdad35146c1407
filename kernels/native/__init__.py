"""Launches in C, where Triton's compiler for its own launchers is at hand."""
