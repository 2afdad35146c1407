"""The simulation of a loop and its recurrences in C."""
