"""Programs that a test sends Ctrl-C to."""

#: First lines of such a program: a shell's job in the background begins with the signal ignored, and hands that on to all it starts.
LISTENS = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
