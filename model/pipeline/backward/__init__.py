"""Loops of backward passes as dataflow graphs, and what is launched around them."""
