"""Changes of single lines that make a wrong kernel right."""

from __future__ import annotations

import re
import resource

import numpy as np
import pytest
from support.planted import Planted

from tilecast.emulator.battery.runner import run_battery
from tilecast.emulator.battery.trials import limited
from tilecast.emulator.source import Source

#: Kernel, what is changed, and the line that the message offers instead of it.
BUGS = {
    "a mask that chooses the other way round": (
        "hopper_ws_d64_causal_long", 's, float("-inf"))', 'float("-inf"), s)',
        'return gl.where(keys[None, :] <= keys_seen(problem, row)[:, None], s, float("-inf"))', "one query",
    ),
    "a name for another": (
        "hopper_ws_d64_full", "load(v, n, v_desc, batch, head // problem.group, key)", "load(v, n, v_desc, batch, head // problem.group, g)",
        "load(v, n, v_desc, batch, head // problem.group, ", "one query",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BUGS)
def test_a_change_that_mends_is_offered(name: str) -> None:
    kernel, old, new, line, case = BUGS[name]
    text, changed = Planted(name, kernel, "", old, new).text()
    found = run_battery(Source(f"{kernel}.py", text), chosen=lambda one: case in one.label(), tries=True)
    _, _, offered = found.failures[0].message.partition("with one line changed to one of these ")
    numbers = [int(number) for number in re.findall(r"line (\d+): ", offered)]
    assert changed & set(numbers), found.failures[0].message
    assert f"line {min(changed)}: {line[:90]}" in offered
    # One of each line.
    assert len(numbers) == len(set(numbers))


def test_a_trial_ends_and_leaves_the_kernel_as_it_was() -> None:
    """A loop of one role that does not end is given up; the next problem runs the file again."""
    old = "    return 0, gl.cdiv(own_copy(problem.seqlen_k), TILE_N)"
    text, _ = Planted("", "hopper_ws_d64_full", "", old, old + " + 1").text()
    found = run_battery(
        Source("kernel.py", text), chosen=lambda one: "one query" in one.label() or "without log" in one.label(),
        keep_going=True, tries=True,
    )  # fmt: skip
    assert len(found.failures) == 2
    assert "with one line changed" not in found.failures[1].message


def test_a_trial_that_asks_for_too_much_memory_fails_alone() -> None:
    """A change may make a tensor as large as memory is, which would end the process."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    with limited(64 << 20):
        with pytest.raises(MemoryError):
            np.ones(1 << 30, np.uint8)
        assert np.ones(1 << 20, np.uint8).all()
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    assert np.ones(1 << 27, np.uint8).all()
