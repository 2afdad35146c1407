"""How a sweep's items are run and kept."""
