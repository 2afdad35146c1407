"""The command line: one file a group of verbs; `workload_options` states the options that verbs share."""

from tilecast.cli.main import app, main

__all__ = ["app", "main"]
