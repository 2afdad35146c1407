"""Bundles: one zip that holds what a GPU measured, made on the machine that has the GPU and read on any other."""
