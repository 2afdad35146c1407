"""A kernel file as it is timed: what a shape needs is worked out once, as in the operator."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tilecast.model.kernel.workload import Workload
from tilecast.validation.lab.measure.plan import Item

FILE = """
CALLS = []
OPTIONS = {}


def plan(q, k, v, out, lse, window_left, window_right):
    CALLS.append(("plan", window_left, window_right))
    return (1, 1, 1), (q, k, v, out, lse, 7)


class Kernel:
    def warmup(self, *arguments, **options):
        return self

    def __getitem__(self, grid):
        return lambda q, k, v, out, lse, seven, scale: (CALLS.append(("start", seven)), out.fill_(1.0))


attention = Kernel()


def launch(q, k, v, out, lse, scale, window_left=-1, window_right=-1):
    CALLS.append("launch")
    out.fill_(2.0)
"""


@pytest.mark.parametrize("planned", [True, False])
def test_a_file_with_a_plan_is_launched_as_the_operator_launches_it(planned: bool, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from tilecast.validation.lab.measure.subjects import subject

    work = Workload(1, 2, 1, 8, 8, 64, 64, "window", (5, 0))
    path = tmp_path / "kernel.py"
    path.write_text(FILE if planned else FILE.replace("def plan(", "def other("))
    inputs = (torch.zeros(1, 2, 8, 64), torch.zeros(1, 1, 8, 64), torch.zeros(1, 1, 8, 64))
    made = subject(Item("file", str(path), work, "h200-sxm"), "test")
    run, output = made.prepare(work, inputs)
    for _ in range(3):
        run()
    assert (output() == (1.0 if planned else 2.0)).all()
    calls = sys.modules[f"tilecast_measured_{made.source_sha}"].CALLS
    assert calls == ([("plan", 5, 0), *[("start", 7)] * 3] if planned else ["launch"] * 3)


@pytest.mark.parametrize(
    ("window", "limits"), [((7, 0), (-1, -1)), ((5, 0), (5, 0)), ((7, 8), (-1, -1)), ((7, 3), (-1, 3))]
)
def test_a_generated_kernel_gets_the_limits_of_the_mask_it_was_generated_for(
    window: tuple[int, int], limits: tuple[int, int], tmp_path: Path
) -> None:
    """A window that hides nothing is generated as causal or without a mask, and such kernels refuse limits."""
    torch = pytest.importorskip("torch")
    from tilecast.validation.lab.measure.subjects import _from_file

    work = Workload(1, 2, 1, 8, 8, 64, 64, "window", window)
    path = tmp_path / "kernel.py"
    path.write_text(f"{FILE}\nWINDOW = {window}\n")
    inputs = (torch.zeros(1, 2, 8, 64), torch.zeros(1, 1, 8, 64), torch.zeros(1, 1, 8, 64))
    made = _from_file(path, "triton", "", f"sha{window[0]}{window[1]}")
    run, _ = made.prepare(work, inputs)
    run()
    assert sys.modules[f"tilecast_measured_{made.source_sha}"].CALLS[0] == ("plan", *limits)


BYTES = """
CALLS = []
OPTIONS = {}
PREPARE_WARPS = 4
LOG2E = 1.4426950408889634


def workspaces(v):
    return (v.new_empty(v.shape),)


def plan(q, k, v, out, lse, q_descale, k_descale, v_descale, v_t, window_left, window_right):
    CALLS.append(("plan", window_left, window_right))
    return (Kernel("prepare"), (1, 1, 1), (v, v_t)), (Kernel("attention"), (2, 1, 1), (q, v_t, out))


class Kernel:
    def __init__(self, name):
        self.name = name

    def __getitem__(self, grid):
        return self.start

    def start(self, *arguments, **options):
        CALLS.append((self.name, len(arguments)))
        if self.name == "attention":
            arguments[2].fill_(1.0)


def launch(q, k, v, out, lse, scale, window_left=-1, window_right=-1):
    raise AssertionError("V is not brought along its keys again")
"""


def test_of_kernels_in_e4m3_attention_alone_is_timed(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from tilecast.validation.lab.measure.subjects import subject

    work = Workload(1, 2, 1, 8, 8, 64, 64, dtype="fp8")
    path = tmp_path / "kernel.py"
    path.write_text(BYTES)
    inputs = tuple(torch.zeros(1, heads, 8, 64).to(torch.float8_e4m3fn) for heads in (2, 1, 1))
    made = subject(Item("file", str(path), work, "h200-sxm"), "test")
    run, output = made.prepare(work, inputs)
    for _ in range(3):
        run()
    assert output().dtype == torch.bfloat16 and (output() == 1.0).all()
    calls = sys.modules[f"tilecast_measured_{made.source_sha}"].CALLS
    assert calls == [("plan", -1, -1), ("prepare", 2), *[("attention", 4)] * 3]
