"""Bounds: exact answers on small graphs, and cycle enumeration on random ones."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
from hypothesis import given, settings
from support import loops

from tilecast.model.pipeline.graph import Edge, Op, Pipeline, PipelineError, Role, Step
from tilecast.model.sm.bounds import bounds, rec_mii, res_mii


def test_busiest_unit() -> None:
    res = res_mii(loops.blackwell(2))
    assert (res.unit, res.cycles) == ("tensor", 2048.0)
    assert res.per_unit["mufu"] == 2048.0
    assert res.per_role == {"softmax0": 1032.0, "softmax1": 1032.0, "mma": 64.0}


def test_ring_is_latency_over_distance() -> None:
    rec = rec_mii(loops.chain(10.0, 20.0, 30.5), with_roles=False)
    assert (rec.cycles, rec.latency, rec.distance) == (60.5, 60.5, 1)
    assert set(rec.ops_on_cycle) == {"a", "b", "c"}
    assert rec_mii(loops.chain(10.0, 20.0, 30.5, distance=2), with_roles=False).cycles == 30.25


def test_a_third_is_exact() -> None:
    rec = rec_mii(loops.chain(1.0, 9.0, distance=3), with_roles=False)
    assert Fraction(rec.latency) / rec.distance == Fraction(10, 3)


def test_a_role_is_a_recurrence_of_its_own() -> None:
    ops = (Op("a", "x", "r", (), 7.0), Op("b", "x", "r", (), 5.0), Op("c", "x", "r", (), 100.0, "tma", 3.0))
    loop = loops.pipeline(ops, (), (Role("r", (Step("a"), Step("b"), Step("c"))),))
    assert rec_mii(loop).cycles == 15.0
    assert rec_mii(loop, with_roles=False).edges == ()
    assert bounds(loop).binding == "role r"


def test_shift_moves_a_step_to_the_next_block() -> None:
    """Issuing QK of the next block before the softmax of this one takes QK out of the recurrence."""
    ops = (Op("qk", "qk", "r", (("tensor", 50.0),), 50.0, "tensor", 1.0), Op("soft", "exp", "r", (), 60.0))
    edges = (Edge("qk", "soft", 0, 5.0),)
    in_turn = loops.pipeline(ops, edges, (Role("r", (Step("qk"), Step("soft"))),))
    ahead = loops.pipeline(ops, edges, (Role("r", (Step("qk", 1), Step("soft"))),))
    assert rec_mii(in_turn).cycles == 50.0 + 5.0 + 60.0
    assert rec_mii(ahead).cycles == 61.0


def test_matrix_engine_serves_one_role_in_order() -> None:
    """QK of the next block queues behind PV when the program says so: the recurrence runs through that."""
    rec = rec_mii(loops.hopper(2))
    assert "matrix engine in order" in {edge.why for edge in rec.edges}
    assert rec.cycles == 512 + 30 + 140 + 560 + 100 + 512


def test_binding_and_slack() -> None:
    limit = bounds(loops.blackwell(2, max_cycles=300.0, latency=100.0), with_roles=False)
    assert limit.ii_lower == 512 + 100 + 300 + 1024 + 100 + 512
    assert limit.binding == "recurrence"
    assert limit.slack["tensor"] == limit.ii_lower - 2048
    assert limit.slack_fraction["tensor"] == pytest.approx(1 - 2048 / 2548)
    assert limit.slack["recurrence"] == 0.0


def test_deadlock_names_the_cycle() -> None:
    loop = loops.chain(1.0, 2.0, distance=0)
    with pytest.raises(PipelineError, match=r"a -> b -> a|b -> a -> b"):
        rec_mii(loop, with_roles=False)


def test_program_against_the_data_is_a_deadlock() -> None:
    ops = (Op("a", "x", "r", (), 1.0), Op("b", "x", "r", (), 1.0))
    loop = loops.pipeline(ops, (Edge("a", "b"),), (Role("r", (Step("b"), Step("a"))),))
    assert rec_mii(loop, with_roles=False).cycles == 0.0
    with pytest.raises(PipelineError, match="deadlocks"):
        rec_mii(loop)


def _all_links(loop: Pipeline, with_roles: bool) -> list[tuple[str, str, Fraction, int]]:
    """Every timed dependence, written down from the rules and not from the code under test."""
    links = []
    for edge in loop.edges:
        src = loop.op(edge.src)
        end = src.name + "!" if src.engine == "tensor" else src.name
        links.append((end, edge.dst, Fraction(src.min_cycles) + Fraction(edge.latency_cycles), edge.distance))
    links += [(op.name, op.name + "!", Fraction(0), 0) for op in loop.ops if op.engine == "tensor"]
    for role in loop.roles if with_roles else ():
        lap = [(loop.op(step.op), step.shift) for step in role.program]
        twice = lap + [(op, shift + 1) for op, shift in lap]
        for (a, sa), (b, sb) in list(itertools.pairwise(twice))[: len(lap)]:
            busy = a.issue_cycles if a.engine else a.min_cycles
            links.append((a.name, b.name, Fraction(busy), sb - sa))
        queue = [item for item in twice if item[0].engine == "tensor"]
        for (a, sa), (b, sb) in list(itertools.pairwise(queue))[: len(queue) // 2]:
            links.append((a.name + "!", b.name + "!", Fraction(a.min_cycles), sb - sa))
    return links


def _heaviest_by_enumeration(links: list[tuple[str, str, Fraction, int]]) -> Fraction:
    import networkx

    graph = networkx.DiGraph((src, dst) for src, dst, _, _ in links)
    heaviest = Fraction(0)
    for cycle in networkx.simple_cycles(graph):
        hops = zip(cycle, cycle[1:] + cycle[:1], strict=True)
        choices = [[(w, h) for s, d, w, h in links if (s, d) == hop] for hop in hops]
        for picked in itertools.product(*choices):
            distance = sum(h for _, h in picked)
            assert distance > 0
            heaviest = max(heaviest, sum((w for w, _ in picked), Fraction(0)) / distance)
    return heaviest


@settings(max_examples=150, deadline=None)
@given(loops.random_loops())
def test_recurrence_equals_enumeration(loop: Pipeline) -> None:
    for with_roles in (False, True):
        rec = rec_mii(loop, with_roles=with_roles)
        assert rec.cycles == float(_heaviest_by_enumeration(_all_links(loop, with_roles)))
        if rec.edges:
            assert rec.distance == sum(edge.distance for edge in rec.edges)
            assert rec.cycles == pytest.approx(rec.latency / rec.distance)
            for edge, following in zip(rec.edges, rec.edges[1:] + rec.edges[:1], strict=True):
                assert edge.dst == following.src


@settings(max_examples=100, deadline=None)
@given(loops.random_loops())
def test_bounds_are_consistent(loop: Pipeline) -> None:
    limit = bounds(loop)
    assert limit.ii_lower >= max(limit.res.cycles, limit.rec.cycles, *limit.res.per_role.values())
    if limit.slack:
        assert min(limit.slack.values()) == 0.0
        assert limit.slack[limit.binding] == pytest.approx(0.0, abs=1e-6)
    else:  # a loop without demand, whose only recurrences take no time
        assert (limit.binding, limit.ii_lower) == ("", 0.0)
    assert bounds(loop, with_roles=False).ii_lower <= limit.ii_lower
