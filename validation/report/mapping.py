"""The map of asymmetric machines: matrix rate against exponential rate."""

from __future__ import annotations

from tilecast.model.machine import load_machine, machine_names
from tilecast.model.predict import Prediction
from tilecast.model.quick import quick
from tilecast.validation.report.content import Map, Placed


def rate_map(p: Prediction, clock: str | float) -> Map:
    m, w = p.machine, p.workload
    key = f"tensor.{w.dtype}_flop_per_clk"
    xs = tuple(1024 * 2 ** (i / 3) for i in range(16))
    ys = tuple(4 * 2 ** (i / 3) for i in range(16))
    f = lambda x, y: quick(w, m.with_facts({key: x, "mufu.ex2_per_clk": y}), p.variant, clock)
    grid = [[f(x, y) for x in xs] for y in ys]
    placed = []
    for name in machine_names():
        other = load_machine(name)
        if other.has(key) and other.tensor_kind in ("tcgen05", "wgmma"):
            q = f(other[key], other["mufu.ex2_per_clk"])
            placed.append(Placed(name, other[key], other["mufu.ex2_per_clk"], q.tflops, q.bound_by))
    return Map(
        key,
        "mufu.ex2_per_clk",
        xs,
        ys,
        tuple(tuple(q.tflops for q in r) for r in grid),
        tuple(tuple(q.bound_by for q in r) for r in grid),
        tuple(placed),
        "note",
    )
