"""Products D = alpha A B + beta C: the files, and those that ship."""
