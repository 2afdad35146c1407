"""How a design review looks."""
