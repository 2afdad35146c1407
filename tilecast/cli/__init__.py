"""The command line: one file a group of verbs; `workload_options` states the options that verbs share."""

from __future__ import annotations

from typing import NoReturn

from tilecast.base.garbage import collect_rarely

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command ``arguments`` (default: the process's own); see `entry.run`."""
    # Before the verbs are imported, which makes more values than many a forecast.
    collect_rarely()
    from tilecast.cli.entry import run

    run(arguments)
