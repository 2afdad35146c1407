"""All SMs: tiles, waves, memory, power."""
