"""The simulator in C against the one in Python: the same digits on kept kernels, the same answers without a compiler.

Programs worked out by hand are run by both in `test_sm.py` and `test_fetch.py` (`support.sm_runs`).
"""

from __future__ import annotations

from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sm_runs import run_both

from tilecast.base.data import MEASURED
from tilecast.model.compiled import forecast as forecasts
from tilecast.model.compiled.code import CodeError, KernelCode, load_codes
from tilecast.model.compiled.native import layout, run
from tilecast.model.compiled.sm import Cta, run_sm
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine

H200 = load_machine("h200-sxm")
needs_compiler = pytest.mark.skipif(run.library() is None, reason="no C compiler at hand")


@lru_cache(maxsize=1)
def codes() -> list[KernelCode]:
    return load_codes((MEASURED / "h200_code.txt").read_text(encoding="utf-8"))


def workload(code: KernelCode, rows: int, keys: int) -> Workload:
    window = (500, 0) if code.mask == "window" else None
    return Workload(1, 8, 8, rows, keys, code.head_dim_qk, code.head_dim_v, code.mask, window, code.dtype)


@needs_compiler
@settings(max_examples=12, deadline=None)
@given(st.integers(0, 216), st.integers(100, 2500), st.integers(0, 700), st.sampled_from([1300.0, 1980.0]))
def test_kept_kernels_have_the_same_cycles(at: int, rows: int, more: int, mhz: float) -> None:
    code = codes()[at]
    for kept in (
        forecasts._hopper_run,
        forecasts._hopper_ends,
        forecasts._hopper_tile,
        forecasts._triton_run,
        forecasts._triton_tile,
    ):
        kept.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forecasts, "run_ctas", run_both)
        found = forecasts.forecast(code, workload(code, rows, rows + more), H200, mhz)
    assert found.cycles > 0


@needs_compiler
def test_every_kind_of_instruction_is_among_the_kept_kernels_or_the_programs_by_hand() -> None:
    kinds = {i.kind for code in codes() for consumer in code.consumers for s in consumer for i in s.instructions}
    assert kinds == {"plain", "mma", "mma_wait", "wait", "arrive", "load", "store", "barrier", "spill", "reload"}
    assert any(code.stack_bytes for code in codes())


def test_without_a_compiler_python_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    code = next(c for c in codes() if c.family == "hopper_ws" and c.mask == "none")
    before = forecasts.forecast(code, workload(code, 700, 700), H200, 1500.0).cycles
    forecasts._hopper_run.cache_clear()
    forecasts._hopper_ends.cache_clear()
    forecasts._hopper_tile.cache_clear()
    asked = []
    monkeypatch.setattr(run, "library", lambda: None)
    monkeypatch.setattr(run, "run_sm", lambda *args: asked.append(args) or run_sm(*args))
    assert forecasts.forecast(code, workload(code, 700, 700), H200, 1500.0).cycles == before
    assert asked


def test_warps_that_wait_for_each_other_are_named() -> None:
    costs = forecasts.warp_costs(H200, 1500.0)
    poll = next(i for i in codes()[0].consumers[0][0].instructions if i.kind == "wait")
    with pytest.raises(CodeError, match=r"wait for each other: \('K', 0\)"):
        run.run_ctas([Cta((((poll, ("K", 0)),),), ())], costs, {})


def test_structs_are_laid_out_as_in_c() -> None:
    # Doubles first, then integers: no compiler pads what lies on its own boundary.
    assert layout.INSTRUCTION.itemsize == 8 * 8 + 10 * 4
    assert layout.PIECE.itemsize == 9 * 4
    assert layout.PROGRAM.itemsize == 6 * 4 + 8
    assert (layout.COPY.itemsize, layout.OWN.itemsize, layout.CTA.itemsize) == (40, 24, 24)
