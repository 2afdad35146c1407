"""Kernel classes for data-centre Blackwell beside the forward one."""
