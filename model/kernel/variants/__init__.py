"""One module a kernel class: its knobs, its legality, what can be written of it, its space, what its authors ship."""
