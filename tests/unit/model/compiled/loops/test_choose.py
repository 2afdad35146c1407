"""The best variant by machine code, and that every verb which says "best" at that level says the same."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilecast.model.chip.evaluate import PredictError
from tilecast.model.compiled.evaluate import evaluate_compiled
from tilecast.model.compiled.loops import choose
from tilecast.model.compiled.loops.choose import best_at_hand, best_kept, looked_at
from tilecast.model.compiled.loops.shelf import kept_loop, loop_at_hand, loop_of
from tilecast.model.families import parse_variant
from tilecast.model.forecast.answer import BEFORE, COMPILED
from tilecast.model.forecast.level import settled
from tilecast.model.forecast.predict import predict
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine
from tilecast.model.search.best import best
from tilecast.model.whatif.asymmetry import asymmetry_map
from tilecast.model.whatif.break_even import break_evens
from tilecast.model.whatif.render_rows import map_text
from tilecast.model.whatif.sensitivity import sensitivities
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
    seconds = choose._seconds

    def listening(*args: object) -> float:
        asked[args[2]] = seconds(*args)  # type: ignore[arg-type]
        return asked[args[2]]

    monkeypatch.setattr(choose, "_seconds", listening)
    choose._chosen.cache_clear()
    found = best_at_hand(work, H200, "fa3")
    assert 2 < len({loop_of(variant) for variant in asked}) <= choose.LOOPS  # type: ignore[arg-type]
    assert len(asked) <= choose.LOOPS + choose.SECOND_OF
    assert [variant for variant, _ in looked_at(work, H200, "fa3")] == sorted(asked, key=lambda v: asked[v])
    assert looked_at(work, H200, "fa3")[0] == (found.variant, found.seconds)
    assert asked[found.variant] == min(asked.values())
    # The guess that it was chosen by is close to its time in full.
    assert asked[found.variant] == pytest.approx(found.seconds, rel=0.01)


def test_the_choice_counts_the_clock_that_a_kernel_settles_at() -> None:
    """A loop that keeps the tensor cores busier settles lower."""
    work = Workload(4, 16, seqlen_q=4096, mask="causal")
    found = best_kept(work, H200, "fa3")
    times = dict(looked_at(work, H200, "fa3"))
    clocks = {}
    for variant, guess in times.items():
        full = evaluate_compiled(kept_loop(work.reduced(), H200, variant), work.reduced(), H200, variant, "sustained")
        assert guess == pytest.approx(full.seconds, rel=0.01)
        clocks[variant] = full.clock.mhz
    assert max(clocks.values()) > 1.02 * min(clocks.values())
    assert times[found.variant] == min(times.values())


#: Problems without a loop at hand: another target; windows in e4m3, which do not ship.
WITHOUT = [
    ("b200", Workload(2, 16, seqlen_q=2048)),
    ("h200-sxm", Workload(2, 16, seqlen_q=2048, mask="window", window=(512, 0), dtype="fp8")),
]


@pytest.mark.parametrize(("machine", "work"), WITHOUT, ids=["b200", "window in e4m3"])
def test_where_no_loop_ships_the_answer_is_that_before_compilation(machine: str, work: Workload) -> None:
    kept = predict(work, machine, compiler=loop_at_hand, interval=False)
    fluid = predict(work, machine, compiler=None, interval=False)
    assert (kept.variant, kept.time_ms, kept.variant_origin) == (fluid.variant, fluid.time_ms, fluid.variant_origin)
    assert kept.compiled is None
    assert any("no machine code of this kernel's loop is at hand" in note for note in kept.notes)


@pytest.mark.parametrize(("machine", "work"), WITHOUT, ids=["b200", "window in e4m3"])
def test_where_no_loop_is_at_hand_the_kept_level_refuses(machine: str, work: Workload) -> None:
    with pytest.raises(PredictError, match=r"no loop of fa[34] for .* is at hand: use --level auto or fluid"):
        predict(work, machine, compiler=kept_loop, interval=False)
    variant = best(work, load_machine(machine), "fa4" if machine == "b200" else "fa3").variant
    with pytest.raises(PredictError, match=r"no loop of family=fa[34],.* is at hand: use --level auto or fluid"):
        predict(work, machine, variant, compiler=kept_loop, interval=False)


def test_what_the_search_before_compilation_picks_is_said() -> None:
    work = Workload(4, 16, seqlen_q=4096)
    answer = predict(work, H200, compiler=kept_loop, interval=False)
    fluid = predict(work, H200, compiler=None, interval=False)
    assert answer.compiled is not None and answer.compiled.fluid == (fluid.variant, fluid.time_ms)
    assert answer.variant != fluid.variant
    assert f"fluid pick {fluid.time_ms:.4g} ms" in answer.text()
    assert predict(work, H200, answer.variant, compiler=kept_loop, interval=False).compiled.fluid is None  # type: ignore[union-attr]


def test_a_comparison_stands_on_one_level() -> None:
    """A kernel given by hand whose loop is not at hand is compared, before and after, before compilation."""
    work = Workload(4, 16, seqlen_q=4096)
    strange = parse_variant("fa3:warpgroups=1,tile_n=32,rescale=always")
    assert loop_at_hand(work, H200, strange) is None
    found = what_if(work, H200, {"mufu.ex2": 32}, variant=strange, compiler=loop_at_hand)
    levels = {found.before.level, found.after.level, found.kept.level if found.kept else ""}
    assert levels == {BEFORE}
    assert settled(loop_at_hand, work, H200, strange) is None
    assert settled(loop_at_hand, work, H200) is kept_loop
    assert settled(None, work, H200) is None


def test_sensitivities_and_break_evens_follow_the_kept_code() -> None:
    work = Workload(1, 16, seqlen_q=2048)
    rows = sensitivities(work, H200, clock=1500.0, compiler=loop_at_hand)
    assert rows.level == COMPILED and "from machine code" in rows.text().splitlines()[0]
    slopes = {row.fact: row for row in rows}
    # Only the simulators of machine code know how deep the matrix unit's queue is, and only those of the kept loop.
    assert "tensor.bf16_flop_per_clk" in slopes
    again = slopes["tensor.bf16_flop_per_clk"]
    changed = H200.with_facts({"tensor.bf16_flop_per_clk": again.high})
    assert (
        again.high_ms == predict(work, changed, rows.variant, clock=1500.0, compiler=kept_loop, interval=False).time_ms
    )
    assert again.high_reoptimised_ms <= again.high_ms
    points = break_evens(work, H200, facts=("mufu.ex2",), clock=1500.0, compiler=loop_at_hand)
    assert points.level == COMPILED and points.variant == rows.variant


def test_a_map_chooses_among_the_loops_at_hand() -> None:
    work = Workload(1, 16, seqlen_q=2048)
    found = asymmetry_map(work, H200, grid=3, shown=(), clock=1300.0, compiler=loop_at_hand)
    assert found.level == COMPILED and ", from machine code;" in map_text(found)
    chosen = {parse_variant(text) for row in found.variants for text in row}
    assert all(loop_at_hand(work, H200, variant) for variant in chosen)
    cell = H200.with_facts({found.x_fact: found.x[2], found.y_fact: found.y[0]})
    variant = parse_variant(found.variants[0][2])
    assert found.tflops[0][2] == predict(work, cell, variant, clock=1300.0, compiler=kept_loop, interval=False).tflops


def test_machine_code_at_hand_is_the_default_and_its_own_error_is_quoted() -> None:
    work = Workload(4, 16, seqlen_q=4096)
    answer = predict(work, H200, interval=False)
    assert (
        answer.level == COMPILED and answer.time_ms == predict(work, H200, compiler=kept_loop, interval=False).time_ms
    )
    assert "from loops at hand on h200-sxm" in answer.model_error.where
    before = predict(work, H200, compiler=None, interval=False)
    assert before.level == BEFORE and "loops" not in before.model_error.where and not before.notes
    # Where no loops are kept at all nothing is missed, and what authors ship is not our code.
    assert not predict(work, "b200", interval=False).notes
    assert predict(work, H200, published=True, interval=False).level == BEFORE


def test_loops_at_hand_answer_only_near_the_best_of_all_variants() -> None:
    """A decode step wants tiles that no loop at hand has."""
    work = Workload(2, 16, seqlen_q=1, mask="causal")
    fluid, kept = (
        best(work, H200, "fa3"),
        choose._chosen(work.reduced(), H200, "fa3", "sustained", choose.loops_digest()),
    )
    assert kept is not None and kept.before_seconds > choose.ANSWERS_WITHIN * fluid.seconds
    answer = predict(work, H200, interval=False)
    assert (answer.level, answer.variant) == (BEFORE, fluid.variant)
    assert any("no machine code of this kernel's loop is at hand" in note for note in answer.notes)
