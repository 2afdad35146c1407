"""Machines: facts with units and sources, one data file a GPU."""
