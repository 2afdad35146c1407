"""Attention backends for serving engines: each engine is imported only by its own module, and none is a dependency."""
