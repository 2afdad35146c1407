"""Which variant to time: by forecast and by machine code."""
