"""How long the executed source would take."""
