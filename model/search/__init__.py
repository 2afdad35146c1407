"""The best variant for a workload and a machine."""
