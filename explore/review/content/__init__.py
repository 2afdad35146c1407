"""What a design review says."""
