"""What one SM does with a pipeline: bounds and simulation."""
