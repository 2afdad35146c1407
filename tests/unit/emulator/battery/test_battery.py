"""The battery: what it puts to a kernel, what it finds that one problem does not, what it says was not reached."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.planted import BENIGN, LATER, PLANTED, Planted
from support.whole import whole

from tilecast.base.progress import silent
from tilecast.emulator.battery.coverage import Coverage
from tilecast.emulator.battery.problems import Problem, Shape, inputs, problems
from tilecast.emulator.battery.runner import Battery, run_battery
from tilecast.emulator.battery.superfluous import superfluous_waits
from tilecast.emulator.run import emulate, kernel_path
from tilecast.emulator.source import Source
from tilecast.emulator.verify import judge

HOPPER, HOPPER_CAUSAL, HOPPER_WINDOW = "hopper_ws_d128_full", "hopper_ws_d128_causal", "hopper_ws_d128_window"
BLACKWELL, BLACKWELL_CAUSAL = "blackwell_ws_d128_full", "blackwell_ws_d128_causal"


def put(kernel: str, old: str = "", new: str = "", case: str = "") -> Battery:
    """The battery on a shipped kernel with one substitution; ``case``: only the problems called so."""
    text = kernel_path(kernel).read_text(encoding="utf-8")
    assert old in text
    source = Source(f"{kernel}.py", text.replace(old, new, 1) if old else text)
    return run_battery(source, chosen=lambda one: case in one.label())


#: Anchored kernels do the block with row 0's last key first, whole or not, which these conditions of all kernels ask about.
ALWAYS = {"if end > whole_end:", "if (end > whole_end) | (whole_first > end - 1):"}


@pytest.mark.parametrize("kernel", [pytest.param(HOPPER_CAUSAL, marks=whole), HOPPER_WINDOW])
def test_a_shipped_kernel_has_no_fault_and_runs_to_its_last_statement(kernel: str) -> None:
    found = put(kernel)
    assert found.failures == () and found.problems == found.problems_in_all > 90
    assert found.statements == found.statements_in_all
    assert [one for one in found.unreached if not one.reason and one.code not in ALWAYS] == []
    assert found.refusals >= 20 and found.exponentials == 1
    assert 0 < found.out_error < 1 and 0 < found.lse_error < 1


def test_lengths_and_windows_have_every_residue() -> None:
    shape = Shape("window", 128, 64, 64, (1024, 0))
    lengths = [one for one in problems(shape) if one.stage == "lengths"]
    assert {(one.keys - one.rows) % 64 for one in lengths} == set(range(64))
    assert {one.keys % 64 for one in lengths} == set(range(64))
    windows = [one.window for one in problems(shape) if one.stage == "window"]
    assert {left % 64 for left, _ in windows if left >= 0} == set(range(64))
    assert any(left < 0 <= right for left, right in windows) and any(right < 0 <= left for left, right in windows)


def test_inputs_that_are_not_finite_leave_every_row_a_finite_key() -> None:
    for kind in ("NaN and infinity first", "NaN and infinity last"):
        q, k, _ = inputs(Problem("inputs", "", heads=(2, 2), rows=137, keys=288, kind=kind), 64, 64)
        with np.errstate(all="ignore"):
            scores = q.astype(np.float64) @ k.astype(np.float64).transpose(0, 1, 3, 2)
        assert np.isfinite(scores).any(-1).all()
        assert np.isnan(scores[:, :, ::4]).any(-1).all() and np.isposinf(scores[:, :, 1::4]).any(-1).all()
        assert not np.isnan(scores[:, :, 3::4]).any() and not np.isposinf(scores[:, :, 3::4]).any()


#: One substitution each, which one problem of 512 x 512 does not find: (kernel, old, new, problems, kind, what it says).
FINDS = {
    "mask block off by one": (
        HOPPER_CAUSAL, "gl.minimum(position, seqlen_k - 1)",
        "gl.minimum(position + 2, seqlen_k - 1)", "offset 62", "wrongresult", "one key too far out",
    ),
    "mask block off by one on Blackwell": (
        BLACKWELL_CAUSAL, "if key + TILE_N > diagonal + 1:", "if key + TILE_N > diagonal + 2:", "offset 126",
        "wrongresult", "if key + TILE_N > diagonal + 2:",
    ),
    "left edge off by one": (
        HOPPER_WINDOW, "first = gl.maximum(position + ROWS - 1 - problem.window_left, 0)",
        "first = gl.maximum(position + ROWS - 2 - problem.window_left, 0)", "left limit", "wrongresult", "hide_keys",
    ),
    "query heads on the wrong key head": (
        HOPPER, "head // problem.group, key)", "head % problem.group, key)", "several tiles: 172", "wrongresult", "head",
    ),
    "batch lost": (
        HOPPER, "own_copy(batch).to(gl.int64) * own_copy(problem.stride_b)",
        "own_copy(batch * 0).to(gl.int64) * own_copy(problem.stride_b)", "several tiles: 172", "wrongresult", "batch 0",
    ),
    "a group of heads not cut": (
        BLACKWELL_CAUSAL, "heads_here = gl.minimum(problem.heads_at_once, problem.heads - first_head)",
        "heads_here = problem.heads_at_once", "heads in groups", "bounds", "gl.store",
    ),
    "a NaN that is not a NaN": (
        BLACKWELL, "max.NaN.ftz.f32 $0, $1, $2, $3;", "max.ftz.f32 $0, $1, $2, $3;", "not finite", "wrongresult", "gl.store",
    ),
    "no launch without log-sum-exp": (
        HOPPER, "    if lse is None:", "    if lse is False:", "without log-sum-exp", "crash", "lse",
    ),
    "plan of the first launch's scale": (
        HOPPER, "    if planned := plan(q, k, v, out, lse, window_left, window_right):",
        "    scale = vars(launch).setdefault('scale', scale)\n    if planned := plan(q, k, v, out, lse, window_left, window_right):",
        "second launch", "wrongresult", "gl.store",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FINDS)
def test_finds(name: str) -> None:
    kernel, old, new, case, kind, says = FINDS[name]
    found = put(kernel, old, new, case)
    assert [one.kind for one in found.failures] == [kind], found.failures
    assert says in found.failures[0].message


def test_a_coefficient_that_is_off_by_a_ten_thousandth_is_found_alone() -> None:
    text = kernel_path(BLACKWELL).read_text(encoding="utf-8")
    old = "0x3f31f5193f31f519"
    bits = np.array([0x3F31F519], np.uint32).view(np.float32) + np.float32(1e-4)
    word = f"{int(bits.view(np.uint32)[0]):08x}"
    found = run_battery(
        Source("k.py", text.replace(old, f"0x{word}{word}")), chosen=lambda one: "one query" in one.name
    )
    assert [one.kind for one in found.failures] == ["wrongresult"]
    assert "2^x at line" in found.failures[0].message and f"0x{word}{word}" in found.failures[0].message


def test_a_launch_that_refuses_too_little_is_found() -> None:
    found = put(HOPPER, "    if not 0.0 < scale <= 2.0e38:", "    if not 0.0 <= scale <= 2.0e38:", "one query")
    # Zero is computed right, and so may be taken.
    assert found.failures == ()
    found = put(HOPPER, "    if not 0.0 < scale <= 2.0e38:", "    if scale > 2.0e38:", "one query")
    assert "launch takes scale=" in found.failures[0].message
    found = put(
        HOPPER,
        "(tuple(lse.shape), str(lse.dtype), lse.device) != (rows,",
        "(rows, str(lse.dtype), lse.device) != (rows,",
        "one query",
    )
    assert "an lse of another shape" in found.failures[0].message


def test_coverage_names_what_did_not_run_and_what_the_compiler_decided() -> None:
    text = (
        "WIDE = 1\n"
        "@jit\n"
        "def f(x, FLAG: constexpr):\n"
        '    """Text."""\n'
        "    if FLAG:\n"
        "        x += 1\n"
        "    y = 1 if x > 5 else 2\n"
        "    for _ in range(x):\n"
        "        y += 1\n"
        "    return y\n"
        "def g():\n"
        "    return 0\n"
    )
    counted = Coverage(text)
    names = {**counted.names, "jit": lambda fn: fn, "constexpr": int}
    exec(compile(counted.change(ast.parse(text)), "f.py", "exec"), names)
    assert names["f"](0, False) == 2
    assert counted.share() == (4, 7)
    said = [(one.line, one.what, one.reason) for one in counted.unreached()]
    assert said == [
        (5, "never true", "decided when the kernel is compiled"),
        (7, "never true", ""),
        (9, "never executed", ""),
        (11, "never called", ""),
    ]


def test_a_single_problem_still_agrees_when_a_kernel_is_loaded_once() -> None:
    """Launches of one loaded kernel leave nothing behind for the next."""
    problem = Problem("first", "", heads=(2, 1), rows=70, keys=90)
    q, k, v = inputs(problem, 64, 64)
    alone = emulate("hopper_ws_d64_causal", q, k, v, sms=2)
    again = emulate("hopper_ws_d64_causal", q, k, v, sms=2, mode="random", seed=3)
    assert alone.out.tobytes() == again.out.tobytes()
    assert judge(alone, q, k, v, 64**-0.5, (-1, 0)).wrong == ""


def tilecast(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from tilecast.cli import main; main()", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_verb_runs_the_battery_and_says_where_to_look(tmp_path: Path) -> None:
    broken = tmp_path / "kernel.py"
    text = kernel_path("hopper_ws_d64_full").read_text(encoding="utf-8")
    broken.write_text(text.replace("head // problem.group, key)", "head % problem.group, key)"), encoding="utf-8")
    done = tilecast("emulate", str(broken), "--json")
    answer = json.loads(done.stdout)
    assert done.returncode == 1 and answer["right"] is False
    assert (
        answer["failures"][0]["problem"].startswith("without log-sum-exp")
        and answer["problems"] < answer["problems_in_all"]
    )
    assert [one["severity"] for one in answer["compiler"]] in ([], ["not asked"])
    refused = tilecast("emulate", "hopper_ws_d64_full", "--case", "no such problem")
    assert refused.returncode == 2 and "no problem of the battery has" in refused.stderr


#: One substitution each: (kernel, old, new, problems, the first step that departs, a changed line that the message quotes).
STEPS = {
    "K of another head": (
        HOPPER_CAUSAL, "load(k, n, k_desc, batch, head // problem.group, key)", "load(k, n, k_desc, batch, head % problem.group, key)",
        "without log-sum-exp", "S. S of batch 0, head 1, rows from 0 is a product with K of batch 0, head 1, not of batch 0, head 0",
        "head % problem.group, key)",
    ),
    "a hidden key weighed": (
        HOPPER_CAUSAL, "gl.minimum(position, seqlen_k - 1)",
        "gl.minimum(position + 2, seqlen_k - 1)", "offset 62",
        "P. batch 0, head 0, row 0 does not see key 63, but P weighs it", "gl.minimum(position + 2, seqlen_k - 1)",
    ),
    "blocks left out": (
        HOPPER_CAUSAL, "gl.minimum(position + ROW_COUNT, seqlen_k)", "gl.minimum(position + ROW_COUNT - 1, seqlen_k)", "offset 1 modulo",
        "keys. no product with V is about batch 0, head 0, row 63 and keys 64 to 64", "gl.minimum(position + ROW_COUNT - 1, seqlen_k)",
    ),
    "O not rescaled": (
        HOPPER, "        o = scaled(o, factor)\n", "        o = scaled(o, factor * 0 + 1)\n", "rise and fall", "O. O of batch 0, head 0, row", "issue_pv(operand, tile_at(tile.v, n), o)",
    ),
    "O not rescaled on Blackwell": (
        BLACKWELL, "o.store(packed(\"mul\", o.load(row_per_thread(RESCALE_COLUMNS)), factors))", "o.store(o.load(row_per_thread(RESCALE_COLUMNS)))",
        "rising scores: 265x391, batch 1, heads 2/1", "O. O of batch 0, head 0, row", "tcgen05_mma(p.slice(0, 64)",
    ),
    "V of another head": (
        BLACKWELL, "load(kv, kv_at, v_desc, batch, head_kv, key)", "load(kv, kv_at, v_desc, batch, head, key)", "without log-sum-exp",
        "O. O of batch 0, head 2, rows from 0 is a product with V of batch 0, head 2, not of batch 0, head 0",
        "load(kv, kv_at, v_desc, batch, head, key)",
    ),
    "row sums": (
        HOPPER, "statistics.row_sums + sums, statistics.reference)", "sums, statistics.reference)",
        "several tiles: 172", "after. S, P and O of every block are right: the row sums, the division or the stores", "row_sum = gl.convert_layout",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
def test_wrong_values_are_told_by_the_first_step_that_departs(name: str) -> None:
    kernel, old, new, case, says, quotes = STEPS[name]
    found = put(kernel, old, new, case)
    assert found.failures and found.failures[0].kind == "wrongresult"
    message = found.failures[0].message
    assert f"first step that departs: {says}" in message, message
    assert quotes in message.split("it comes from")[1], message


@pytest.mark.parametrize("planted", (*PLANTED, *LATER, *BENIGN), ids=lambda one: one.name)
def test_every_planted_change_still_applies(planted: Planted) -> None:
    """tools/emulator_bugs.py puts them all to the battery; here only their text is checked."""
    text, lines = planted.text()
    compile(text, planted.kernel, "exec")
    assert text != kernel_path(planted.kernel).read_text(encoding="utf-8") and lines


def test_superfluous_waits_are_those_that_another_wait_makes_so() -> None:
    """In the Hopper loop, a copy's slot is free when both products are; doubled waits are found, needed ones are not."""
    text = kernel_path("hopper_ws_d64_full").read_text(encoding="utf-8")
    doubled = text.replace(
        "            wait(q, q_number)\n", "            wait(q, q_number)\n            wait(q, q_number + 0)\n", 1
    )
    found = superfluous_waits(
        Source("k.py", doubled), None, lambda one: one.name == "several tiles" and one.mode == "late", silent
    )
    assert found.problems == 1
    callers = {one.caller_code.split(": ", 1)[1] for one in found.superfluous}
    assert {"wait(q, q_number)", "wait(q, q_number + 0)"} <= callers
    assert "wait(tile.v, n)" not in callers and "wait(tile.k, n + 1)" not in callers


WHEN_NUMPY_LOADS = """
import os, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "numpy":
            print("threads", os.environ.get("OPENBLAS_NUM_THREADS"), file=sys.stderr)
            sys.meta_path.remove(self)

sys.meta_path.insert(0, Finder())
sys.argv = ["tilecast", "emulate", "hopper_ws_d64_full", *sys.argv[1:]]
from tilecast.cli import main
main()
"""


@pytest.mark.parametrize("options", [["--case", "one query"], ["--seqlen", "64", "--seqlen-k", "64"]])
def test_on_the_command_line_numpy_has_one_thread(options: list[str]) -> None:
    """Products of single tiles: more threads take two to ten times as long where others use the cores."""
    alone = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    done = subprocess.run([sys.executable, "-c", WHEN_NUMPY_LOADS, *options], capture_output=True, text=True, env=alone)
    assert done.returncode == 0, done.stderr
    assert "threads 1" in done.stderr
