"""The proven best order of a pipeline's loop."""
