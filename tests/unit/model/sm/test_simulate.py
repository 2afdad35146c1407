"""The SM simulation against exact answers, its own invariants, and the bounds."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilecast.model.families import build_pipeline
from tilecast.model.kernel.variants.fa3 import Fa3Variant
from tilecast.model.kernel.variants.fa4 import Fa4Variant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine
from tilecast.model.pipeline.graph import Buffer, Edge, Op, Pipeline, PipelineError, Role, Step
from tilecast.model.search.best import search_space
from tilecast.model.sm.bounds import bounds
from tilecast.model.sm.fair_share import fair_speeds
from tilecast.model.sm.simulate import _loop_of, critical_recurrence, simulate, steady_state


def op(name: str, role: str, unit: str, cycles: float, engine: str = "", alone: float | None = None) -> Op:
    return Op(name, name, role, ((unit, cycles),), alone or cycles, engine)


def pipeline(ops: list[Op], edges: list[Edge], programs: dict[str, list[Step]]) -> Pipeline:
    roles = tuple(Role(name, tuple(steps)) for name, steps in programs.items())
    return Pipeline("test", "none", tuple(ops), tuple(edges), roles, (Buffer("b", "smem", 1, 1),), 128, 128, 1, 0, 0)


def test_chain_in_one_role_takes_the_sum() -> None:
    p = pipeline([op("a", "r", "fma", 10), op("b", "r", "alu", 7)], [], {"r": [Step("a"), Step("b")]})
    trace = simulate(p, 10)
    assert trace.iteration_end == tuple(17.0 * (i + 1) for i in range(10))
    assert trace.ii_cycles == 17
    assert trace.tile_cycles(1000) == 17_000


def test_two_roles_on_one_unit_share_it_and_on_two_units_do_not() -> None:
    same = pipeline([op("a", "x", "mufu", 10), op("b", "y", "mufu", 10)], [], {"x": [Step("a")], "y": [Step("b")]})
    assert simulate(same, 8).ii_cycles == 20
    other = pipeline([op("a", "x", "mufu", 10), op("b", "y", "fma", 10)], [], {"x": [Step("a")], "y": [Step("b")]})
    assert simulate(other, 8).ii_cycles == 10


def test_latency_on_a_loop_edge_sets_the_period() -> None:
    p = pipeline(
        [op("a", "x", "tensor", 10, "tensor"), op("b", "y", "mufu", 20)],
        [Edge("a", "b", 0, 5), Edge("b", "a", 1, 3)],
        {"x": [Step("a")], "y": [Step("b")]},
    )
    assert simulate(p, 12).ii_cycles == 38
    looser = pipeline(list(p.ops), [Edge("a", "b", 0, 5), Edge("b", "a", 2, 3)], {"x": [Step("a")], "y": [Step("b")]})
    assert simulate(looser, 24).ii_cycles == pytest.approx(20)  # two in flight: MUFU binds


def test_matrix_engine_serves_in_issue_order_and_undisturbed() -> None:
    p = pipeline(
        [op("m", "x", "tensor", 100, "tensor"), op("s", "y", "regs", 50, alone=50)],
        [],
        {"x": [Step("m")], "y": [Step("s")]},
    )
    crowded = pipeline(
        [Op("m", "m", "x", (("tensor", 100), ("regs", 60)), 100, "tensor"), op("s", "y", "regs", 50)],
        [],
        {"x": [Step("m")], "y": [Step("s")]},
    )
    assert simulate(p, 10).ii_cycles == 100
    trace = simulate(crowded, 12)
    lengths = {e.op: e.end - e.start for e in trace.events if e.iteration == 5}
    assert lengths["m"] == pytest.approx(100)
    # 40 of every 100 cycles of the ports are left: 50 cycles of arithmetic take 125.
    assert lengths["s"] == pytest.approx(125)


def test_deadlock_is_named() -> None:
    p = pipeline(
        [op("a", "x", "fma", 1), op("b", "y", "fma", 1)],
        [Edge("a", "b"), Edge("b", "a")],
        {"x": [Step("a")], "y": [Step("b")]},
    )
    with pytest.raises(PipelineError, match=r"deadlocks: a of block 0, b of block 0"):
        simulate(p, 4)


def test_ill_formed_pipelines_are_refused() -> None:
    a = op("a", "x", "fma", 1)
    with pytest.raises(PipelineError, match="unknown operation 'z'"):
        pipeline([a], [Edge("a", "z")], {"x": [Step("a")]})
    with pytest.raises(PipelineError, match="every operation exactly once"):
        pipeline([a], [], {"x": []})
    with pytest.raises(PipelineError, match="unknown unit 'warp'"):
        pipeline([op("a", "x", "warp", 1)], [], {"x": [Step("a")]})
    with pytest.raises(PipelineError, match="claims to finish in 3"):
        pipeline([op("a", "x", "fma", 5, alone=3)], [], {"x": [Step("a")]})


demands = st.dictionaries(st.sampled_from(["fma", "alu", "mufu", "issue"]), st.floats(0.5, 50), min_size=1)


def test_products_slow_arithmetic_that_shares_their_registers() -> None:
    product = Op("mma", "qk", "a", (("tensor", 10.0),), 10.0, engine="tensor", hidden_fma=0.1)
    softmax = Op("exp", "exp", "b", (("fma", 5.0),), 10.0, instructions=(("fma", 5.0),), beside_mma_cycles=20.0)
    assert fair_speeds((softmax,)) == (1.0,)
    # At half its speed it issues 0.25 FMA a cycle, 0.15 more than the product hides.
    assert fair_speeds((product, softmax)) == (pytest.approx(0.85), 0.5)
    unlike = Op("rest", "exp", "c", (("alu", 10.0),), 10.0)
    assert fair_speeds((product, softmax, unlike))[2] == 1.0


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(demands, st.floats(1.0, 3.0)), min_size=1, max_size=6))
def test_fair_speeds_are_feasible_and_maximal(items: list) -> None:
    ops = tuple(Op(f"o{i}", "k", "r", tuple(d.items()), max(d.values()) * slack) for i, (d, slack) in enumerate(items))
    speeds = fair_speeds(ops)
    load: dict[str, float] = {}
    for o, s in zip(ops, speeds, strict=True):
        assert 0 < s <= 1 + 1e-9
        for unit, cycles in o.demand:
            load[unit] = load.get(unit, 0) + s * cycles / o.min_cycles
    assert all(value <= 1 + 1e-6 for value in load.values())
    for o, s in zip(ops, speeds, strict=True):  # no operation below full speed without a full unit
        assert s > 1 - 1e-9 or any(load[unit] > 1 - 1e-6 for unit, _ in o.demand)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 40), st.sampled_from(["fma", "alu", "mufu"])), min_size=2, max_size=5),
       st.integers(1, 3), st.integers(0, 20))  # fmt: skip
def test_simulated_period_never_beats_the_bounds(work: list, depth: int, latency: int) -> None:
    ops = [op(f"o{i}", f"r{i % 2}", unit, cycles) for i, (cycles, unit) in enumerate(work)]
    edges = [Edge(f"o{i}", f"o{i + 1}", 0, latency) for i in range(len(ops) - 1)]
    edges.append(Edge(ops[-1].name, "o0", depth, latency))
    programs = {f"r{k}": [Step(o.name) for o in ops if o.role == f"r{k}"] for k in (0, 1)}
    p = pipeline(ops, edges, programs)
    trace = steady_state(p)
    assert trace.ii_cycles >= bounds(p).ii_lower * (1 - 1e-3)


VARIANTS = [
    ("b200", Fa4Variant(cta_group=2, emulated_share=0.1875), Workload()),
    ("b300", Fa4Variant(cta_group=1), Workload(mask="causal")),
    ("b200", Fa4Variant(cta_group=2, split="k"), Workload(head_dim_qk=256, head_dim_v=256)),
    ("h200-sxm", Fa3Variant(), Workload()),
    ("h200-sxm", Fa3Variant(warpgroups=3, overlap=False), Workload(head_dim_qk=64, head_dim_v=64)),
]


@pytest.mark.parametrize(("machine", "variant", "workload"), VARIANTS)
def test_skip_ahead_equals_the_long_simulation(machine: str, variant: object, workload: Workload) -> None:
    p = build_pipeline(workload, variant, load_machine(machine))
    short = steady_state(p)
    long = simulate(p, 60)
    assert short.periodic
    assert short.tile_cycles(60) == pytest.approx(long.iteration_end[-1], rel=2e-3)


@pytest.mark.parametrize(("machine", "variant", "workload"), VARIANTS)
def test_real_pipelines_respect_their_bounds_and_edges(machine: str, variant: object, workload: Workload) -> None:
    p = build_pipeline(workload, variant, load_machine(machine))
    trace = steady_state(p)
    assert trace.ii_cycles >= bounds(p).ii_lower * 0.999
    assert all(share <= 1 + 1e-9 for share in trace.unit_shares().values())
    when = {(e.op, e.iteration): e for e in trace.events}
    for edge in p.edges:
        for (name, iteration), event in when.items():
            source = when.get((edge.src, iteration - edge.distance))
            if name == edge.dst and source is not None:
                assert event.start >= source.end + edge.latency_cycles - 1e-3 or p.op(name).engine == "tensor"


def test_critical_recurrence_adds_up_to_the_period() -> None:
    p = build_pipeline(Workload(), Fa4Variant(cta_group=2, emulated_share=0.1875), load_machine("b200"))
    trace = steady_state(p)
    steps = critical_recurrence(trace)
    assert [s.op.rstrip("01ab") for s in steps] == ["qk", "max", "exp", "pv", "pv"]
    total = sum(s.alone_cycles + s.contention_cycles + s.wait_cycles for s in steps)
    assert total == pytest.approx(trace.ii_cycles, rel=0.01)


def test_loops_of_a_search_are_told_apart_by_their_hashes() -> None:
    """Those that share one are compared value by value, which for a hundred takes longer than their simulations."""
    machine = load_machine("b300")
    loops = set()
    for mask in ("none", "causal"):
        work = Workload(head_dim_qk=64, mask=mask)
        loops |= {_loop_of(build_pipeline(work, v, machine)) for v in search_space(work, machine, "fa4").variants[::7]}
    assert len(loops) > 400
    assert max(Counter(map(hash, loops)).values()) <= 4
