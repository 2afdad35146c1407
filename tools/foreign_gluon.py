"""What becomes of other people's Gluon tests in the emulator: one row for each test function of the given files or folders.

    python tools/foreign_gluon.py FOLDER_OR_FILE... --machine b200 --each 2

Needs pytest and what the tests import (torch, most of them), no GPU and no Triton.  ``--each`` cases of every function run,
spread over its parameters, in ``late`` unless --modes says more.  A case that takes longer than --seconds is given up.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

#: In the order of the table's columns.
OUTCOMES = ("right", "wrong", "not emulated", "skipped", "too slow")


class TooSlowError(Exception):
    """A case that takes longer than it may."""


class Collect:
    """Picks cases, limits their time and keeps what became of them."""

    def __init__(self, each: int, seconds: int) -> None:
        self.each, self.seconds = each, seconds
        self.rows: dict[tuple[str, str], collections.Counter[str]] = {}
        self.reasons: dict[tuple[str, str], str] = {}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """``each`` cases of a function, evenly spread."""
        groups: dict[Any, list[Any]] = collections.defaultdict(list)
        for item in items:
            groups[str(item.path), getattr(item, "originalname", item.name)].append(item)
        kept = []
        for cases in groups.values():
            step = max(1, len(cases) // self.each)
            kept += cases[::step][: self.each]
        items[:] = kept

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Iterator[Any]:
        """No longer than it may."""

        def stop(*_signal: Any) -> None:
            raise TooSlowError(f"more than {self.seconds} s")

        before = signal.signal(signal.SIGALRM, stop)
        signal.alarm(self.seconds)
        try:
            return (yield)
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """A case is over, or was skipped before it began."""
        if report.when == "teardown" or (report.when == "setup" and report.passed):
            return
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
        if report.passed:
            outcome = "right"
        elif report.skipped:
            outcome = "not emulated" if "not emulated: " in reason else "skipped"
        else:
            outcome = "too slow" if "TooSlowError: " in reason else "wrong"
        path, _line, name = report.location
        row = (Path(path).name, name.split("[")[0])
        self.rows.setdefault(row, collections.Counter())[outcome] += 1
        if outcome not in ("right", "skipped"):
            last = [line for line in reason.splitlines() if line.strip()]
            said = next((line for line in last if line.startswith("E ")), last[-1] if last else "")
            self.reasons.setdefault(row, said.removeprefix("E").strip().removeprefix("not emulated: "))


def main() -> int:
    """Run, and print the table; 1 where a test that ran was wrong."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("places", nargs="+", help="files, or folders whose test_*.py and numbered tutorials run")
    parser.add_argument("--machine", default="b200")
    parser.add_argument("--modes", default="late")
    parser.add_argument("--each", type=int, default=2, help="cases of every test function (2)")
    parser.add_argument("--seconds", type=int, default=10, help="the longest a case may take (10)")
    parser.add_argument("--select", default="", help="pytest's -k")
    given = parser.parse_args()
    collect = Collect(given.each, given.seconds)
    options = [
        "-p", "tilecast.emulator.suites.pytest_plugin", "-p", "no:cacheprovider", "--gluon-emulate", "--gluon-machine",
        given.machine, "--gluon-modes", given.modes, "-q", "--no-header", "-c", "/dev/null", "--import-mode=importlib",
        "-o", "python_files=test_*.py [0-9]*.py", *(["-k", given.select] if given.select else []), *given.places,
    ]  # fmt: skip
    # Tutorials import each other by name.
    sys.path[:0] = [str(place if place.is_dir() else place.parent) for place in map(Path, given.places)]
    # The plugin is named here, whether or not the package is installed; installed as well, it would be there twice.
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    with contextlib.redirect_stdout(sys.stderr):
        pytest.main(options, plugins=[collect])
    print("| file | test function | " + " | ".join(OUTCOMES) + " | why not |")
    print("|---" * (len(OUTCOMES) + 3) + "|")
    for row, counts in sorted(collect.rows.items()):
        numbers = " | ".join(str(counts[outcome] or "") for outcome in OUTCOMES)
        print(f"| {row[0]} | {row[1]} | {numbers} | {collect.reasons.get(row, '')[:300].replace('|', '/')} |")
    whole = collections.Counter(
        next(o for o in (*OUTCOMES[1:3], "too slow", "right", "skipped") if counts[o])
        for counts in collect.rows.values()
    )
    print(f"{len(collect.rows)} test functions: " + ", ".join(f"{whole[outcome]} {outcome}" for outcome in OUTCOMES))
    return int(whole["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
