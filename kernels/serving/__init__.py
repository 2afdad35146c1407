"""Attention to serve with: packed sequences, caches and pages, decode and prefill; `calls` is what users call."""
