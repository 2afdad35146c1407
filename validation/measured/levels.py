"""What tables call the two forecasts of a kernel."""

#: Made from the variant alone, and from the kernel's own instructions.
BEFORE, COMPILED = "before compilation", "from machine code"
