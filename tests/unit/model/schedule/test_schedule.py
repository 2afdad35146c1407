"""The modulo scheduler against its checker, against brute force, and against damaged schedules."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from support import loops

from tilecast.model.machine.machine import load_machine
from tilecast.model.pipeline.graph import Buffer, Edge, Op, Pipeline, PipelineError, Role, Step
from tilecast.model.schedule.check import check_schedule
from tilecast.model.schedule.solve import Schedule, Storage, optimal_schedule, storage_of
from tilecast.model.sm.bounds import bounds

B200 = storage_of(load_machine("b200"))
SLOW = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@SLOW
@given(loops.random_loops(), st.booleans())
def test_every_schedule_passes_the_checker(loop: Pipeline, program_order: bool) -> None:
    schedule = optimal_schedule(loop, respect_program_order=program_order, time_limit_s=5.0)
    assert schedule.status in ("optimal", "feasible")
    assert check_schedule(loop, schedule) == []
    assert schedule.ii_cycles >= bounds(loop, with_roles=program_order).ii_lower - 1e-6
    assert schedule.ii_cycles >= schedule.bound


@SLOW
@given(loops.random_loops())
def test_freedom_never_costs(loop: Pipeline) -> None:
    free = optimal_schedule(loop, time_limit_s=5.0)
    fixed = optimal_schedule(loop, respect_program_order=True, time_limit_s=5.0)
    relaxed = optimal_schedule(loop, exclusive=(), time_limit_s=5.0)
    assume(free.status == fixed.status == relaxed.status == "optimal")
    assert relaxed.ii_cycles <= free.ii_cycles <= fixed.ii_cycles


def test_same_question_same_answer() -> None:
    loop = loops.blackwell(2, 300.0, 100.0)
    assert optimal_schedule(loop) == optimal_schedule(loop)


# -- brute force -----------------------------------------------------------------------------------


def _stages_exist(arcs: list[tuple[str, str, int, int]], offset: dict[str, int], ii: int) -> bool:
    """Whether whole laps can be added to the offsets so that every precedence holds (Bellman-Ford)."""
    lap = dict.fromkeys(offset, 0)
    for _ in range(len(offset) + 1):
        changed = False
        for src, dst, weight, distance in arcs:
            need = -(-(weight + offset[src] - offset[dst]) // ii) - distance
            if lap[dst] < lap[src] + need:
                lap[dst], changed = lap[src] + need, True
        if not changed:
            return True
    return False


def _apart(a: int, hold_a: int, b: int, hold_b: int, ii: int) -> bool:
    return (b - a) % ii >= hold_a and (a - b) % ii >= hold_b if a != b else not (hold_a and hold_b)


def _brute_force_ii(loop: Pipeline, most: int) -> int:
    """Smallest II over all offsets; matrix operations must cost nothing to issue."""
    names = [op.name for op in loop.ops]
    arcs = [(e.src, e.dst, int(loop.op(e.src).min_cycles + e.latency_cycles), e.distance) for e in loop.edges]
    lanes = [[op for op in loop.ops if op.engine == "tensor"]]
    lanes += [[op for op in loop.ops if op.role == role.name and not op.engine] for role in loop.roles]
    lanes.append([op for op in loop.ops if op.cycles("mufu") == op.min_cycles])
    conflicts = [pair for lane in lanes for pair in itertools.combinations(lane, 2)]
    demand = max((sum(int(op.min_cycles) for op in lane) for lane in lanes), default=0)
    for ii in range(max(1, demand), most + 1):
        for rest in itertools.product(range(ii), repeat=len(names) - 1):
            offset = dict(zip(names, (0, *rest), strict=True))
            if all(
                _apart(offset[a.name], int(a.min_cycles), offset[b.name], int(b.min_cycles), ii) for a, b in conflicts
            ) and _stages_exist(arcs, offset, ii):
                return ii
    raise AssertionError("brute force found nothing")


@st.composite
def _tiny_loops(draw: st.DrawFn) -> Pipeline:
    count = draw(st.integers(2, 4))
    ops = []
    for n in range(count):
        duration = float(draw(st.integers(1, 3)))
        engine, unit = draw(st.sampled_from([("", ""), ("", "mufu"), ("tensor", "tensor")]))
        # Matrix operations come from a role of their own and cost nothing to issue.
        role = "mma" if engine else f"r{n % 2}"
        ops.append(Op(f"op{n}", "work", role, ((unit, duration),) if unit else (), duration, engine))
    edges = []
    for _ in range(draw(st.integers(1, 5))):
        a, b = draw(st.integers(0, count - 1)), draw(st.integers(0, count - 1))
        distance = draw(st.integers(0 if a < b else 1, 2))
        edges.append(Edge(f"op{a}", f"op{b}", distance, float(draw(st.integers(0, 2)))))
    names = sorted({op.role for op in ops})
    roles = tuple(Role(name, tuple(Step(op.name) for op in ops if op.role == name)) for name in names)
    return loops.pipeline(tuple(ops), tuple(edges), roles)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(_tiny_loops())
def test_optimum_equals_brute_force(loop: Pipeline) -> None:
    schedule = optimal_schedule(loop, keep_chains=False)
    assert schedule.status == "optimal"
    assert schedule.ii_cycles == _brute_force_ii(loop, schedule.ii_cycles)


def _queue_brute_force_ii(loop: Pipeline, most: int) -> int:
    """Smallest II over all issue offsets and queue waits of up to one II, for a single role."""
    ops, ids = loop.ops, range(len(loop.ops))
    for ii in range(1, most + 1):
        waits = [range(ii + 1) if op.engine else range(1) for op in ops]
        for rest in itertools.product(range(ii), repeat=len(ops) - 1):
            issue = (0, *rest)
            for wait in itertools.product(*waits):
                if _queue_works(loop, ii, ids, issue, wait):
                    return ii
    raise AssertionError("brute force found nothing")


def _queue_works(loop: Pipeline, ii: int, ids: range, issue: tuple[int, ...], wait: tuple[int, ...]) -> bool:
    ops = loop.ops
    held = [int(op.issue_cycles if op.engine else op.min_cycles) for op in ops]
    if any(h > ii for h in held) or any(op.engine and op.min_cycles > ii for op in ops):
        return False
    for a, b in itertools.combinations(ids, 2):
        if not _apart(issue[a], held[a], issue[b], held[b], ii):
            return False
        if ops[a].engine and ops[b].engine:
            apart = issue[b] + wait[b] - issue[a] - wait[a]
            if not any(
                ops[a].min_cycles <= apart + k * ii <= ii - ops[b].min_cycles
                and held[a] <= issue[b] - issue[a] + k * ii <= ii - held[b]
                for k in range(-3, 4)
            ):
                return False
    place = {op.name: n for n, op in enumerate(ops)}
    arcs = [
        (e.src, e.dst, int(wait[place[e.src]] + loop.op(e.src).min_cycles + e.latency_cycles), e.distance)
        for e in loop.edges
    ]
    return _stages_exist(arcs, {op.name: issue[place[op.name]] for op in ops}, ii)


@st.composite
def _tiny_queues(draw: st.DrawFn) -> Pipeline:
    engines = ["", "tensor", "tensor"]
    ops = tuple(
        Op(f"op{n}", "work", "r", (("tensor", d),) if engine else (), d, engine, 1.0 if engine else 0.0)
        for n, engine in enumerate(draw(st.permutations(engines)))
        for d in [float(draw(st.integers(1, 3)))]
    )
    edges = []
    for _ in range(draw(st.integers(1, 5))):
        a, b = draw(st.integers(0, 2)), draw(st.integers(0, 2))
        edges.append(Edge(f"op{a}", f"op{b}", draw(st.integers(0 if a < b else 1, 2)), float(draw(st.integers(0, 1)))))
    return loops.pipeline(ops, tuple(edges), (Role("r", tuple(Step(op.name) for op in ops)),))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(_tiny_queues())
def test_optimum_with_a_queue_equals_brute_force(loop: Pipeline) -> None:
    """One role does its own work and feeds the matrix engine, as a Hopper warpgroup does."""
    schedule = optimal_schedule(loop, keep_chains=False)
    assert schedule.status == "optimal"
    assert schedule.ii_cycles == _queue_brute_force_ii(loop, schedule.ii_cycles)


# -- damaged schedules -----------------------------------------------------------------------------


def _moved(schedule: Schedule, op: str, by: int) -> Schedule:
    holds = {
        unit: {name: at + (by if name == op else 0) for name, at in held.items()}
        for unit, held in schedule.holds.items()
    }
    return replace(
        schedule,
        starts=schedule.starts | {op: schedule.starts[op] + by},
        issues=schedule.issues | {op: schedule.issues[op] + by},
        holds=holds,
        span_cycles=schedule.span_cycles + abs(by),
        overlap_depth=schedule.overlap_depth + 2,
    )


@pytest.mark.parametrize("op", ["qk0", "max0", "exp0", "pv0", "qk1", "max1", "exp1", "pv1"])
@pytest.mark.parametrize("by", [-40, 40])
def test_moving_any_critical_operation_is_caught(op: str, by: int) -> None:
    """Both tiles of this loop sit on a tight recurrence, so no operation can move on its own."""
    loop = loops.blackwell(2)
    schedule = optimal_schedule(loop)
    assert check_schedule(loop, schedule) == []
    assert check_schedule(loop, _moved(schedule, op, by))


@SLOW
@given(loops.random_loops(whole=True), st.data())
def test_a_smaller_ii_is_caught(loop: Pipeline, data: st.DataObject) -> None:
    """If the checker accepted the same times at a smaller II, the optimum would not have been one."""
    schedule = optimal_schedule(loop)
    assume(schedule.status == "optimal" and schedule.ii_cycles > 1)
    shrunk = schedule.ii_cycles - data.draw(st.integers(1, schedule.ii_cycles - 1))
    lie = replace(schedule, ii_cycles=shrunk, bound=shrunk, overlap_depth=schedule.span_cycles // shrunk + 1)
    assert check_schedule(loop, lie)


def test_checker_names_what_is_violated() -> None:
    loop = loops.blackwell(2)
    schedule = optimal_schedule(loop)
    early = " ".join(check_schedule(loop, _moved(schedule, "exp0", -100)))
    assert "role softmax0" in early and "exp0 starts before max0 (row max" in early
    late = " ".join(check_schedule(loop, _moved(schedule, "qk0", 200)))
    assert "matrix engine" in late and "max0 starts before qk0 (S full" in late
    assert check_schedule(loop, replace(schedule, holds={"mufu": {}}))[0].startswith("unit mufu: no hold")
    assert "does not go with" in check_schedule(loop, replace(schedule, bound=1))[0]
    lost = dict(schedule.starts)
    lost.pop("pv1")
    assert "pv1" in check_schedule(loop, replace(schedule, starts=lost))[0]


def test_checker_sees_a_buffer_overflow() -> None:
    """Take the edge away that protects the slot: only the buffer itself can object."""
    loop = loops.blackwell(1)
    loose = replace(loop, edges=tuple(e for e in loop.edges if e.kind != "buffer"), buffers=())
    schedule = optimal_schedule(loose)
    guarded = replace(loose, buffers=loop.buffers)
    assert schedule.ii_cycles < 2048
    assert any("S/P 0" in text for text in check_schedule(guarded, schedule))
    assert optimal_schedule(guarded).ii_cycles == optimal_schedule(loop).ii_cycles


def test_checker_sees_overtaking_and_program_order() -> None:
    ops = tuple(Op(n, "x", "mma", (("tensor", 10.0),), 10.0, "tensor", 1.0) for n in ("a", "b"))
    loop = loops.pipeline(ops, (), (Role("mma", (Step("a"), Step("b"))),))
    schedule = optimal_schedule(loop, respect_program_order=True)
    assert schedule.order_per_unit["tensor"] == ("a", "b")
    swapped = replace(schedule, starts={"a": 10, "b": 0}, issues={"a": 0, "b": 1})
    assert any("overtakes" in text or "issued at" in text for text in check_schedule(loop, swapped))
    against = replace(schedule, starts={"a": 10, "b": 0}, issues={"a": 10, "b": 0})
    assert any("against the program" in text for text in check_schedule(loop, against))


# -- results that are not a schedule ---------------------------------------------------------------


def test_tensor_memory_overflow_is_a_result() -> None:
    loop = loops.blackwell(2)
    wide = replace(loop, buffers=(*loop.buffers, Buffer("O", "tmem", 300 * 512, 1, "pv0", "")))
    schedule = optimal_schedule(wide, storage=B200)
    assert (schedule.status, schedule.starts, check_schedule(wide, schedule)) == ("infeasible", {}, [])
    assert schedule.reason == (
        "tensor memory needs 556 columns of 512 (over by 44): a smaller tile for 'O' (1 x 153600 bytes)"
    )
    assert optimal_schedule(wide, storage=replace(B200, tmem_columns=556)).status == "optimal"


def test_shared_memory_and_registers_overflow() -> None:
    loop = loops.blackwell(3)
    ring = replace(loop, buffers=(Buffer("K/V ring", "smem", 65536, 4, "", "qk0"),))
    reason = optimal_schedule(ring, storage=B200).reason
    assert "shared memory needs 262144 bytes of 232448 (over by 29696): fewer slots or" in reason
    assert "register file needs 69888 registers of 65536 (over by 4352)" in reason
    lie = replace(optimal_schedule(ring, storage=B200), limits=())
    assert check_schedule(ring, lie) == ["status is infeasible but every limit holds"]


def test_storage_is_the_machines() -> None:
    assert Storage(registers=65536, smem_bytes=232448, tmem_columns=512) == B200
    assert storage_of(load_machine("a100")) == Storage(registers=65536, smem_bytes=166912)
    assert storage_of(load_machine("rtx-5090")) == Storage(registers=65536, smem_bytes=101376)
    # Tensor memory is no question where there is none, unless a loop wants some.
    loop = replace(loops.hopper(2), buffers=(Buffer("K/V ring", "smem", 65536, 3, "", "qk"),))
    limits = optimal_schedule(loop, storage=storage_of(load_machine("a100"))).limits
    assert [(limit.resource, limit.demand, limit.limit) for limit in limits[:1]] == [("shared memory", 196608, 166912)]
    assert optimal_schedule(loops.blackwell(2), storage=storage_of(load_machine("h200"))).reason.startswith(
        "tensor memory needs 256 columns of 0"
    )


def test_stopped_early_reports_bound_and_gap() -> None:
    loop = loops.blackwell(2)
    schedule = optimal_schedule(loop, time_limit_s=0.0)
    assert schedule.status == "feasible"
    assert schedule.bound == 2060 < schedule.ii_cycles
    assert schedule.gap == pytest.approx(1 - schedule.bound / schedule.ii_cycles)
    assert check_schedule(loop, schedule) == []


def test_deadlock_is_an_error() -> None:
    with pytest.raises(PipelineError, match="deadlocks"):
        optimal_schedule(loops.chain(1.0, 1.0, distance=0))


def test_eighteen_operations_are_quick() -> None:
    """Four tiles of four operations and two more: well under a second, so that a what-if may ask."""
    loop = loops.blackwell(4, 200.0, 50.0)
    schedule = optimal_schedule(loop)
    assert schedule.status == "optimal"
    assert check_schedule(loop, schedule) == []
    assert schedule.solve_seconds < 5.0
