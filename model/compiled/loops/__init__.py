"""Loops at hand: machine code that ships, so that a forecast stands on it without a compiler."""
