"""The best variant by machine code, and that every verb which says "best" at that level says the same."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilecast.model.chip.evaluate import evaluate
from tilecast.model.compiled.forecast import forecast
from tilecast.model.compiled.loops import choose
from tilecast.model.compiled.loops.choose import best_at_hand
from tilecast.model.compiled.loops.shelf import loop_at_hand
from tilecast.model.forecast.predict import predict
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine
from tilecast.model.search.best import best
from tilecast.model.whatif.what_if import what_if

H200 = load_machine("h200-sxm")


def shapes() -> st.SearchStrategy[Workload]:
    return st.builds(
        lambda batch, rows, dim, causal: Workload(batch, 16, 16, rows, rows, dim, dim, "causal" if causal else "none"),
        st.integers(1, 8), st.integers(300, 9000), st.sampled_from([64, 128, 256]), st.booleans(),
    )  # fmt: skip


@settings(max_examples=4, deadline=None)
@given(shapes())
def test_every_verb_gives_the_same_kernel_and_time(work: Workload) -> None:
    found = best_at_hand(work, H200, "fa3")
    answer = predict(work, H200, compiler=loop_at_hand, interval=False)
    assert answer.variant == found.variant
    assert answer.time_ms == pytest.approx(found.seconds * 1e3, rel=1e-12)
    assert answer.variant_origin == found.scope
    # A problem too small for any loop that ships is answered before compilation.
    assert (answer.compiled is None) == (loop_at_hand(work.reduced(), H200, found.variant) is None)
    # The same variant, given by hand, is the same forecast.
    given_by_hand = predict(work, H200, answer.variant, compiler=loop_at_hand, interval=False)
    assert given_by_hand.time_ms == answer.time_ms
    before = what_if(work, H200, {}, {"hbm": 1.0000001}, compiler=loop_at_hand).before
    assert (before.variant, before.time_ms) == (answer.variant, answer.time_ms)


def test_what_is_chosen_is_the_fastest_of_those_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Workload(4, 16, seqlen_q=2048, mask="causal")
    asked: dict[object, float] = {}
    cycles = choose._cycles

    def listening(*args: object) -> float:
        asked[args[2]] = cycles(*args)  # type: ignore[arg-type]
        return asked[args[2]]

    monkeypatch.setattr(choose, "_cycles", listening)
    best_at_hand.cache_clear()
    found = best_at_hand(work, H200, "fa3")
    assert 2 < len(asked) <= choose.LOOPS * choose.PER_LOOP
    assert asked[found.variant] == min(asked.values())
    # At the clock of the best before compilation, from its own machine code.
    mhz = evaluate(work.reduced(), H200, best(work, H200, "fa3").variant, "sustained").clock.mhz
    made = loop_at_hand(work.reduced(), H200, found.variant)
    assert made is not None and made.code is not None
    assert asked[found.variant] == forecast(made.code, work.reduced(), H200, mhz).cycles


@pytest.mark.parametrize(("machine", "dtype"), [("b200", "bf16"), ("h200-sxm", "fp8")])
def test_where_no_loop_ships_the_answer_is_that_before_compilation(machine: str, dtype: str) -> None:
    work = Workload(2, 16, seqlen_q=2048, dtype=dtype)
    kept = predict(work, machine, compiler=loop_at_hand, interval=False)
    fluid = predict(work, machine, interval=False)
    assert (kept.variant, kept.time_ms, kept.variant_origin) == (fluid.variant, fluid.time_ms, fluid.variant_origin)
    assert kept.compiled is None
