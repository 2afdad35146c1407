"""The answer for one workload, machine and variant."""
