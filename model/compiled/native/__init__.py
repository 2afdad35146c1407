"""The simulator of `compiled/sm.py` in C: the same rules, the same digits, about a hundred times as fast."""
