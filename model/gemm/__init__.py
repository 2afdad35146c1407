"""D = alpha A B + beta C: the second kind of pipeline, through the same graph, bounds and simulation as attention."""
