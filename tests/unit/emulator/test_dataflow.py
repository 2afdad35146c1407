"""Where values come from: nearest first, through calls, named tuples and memory, and not through what is right already."""

from __future__ import annotations

import ast

import numpy as np
import pytest

from tilecast.emulator.dataflow import Dataflow
from tilecast.emulator.rows import Rows
from tilecast.emulator.verify import scaled_by

TEXT = """\
State = namedtuple("State", "top total")
LN2 = gl.constexpr(0.69)
ROWS = gl.constexpr(64)


def scores(q, k):
    return warpgroup_mma(q, k, zero)


def hidden(s, key):
    return gl.where(key < 3, s, float("-inf"))


def step(s, before):
    top = gl.maximum(before.top, gl.max(s, 1))
    factor = gl.exp2(before.top - top)
    return gl.exp2(s - top), State(top, before.total * factor), factor


def role(q, k, cell, out):
    s = hidden(scores(q, k), 0)
    state = State(gl.max(s, 1), gl.sum(s, 1))
    p, state, factor = step(s, state)
    cell.rows.store(gl.log2(state.total) * LN2)
    n = 0
    n += 1
    finish(cell, out, n)


def finish(cell, out, n):
    got = cell.rows.load()
    gl.store(out + n * ROWS, got + 1.0, mask=got > 0)
"""


def lines(*chain: str, argument: int = 0, **stops: bool) -> list[str]:
    text = TEXT.splitlines()
    places = [next(i for i, line in enumerate(text, 1) if start in line) for start in chain]
    return [text[n - 1].strip() for n in Dataflow(ast.parse(TEXT)).lines(places, 20, argument, **stops)]  # type: ignore[arg-type]


def test_a_value_is_followed_through_memory_and_the_elements_of_what_calls_return() -> None:
    found = lines("gl.store(out", "finish(cell, out, n)", argument=1)
    assert found[:4] == [
        "gl.store(out + n * ROWS, got + 1.0, mask=got > 0)",
        "cell.rows.store(gl.log2(state.total) * LN2)",
        "LN2 = gl.constexpr(0.69)",
        "state = State(gl.max(s, 1), gl.sum(s, 1))",
    ]
    assert "factor = gl.exp2(before.top - top)" in found
    # What only passes a value on comes last; counters, extents, masks of scores and products that were right do not come.
    assert found.index("got = cell.rows.load()") > found.index("factor = gl.exp2(before.top - top)")
    assert not {"n += 1", "ROWS = gl.constexpr(64)", "return warpgroup_mma(q, k, zero)"} & set(found)
    assert not any("-inf" in line for line in found)


def test_the_other_argument_is_another_question() -> None:
    assert lines("gl.store(out", "finish(cell, out, n)") == [
        "gl.store(out + n * ROWS, got + 1.0, mask=got > 0)",
        "finish(cell, out, n)",
    ]


RING = """\
Ring = namedtuple("Ring", "tiles full empty")


@gluon.jit
def slot_of(turn, part, piece):
    return turn * 2 + part, piece


@gluon.jit
def signal(bars, slot):
    mbarrier.arrive(bars.index(slot), count=1)


@gluon.jit
def await_(bars, slot):
    mbarrier.wait(bars.index(slot), 0)


@gluon.jit
def role(ring, weights, turn):
    slot, lap = slot_of(turn, 0, 1)
    await_(ring.empty, slot)
    full = ring.full.index(slot)
    mbarrier.expect(full, 64)
    tma.async_load(desc, [0, 0], full, ring.tiles.index(slot))
    signal(ring.empty, slot)
    signal(sums.empty, slot)
    x = gl.load(weights + lap)
    gl.store(out, x)
"""


def test_who_is_given_a_barrier_under_whatever_name() -> None:
    flow, text = Dataflow(ast.parse(RING)), RING.splitlines()

    def given(name: str) -> list[str]:
        return [text[line - 1].strip() for line, _ in flow.given(name, ("wait",))]

    assert given("ring.full") == [
        "mbarrier.expect(full, 64)",
        "tma.async_load(desc, [0, 0], full, ring.tiles.index(slot))",
    ]
    # Where a helper only waits, no role is signalled.
    assert given("ring.empty") == ["mbarrier.arrive(bars.index(slot), count=1)", "signal(ring.empty, slot)"]
    assert given("other.empty")[1:] == ["signal(ring.empty, slot)", "signal(sums.empty, slot)"]
    assert given("ring.nothing") == []
    # What gives the slots back beside it; and what is never called.
    assert "signal(ring.empty, slot)" in [text[line - 1].strip() for line, _ in flow.beside("ring.full", ("wait",))]
    assert flow.unused() == ["role"]


def test_what_is_loaded_from_global_memory_comes_from_its_address() -> None:
    store = next(i for i, line in enumerate(RING.splitlines(), 1) if "gl.store" in line)
    found = [RING.splitlines()[line - 1].strip() for line in Dataflow(ast.parse(RING)).lines([store], 9, 1)]
    # A call of several arguments, which may be the wrong ones, counts as much as a sum.
    assert found[1:] == [
        "x = gl.load(weights + lap)",
        "slot, lap = slot_of(turn, 0, 1)",
        "return turn * 2 + part, piece",
    ]


def test_a_place_outside_functions_comes_from_nowhere() -> None:
    assert lines("LN2 = ") == []


def test_what_a_run_did_not_execute_is_not_followed() -> None:
    flow = Dataflow(ast.parse(TEXT))
    text = TEXT.splitlines()
    step = next(i for i, line in enumerate(text, 1) if line.startswith("    p, state, factor = step"))
    store = next(i for i, line in enumerate(text, 1) if "cell.rows.store" in line)
    assert step in flow.lines([store], 20)
    flow.left_out = frozenset([step])
    assert step not in flow.lines([store], 20)


def test_rows_are_known_by_their_values() -> None:
    q, k = (np.random.default_rng(seed).standard_normal((1, 2, 3, 8)).astype(np.float16) for seed in (0, 1))
    rows = Rows({"q": q, "k": k}, widths=(4,))
    tile = np.stack([q[0, 1, 2], np.zeros(8, np.float16), k[0, 0, 1]])
    assert rows.of(tile) == [("q", 0, 1, 2), None, ("k", 0, 0, 1)]
    assert rows.of(tile[:, 4:])[0] == ("q", 0, 1, 2)


def test_scores_that_are_scaled_by_another_number_are_told_from_others() -> None:
    s = np.linspace(-6.0, 0.0, 40)
    assert scaled_by(s - 1.5 * s, s) == pytest.approx(1.5)
    assert scaled_by(np.zeros(40), s) is None and scaled_by(np.sin(9 * s), s) is None


BARRIERS = """\
Ring = namedtuple("Ring", "tiles full empty")


@gluon.jit
def barriers(SLOTS: gl.constexpr):
    made = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    INIT
    return made


@gluon.jit
def wait(ring, n):
    mbarrier.wait(ring.full.index(n % 2), n // 2 & 1)


@gluon.jit
def role(q, k, problem):
    n = 0
    turns = 3
    for tile in range(gl.program_id(0), turns, gl.num_programs(0)):
        wait(q, tile)
        wait(k, n)
        n += 1
    first = gl.program_id(0)


def host(x):
    return barriers[(1,)](TensorDescriptor.from_tensor(x, [64, 64]))
"""


def line_of(text: str, part: str) -> int:
    return next(i for i, line in enumerate(text.splitlines(), 1) if part in line)


@pytest.mark.parametrize(
    ("init", "missing"), [("mbarrier.init(made.index(0), count=1)", []), ("pass", [("made", "made = ")])]
)
def test_barriers_that_are_never_initialised(init: str, missing: list[tuple[str, str]]) -> None:
    text = BARRIERS.replace("INIT", init)
    assert Dataflow(ast.parse(text)).not_initialised() == [(name, line_of(text, part)) for name, part in missing]


def test_who_waits_and_what_counts() -> None:
    flow = Dataflow(ast.parse(BARRIERS.replace("INIT", "pass")))
    # The helper waits for whatever ring it is given.
    assert flow.waiting("k.full") == [line_of(BARRIERS, "wait(k, n)")]
    assert flow.counts([line_of(BARRIERS, "mbarrier.wait")]) == [
        line_of(BARRIERS, "n += 1"),
        line_of(BARRIERS, "n = 0"),
    ]
    assert flow.numbered() == [line_of(BARRIERS, "first = ")]
    assert flow.tensor_maps() == [line_of(BARRIERS, "TensorDescriptor")]
    assert flow.beside_each_other(line_of(BARRIERS, "n = 0"), [line_of(BARRIERS, "wait(q")])
    assert not flow.beside_each_other(line_of(BARRIERS, "n = 0"), [line_of(BARRIERS, "made = ")])
