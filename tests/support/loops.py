"""Loops written by hand and drawn at random, for the tests of bounds, schedules and patterns."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import strategies as st

from tilecast.model.pipeline.graph import Buffer, Edge, Op, Pipeline, Role, Step


def pipeline(
    ops: tuple[Op, ...],
    edges: tuple[Edge, ...],
    roles: tuple[Role, ...],
    buffers: tuple[Buffer, ...] = (),
    name: str = "by hand",
    rows: int = 128,
) -> Pipeline:
    """A pipeline whose descriptive fields do not matter."""
    return Pipeline(name, "a machine", ops, edges, roles, buffers, rows, 128, 1, 0.0, 0.0)


def chain(*durations: float, distance: int = 1) -> Pipeline:
    """Synchronous operations a, b, c, ... of one role each, closed into a ring by an edge of ``distance``."""
    names = [chr(ord("a") + n) for n in range(len(durations))]
    ops = tuple(Op(n, "work", f"r{n}", (), d) for n, d in zip(names, durations, strict=True))
    edges = tuple(Edge(a, b) for a, b in pairwise(names))
    edges += (Edge(names[-1], names[0], distance),)
    return pipeline(ops, edges, tuple(Role(f"r{n}", (Step(n),)) for n in names))


def blackwell(tiles: int, max_cycles: float = 8.0, latency: float = 2.0, slots: int = 1) -> Pipeline:
    """FA4's loop reduced to its skeleton: per query tile QK, row max, exp and PV (hardware.md: 512 + 1024 +
    512).

    S and P of a tile share ``slots`` pieces of tensor memory: PV of block i must be done before QK of block
    i + slots.
    """
    ops: list[Op] = []
    edges: list[Edge] = []
    roles: list[Role] = []
    matrix: list[Step] = []
    buffers: list[Buffer] = []
    for t in range(tiles):
        soft = f"softmax{t}"
        ops += [
            Op(f"qk{t}", "qk", "mma", (("tensor", 512.0),), 512.0, "tensor", 16.0, t),
            Op(f"max{t}", "row max", soft, (("alu", max_cycles / 2),), max_cycles, tile=t),
            Op(f"exp{t}", "exp", soft, (("mufu", 1024.0),), 1024.0, tile=t),
            Op(f"pv{t}", "pv", "mma", (("tensor", 512.0),), 512.0, "tensor", 16.0, t),
        ]
        edges += [
            Edge(f"qk{t}", f"max{t}", 0, latency, "data", "S full"),
            Edge(f"max{t}", f"exp{t}", 0, 0.0, "data", "row max"),
            Edge(f"exp{t}", f"pv{t}", 0, latency, "data", "P full"),
            Edge(f"pv{t}", f"qk{t}", slots, 0.0, "buffer", "S/P tensor memory"),
        ]
        roles.append(Role(soft, (Step(f"max{t}"), Step(f"exp{t}")), 4, 176))
        matrix += [Step(f"qk{t}"), Step(f"pv{t}")]
        buffers.append(Buffer(f"S/P {t}", "tmem", 128 * 512, slots, f"qk{t}", f"pv{t}"))
    roles.append(Role("mma", tuple(matrix), 1, 72))
    return pipeline(
        tuple(ops), tuple(edges), tuple(roles), tuple(buffers),
        f"Blackwell skeleton, {tiles} query tile(s), S/P x{slots}", 128 * tiles,
    )  # fmt: skip


def hopper(slots: int, latency: float = 30.0) -> Pipeline:
    """FA3's loop reduced to one warpgroup of 64 rows: it issues its own QK and PV and does the softmax in
    between.

    64x128x128 takes 2*64*128*128/4096 = 512 cycles of wgmma and 64*128/16 = 512 of MUFU.  S becomes P in
    place; with ``slots`` 2 there are registers for a second S.
    """
    wg = "consumer"
    ops = (
        Op("qk", "qk", wg, (("tensor", 512.0),), 512.0, "tensor", 16.0, 0),
        Op("max", "row max", wg, (("alu", 100.0),), 140.0, tile=0),
        Op("exp", "exp", wg, (("mufu", 512.0),), 560.0, tile=0),
        Op("rescale", "rescale", wg, (("fma", 64.0),), 100.0, tile=0),
        Op("pv", "pv", wg, (("tensor", 512.0),), 512.0, "tensor", 16.0, 0),
    )
    edges = (
        Edge("qk", "max", 0, latency, "data", "S accumulator"),
        Edge("max", "exp", 0, 0.0, "data", "row max"),
        Edge("max", "rescale", 0, 0.0, "data", "row max"),
        Edge("exp", "pv", 0, 0.0, "data", "P registers"),
        Edge("pv", "rescale", 1, latency, "data", "O accumulator"),
        Edge("rescale", "pv", 0, 0.0, "data", "O rescaled"),
        Edge("pv", "qk", slots, 0.0, "buffer", "S/P registers"),
    )
    program = tuple(Step(name) for name in ("qk", "max", "exp", "rescale", "pv"))
    registers = Buffer("S/P", "registers", 64 * 128 * 4, slots, "qk", "pv")
    name = f"Hopper skeleton, one warpgroup, S x{slots}"
    return pipeline(ops, edges, (Role(wg, program, 4, 240),), (registers,), name, 64)


@st.composite
def random_loops(draw: st.DrawFn, most_ops: int = 7, longest: int = 40, whole: bool = False) -> Pipeline:
    """Loops that cannot deadlock: edges within an iteration and programs follow the operations' numbers."""
    count = draw(st.integers(2, most_ops))
    cycles = st.integers(1, longest) if whole else st.integers(4, 4 * longest).map(lambda n: n / 4)
    role_count = draw(st.integers(1, min(3, count)))
    ops = []
    for n in range(count):
        duration = float(draw(cycles))
        role = f"r{n % role_count}"
        engine = draw(st.sampled_from(["", "", "tensor", "tma"]))
        demand: tuple[tuple[str, float], ...] = ()
        if engine == "tensor":
            demand = (("tensor", duration),)
        elif engine == "":
            share = draw(st.sampled_from([0.0, 0.5, 1.0]))
            part = float(int(duration * share)) if whole else duration * share
            demand = (("mufu", part),) if part else ()
        issue = float(draw(st.integers(0, 2))) if engine else 0.0
        ops.append(Op(f"op{n}", "work", role, demand, duration, engine, issue, n % 2))
    edges = []
    for _ in range(draw(st.integers(1, 2 * count))):
        a, b = draw(st.integers(0, count - 1)), draw(st.integers(0, count - 1))
        distance = draw(st.integers(0 if a < b else 1, 2))
        latency = float(draw(st.integers(0, longest // 4)))
        edges.append(Edge(f"op{a}", f"op{b}", distance, latency, draw(st.sampled_from(["data", "buffer", "order"]))))
    roles = tuple(Role(f"r{r}", tuple(Step(op.name) for op in ops if op.role == f"r{r}")) for r in range(role_count))
    return pipeline(tuple(ops), tuple(edges), roles)
