"""The passes as design reviews see them."""
