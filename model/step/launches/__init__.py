"""Launches of a serving step: how kernels deal sequences, by class of kernels and by variant."""
