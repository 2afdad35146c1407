"""Sweeps: machines x workloads x variants as work items with content keys, in a store that survives a kill."""
