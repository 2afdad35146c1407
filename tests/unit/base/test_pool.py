"""Work on several processes comes back in order, and tells how far it is."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.interrupts import LISTENS
from support.paths import ROOT

from tilecast.base.pool import cores, spread
from tilecast.base.progress import reported, silent


@pytest.mark.parametrize("workers", [1, 2])
def test_results_come_in_the_order_of_the_inputs(workers: int) -> None:
    assert list(spread(math.factorial, list(range(12)), workers)) == [math.factorial(n) for n in range(12)]


def test_one_input_needs_no_process() -> None:
    assert list(spread(_process, [0], 4)) == [os.getpid()]
    assert list(spread(_process, [], 4)) == []


def test_several_inputs_run_elsewhere() -> None:
    assert os.getpid() not in set(spread(_process, [0, 1, 2, 3], 2))


def test_an_exception_of_the_function_arrives() -> None:
    with pytest.raises(ValueError, match="negative"):
        list(spread(math.factorial, [3, -1, 2], 2))


def test_there_is_a_core() -> None:
    assert 1 <= cores() <= (os.cpu_count() or 1)


def test_steps_are_reported_before_the_first_and_after_each() -> None:
    told: list[tuple[object, ...]] = []
    out = []
    for step in reported("ab", "letters", 2, lambda *args: told.append(args)):
        out.append((step, len(told)))
    assert out == [("a", 2), ("b", 3)]
    assert told == [("letters", 0, 2), ("letters", 1, 2), ("letters", 2, 2)]
    assert list(reported("ab", "letters", 2, silent)) == ["a", "b"]


def test_ctrl_c_ends_the_run_without_a_word_of_the_workers(tmp_path: Path) -> None:
    """Ctrl-C of a terminal reaches every process of the group: the parent alone answers it."""
    script = tmp_path / "run.py"
    script.write_text(
        f"{LISTENS}import pathlib, time\n"
        "from tilecast.base.pool import spread\n"
        f"def work(n): pathlib.Path(r'{tmp_path}', f'began{{n}}').touch(); time.sleep(600)\n"
        "if __name__ == '__main__':\n"
        "    try: list(spread(work, [0, 1], 2))\n"
        "    except KeyboardInterrupt: raise SystemExit(130)\n"
    )
    run = subprocess.Popen(
        [sys.executable, str(script)], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        while not all((tmp_path / f"began{n}").exists() for n in (0, 1)):
            assert run.poll() is None
            time.sleep(0.01)
        os.killpg(run.pid, signal.SIGINT)
        _, errors = run.communicate(timeout=60)
    finally:
        run.kill()
    assert run.returncode == 130
    assert errors == b""
    deadline = time.monotonic() + 60
    while _exists(run.pid):  # the last of the group end a moment after their parent
        assert time.monotonic() < deadline, "a worker outlives the run"
        time.sleep(0.05)


def _exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _process(_: int) -> int:
    return os.getpid()
