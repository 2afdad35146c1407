"""The tuner's rules: who is alike, who is sampled, what is a tie and who wins it."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tilecast.codegen.tune.structure import Timed, diverse, is_tie, pick_winner, sample, structure, tile
from tilecast.model.kernel.variants.fa3 import Fa3Variant

BASE = Fa3Variant(tile_n=64, ping_pong=False)
OTHER = replace(BASE, warpgroups=3)
VARIANTS = [
    replace(base, kv_stages=kv, emulated_share=share)
    for base in (BASE, OTHER, replace(BASE, rescale="anchored"))
    for kv in (2, 3, 4)
    for share in (0.0, 0.125)
]


def timed(seconds: float, spread: float = 0.001, **more: object) -> Timed:
    return Timed(more.pop("variant", BASE), more.pop("order", 0), seconds, seconds - spread, seconds + spread, **more)  # type: ignore[arg-type]


def test_depth_and_shares_do_not_make_a_structure() -> None:
    assert structure(BASE) == structure(replace(BASE, kv_stages=4, q_stages=2, scheduler="paired", emulated_share=0.25))
    assert structure(BASE) != structure(replace(BASE, rescale="anchored"))
    assert tile(BASE) == tile(replace(BASE, rescale="anchored", overlap=False))


@given(st.lists(st.sampled_from(VARIANTS), unique=True), st.integers(1, 8), st.integers(1, 3))
def test_diverse_keeps_the_order_the_leader_and_its_promise(ordered, count, most) -> None:
    chosen = diverse(ordered, lambda v: v, count, structure, most)
    assert len(chosen) == min(count, len(ordered))
    assert list(chosen) == [v for v in ordered if v in set(chosen)]
    if ordered:
        assert chosen[0] == ordered[0]
    kinds = [structure(v) for v in chosen]
    if max(map(kinds.count, kinds), default=0) > most:
        # Only where the others ran out: everything else that differs is already in.
        left = {structure(v) for v in ordered if v not in set(chosen)}
        assert all(kinds.count(kind) >= most for kind in left)


def test_a_sample_takes_every_structure_in_turn_and_always_the_same() -> None:
    chosen = sample(VARIANTS, 7, [VARIANTS[5], replace(BASE, kv_stages=7)])
    assert chosen[0] == VARIANTS[5]
    assert len(chosen) == len(set(chosen)) == 7
    assert {structure(v) for v in chosen[1:4]} == {structure(v) for v in VARIANTS}
    assert chosen == sample(list(reversed(VARIANTS)), 7, [VARIANTS[5]])
    assert sorted(map(repr, sample(VARIANTS, 99))) == sorted(map(repr, VARIANTS))


def test_two_percent_is_a_tie_and_so_is_what_the_intervals_allow() -> None:
    assert is_tie(timed(1.019), timed(1.0))
    assert not is_tie(timed(1.021), timed(1.0))
    assert is_tie(timed(1.05, 0.04), timed(1.0, 0.04))
    assert not is_tie(timed(1.06, 0.04), timed(1.0, 0.04))


def test_a_tie_goes_to_no_spills_then_registers_then_the_plainer_then_the_earlier() -> None:
    fast = timed(1.0, order=5, registers=168, spill_bytes=8)
    assert pick_winner([fast, timed(1.01, order=9, registers=240)])[0] == 1
    assert pick_winner([replace(fast, spill_bytes=0), timed(1.01, order=9, registers=128)])[0] == 1
    fancy = replace(BASE, emulated_share=0.25)
    assert pick_winner([timed(1.0, variant=fancy, order=1), timed(1.01, variant=BASE, order=2)])[0] == 1
    assert pick_winner([timed(1.01, order=2), timed(1.0, order=3)])[0] == 0
    # Not a tie: the faster one, whatever it is.
    index, ties = pick_winner([timed(1.03, registers=24), fast])
    assert (index, ties) == (1, (1,))
