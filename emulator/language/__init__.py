"""The Gluon language on a CPU."""
