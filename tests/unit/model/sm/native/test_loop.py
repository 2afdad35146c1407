"""The simulation of a loop and its recurrences in C against those in Python: the same digits, the same refusals."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support import loops

from tilecast.model.families import build_pipeline, native_family
from tilecast.model.gemm.families import legality, native_gemm_family
from tilecast.model.gemm.pipeline.build import build
from tilecast.model.gemm.workload import Gemm
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine
from tilecast.model.pipeline.graph import Pipeline, PipelineError
from tilecast.model.search.best import search_space
from tilecast.model.sm import recurrences
from tilecast.model.sm import run as in_python
from tilecast.model.sm.bounds import rec_mii
from tilecast.model.sm.loop import Loop
from tilecast.model.sm.native import recurrences as native_recurrences
from tilecast.model.sm.native import run
from tilecast.model.sm.native.library import library
from tilecast.model.sm.simulate import simulate

needs_compiler = pytest.mark.skipif(library() is None, reason="no C compiler at hand")
MACHINES = [load_machine(name) for name in ("a100", "h200-sxm", "b200", "b300")]


def check_same(pipeline: Pipeline, blocks: int, masked: int, stop_early: bool) -> None:
    loop = Loop(pipeline)
    in_c = run._run(library(), loop, blocks, masked, stop_early)
    assert in_c is not None
    other = in_python.run_loop(loop, blocks, masked, stop_early=stop_early)
    assert replace(in_c, table=other.table) == other
    assert in_c.table.tobytes() == other.table.tobytes()


@st.composite
def kernels(draw: st.DrawFn) -> Pipeline:
    """Loops of the kernels that searches look at."""
    machine = draw(st.sampled_from(MACHINES))
    qk, v = draw(st.sampled_from([(64, 64), (128, 128), (192, 128), (256, 256)]))
    work = Workload(1, 8, 8, 8192, 8192, qk, v, draw(st.sampled_from(["none", "causal"])))
    space = search_space(work, machine, native_family(machine).name).variants
    return build_pipeline(work, space[draw(st.integers(0, 10_000)) % len(space)], machine)


@st.composite
def crowded_loops(draw: st.DrawFn) -> Pipeline:
    """Random loops whose operations meet on several units, with copies served in order, FMA that take cycles of the tensor core, products that
    slow others, and masks."""
    pipeline = draw(loops.random_loops(most_ops=9))
    share = st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.7, 1.0])
    ops = []
    for op in pipeline.ops:
        if op.engine == "tensor":
            ops.append(op._replace(hidden_fma=draw(st.sampled_from([0.2, 0.5, math.inf]))))
            continue
        demand = tuple((unit, op.min_cycles * draw(share)) for unit in ("alu", "fma", "issue"))
        beside = draw(st.sampled_from([0.0, 1.0, 1.7, 3.0])) * op.min_cycles
        fma = (("fma", op.min_cycles * draw(share)),)
        engine = draw(st.sampled_from([op.engine, op.engine, "memory", "l2"]))
        ops.append(op._replace(engine=engine, demand=demand, instructions=fma, beside_mma_cycles=beside))
    masks = tuple((op.name, (("alu", draw(st.floats(0, 9))),)) for op in ops if draw(st.booleans()))
    return replace(pipeline, ops=tuple(ops), mask_demand=masks)


@needs_compiler
@settings(max_examples=150, deadline=None)
@given(
    st.one_of(kernels(), loops.random_loops(), crowded_loops()),
    st.integers(1, 50),
    st.sampled_from([0, 2]),
    st.booleans(),
)
def test_runs_have_the_same_times(pipeline: Pipeline, blocks: int, masked: int, stop_early: bool) -> None:
    check_same(pipeline, blocks, min(masked, blocks), stop_early)


@needs_compiler
@pytest.mark.parametrize("machine", ["h200-sxm", "b200"])
def test_products_of_matrices_have_the_same_times(machine: str) -> None:
    chip, gemm = load_machine(machine), Gemm(4096, 4096, 4096)
    family = native_gemm_family(chip)
    for variant in [v for v in family.space(gemm, chip) if legality(v, gemm, chip).legal][::60]:
        check_same(build(gemm, variant, chip, 1700.0).pipeline, 5, 0, True)


@needs_compiler
@settings(max_examples=60, deadline=None)
@given(st.one_of(kernels(), loops.random_loops()), st.booleans())
def test_recurrences_are_the_same(pipeline: Pipeline, with_roles: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        found = rec_mii(pipeline, with_roles=with_roles)
        patch.setattr(native_recurrences, "library", lambda: None)
        assert rec_mii(pipeline, with_roles=with_roles) == found


ARCS = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(-9, 60), st.integers(-1, 4)), min_size=1, max_size=20
)


@needs_compiler
@settings(max_examples=200, deadline=None)
@given(ARCS, st.sampled_from([1, 1 << 20, 1 << 55, 1 << 70]))
def test_cycles_of_any_graph_are_the_same(arcs: list[recurrences.Arc], scale: int) -> None:
    arcs = [(src, dst, weight * scale, distance) for src, dst, weight, distance in arcs]
    try:
        expected = recurrences.heaviest_cycle(6, arcs)
    except recurrences.Stuck as stuck:
        with pytest.raises(recurrences.Stuck) as raised:
            native_recurrences.heaviest_cycle(6, arcs)
        assert raised.value.cycle == stuck.cycle
        return
    assert native_recurrences.heaviest_cycle(6, arcs) == expected


@needs_compiler
@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0, 1e4), min_size=2, max_size=8), st.data())
def test_paths_are_the_same(alone: list[float], data: st.DataObject) -> None:
    node = st.integers(0, len(alone) - 1)
    links = data.draw(st.lists(st.tuples(node, node, st.floats(0, 1e4)), max_size=20))
    links = [(min(a, b), max(a, b), cycles) for a, b, cycles in links if a != b]
    data.draw(st.randoms()).shuffle(links)
    assume(links)
    assert native_recurrences.longest_paths(alone, links) == recurrences.longest_paths(alone, links)


def test_without_a_compiler_python_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = loops.blackwell(2)
    before = simulate(pipeline, 12), rec_mii(pipeline)
    for place in (run, native_recurrences):
        monkeypatch.setattr(place, "library", lambda: None)
    asked = []
    monkeypatch.setattr(run.in_python, "Run", lambda *args, **kw: asked.append(args) or in_python_run(*args, **kw))
    assert (simulate(pipeline, 12), rec_mii(pipeline)) == before
    assert asked


in_python_run = in_python.Run


def test_roles_that_wait_for_each_other_are_named() -> None:
    stuck = replace(loops.hopper(2), edges=(*loops.hopper(2).edges, *_backwards(loops.hopper(2))))
    with pytest.raises(PipelineError, match=r"deadlocks: .* of block 0"):
        simulate(stuck, 4)
    with pytest.raises(PipelineError, match=r"wait for each other"):
        rec_mii(stuck)


def _backwards(pipeline: Pipeline) -> tuple:
    """An edge of an iteration the other way round."""
    return tuple(e._replace(src=e.dst, dst=e.src) for e in pipeline.edges if e.distance == 0)[:1]
