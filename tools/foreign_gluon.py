"""What becomes of other people's Gluon tests in the emulator: one row for each test function of the given files or folders.

    python tools/foreign_gluon.py FOLDER_OR_FILE... --machine b200 --each 2

Needs pytest and what the tests import (torch, most of them), no GPU and no Triton.  ``--each`` cases of every function run,
spread over its parameters, in ``late`` unless --modes says more.  A case that takes longer than --seconds is given up; --set
gives tests that were written for a GPU shapes that a CPU runs, as in --set M=256 N=256 K=256.
"""

from __future__ import annotations

import argparse
import ast
import collections
import contextlib
import json
import os
import select
import signal
import sys
import unittest.mock
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

sys.path.insert(0, str(Path(__file__).parents[1]))

#: In the order of the table's columns.
OUTCOMES = ("right", "wrong", "not emulated", "asks the compiler", "skipped", "too slow")


def _forked(item: Any, seconds: int) -> list[Any]:
    """Reports of one case that ran in a child; of a child that was stopped or died, one that says so."""
    hook = item.ihook
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        reports = runtestprotocol(item, nextitem=None, log=False)
        data = [hook.pytest_report_to_serializable(config=item.config, report=report) for report in reports]
        with os.fdopen(writing, "w") as out:
            json.dump(data, out, default=str)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        ready = select.select([answer], [], [], seconds)[0]
        if not ready:
            os.kill(child, signal.SIGKILL)
        text = answer.read() if ready else ""
    os.waitpid(child, 0)
    if text:
        return [hook.pytest_report_from_serializable(config=item.config, data=one) for one in json.loads(text)]
    said = "the process of this case died" if ready else f"TooSlow: more than {seconds} s"
    return [pytest.TestReport(item.nodeid, item.location, {}, "failed", said, "call")]


class Collect:
    """Picks cases, limits their time and keeps what became of them."""

    def __init__(self, each: int, seconds: int, values: dict[str, Any]) -> None:
        self.each, self.seconds, self.values = each, seconds, values
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
        for item in kept:
            params = getattr(getattr(item, "callspec", None), "params", {})
            smaller = {name: value for name, value in self.values.items() if name in params and value < params[name]}
            params.update(smaller)
        items[:] = kept

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: Any, nextitem: Any) -> bool:
        """Each case in a process of its own, which ends with its time: a test may compute in C for minutes."""
        hook = item.ihook
        hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in _forked(item, self.seconds):
            hook.pytest_runtest_logreport(report=report)
        hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    @pytest.fixture
    def device(self) -> str:
        """The GPU, by the name of a fixture that Triton's own suite has in a file above these."""
        return "cuda"

    @pytest.fixture
    def fresh_knobs(self) -> Any:
        """Settings of the compiler, which nothing reads here."""
        return unittest.mock.MagicMock()

    def pytest_collectreport(self, report: Any) -> None:
        """A file that cannot be imported, since another package is missing, is a row as well."""
        if report.failed:
            row = (Path(report.nodeid).name, "(the file)")
            self.rows[row] = collections.Counter(skipped=1)
            self.reasons[row] = report.longreprtext.splitlines()[-1].removeprefix("E").strip()

    def pytest_runtest_logreport(self, report: Any) -> None:
        """A case is over, or was skipped before it began."""
        if report.when == "teardown" or (report.when == "setup" and report.passed):
            return
        reason = report.longrepr[2] if isinstance(report.longrepr, (tuple, list)) else report.longreprtext
        if report.passed:
            outcome = "right"
        elif report.skipped:
            # Tests that look at what the compiler made of a kernel say nothing about the kernel.
            gap = "asks the compiler" if "nothing is compiled here" in reason else "not emulated"
            outcome = gap if "not emulated: " in reason else "skipped"
        else:
            outcome = "too slow" if "TooSlow: " in reason else "wrong"
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
    parser.add_argument(
        "--set",
        nargs="*",
        default=[],
        metavar="NAME=VALUE",
        help="parameters of tests that get this value where theirs is larger",
    )
    given = parser.parse_args()
    values = {name: ast.literal_eval(value) for name, value in (one.split("=", 1) for one in given.set)}
    collect = Collect(given.each, given.seconds, values)
    options = [
        "-p", "tilecast.emulator.suites.pytest_plugin", "-p", "no:cacheprovider", "--gluon-emulate", "--gluon-machine",
        given.machine, "--gluon-modes", given.modes, "-q", "--no-header", "-c", "/dev/null", "--import-mode=importlib",
        "-o", "python_files=test_*.py [0-9]*.py", "--continue-on-collection-errors", *(["-k", given.select] if given.select else []), *given.places,
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
        next(o for o in (*OUTCOMES[1:4], "too slow", "right", "skipped") if counts[o])
        for counts in collect.rows.values()
    )
    print(f"{len(collect.rows)} test functions: " + ", ".join(f"{whole[outcome]} {outcome}" for outcome in OUTCOMES))
    return int(whole["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
