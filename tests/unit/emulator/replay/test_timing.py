"""Two routes to one number: the replay of what the source executed, and the pipeline simulation of its variant."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

import numpy as np
import pytest

from tilecast.emulator.replay.compare import AGREES, Comparison, compare
from tilecast.emulator.replay.costs import synchronisation
from tilecast.emulator.replay.timing import COPY_LATENCY, MEETINGS, RESCALE, chrome_trace, replay
from tilecast.emulator.routes import as_text, by_all_routes
from tilecast.emulator.run import Emulation, emulate, kernel_path
from tilecast.emulator.source import Source
from tilecast.emulator.trace import Arrive, Commit, CopyIssue, MatrixIssue, Wait
from tilecast.model.chip.evaluate import PredictError
from tilecast.model.chip.launch import play
from tilecast.model.compiled.evaluate import CompiledVariant
from tilecast.model.compiled.loops.shelf import loop_at_hand
from tilecast.model.families import build_pipeline, parse_variant
from tilecast.model.kernel.header import header_workload
from tilecast.model.kernel.variant import Variant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine, load_machine
from tilecast.model.sm.bounds import rec_mii

BLOCKS = 16


@lru_cache(maxsize=8)
def one_tile(kernel: str) -> Emulation:
    """One tile of BLOCKS iterations, no masked block, no row maximum that moves far."""
    header = Source(kernel_path(kernel)).header()
    pipeline = build_pipeline(
        header_workload(header), parse_variant(header["variant"]), load_machine(header["machine"])
    )
    shape = header["workload"]
    rng = np.random.default_rng(0)
    rows, keys = pipeline.rows_per_cta * pipeline.cta_group, BLOCKS * pipeline.keys_per_iteration
    q, k, v = (
        rng.standard_normal((1, 1, length, shape[width])).astype(np.float16)
        for length, width in ((rows, "head_dim_qk"), (keys, "head_dim_qk"), (keys, "head_dim_v"))
    )
    return emulate(kernel, q, k, v, sms=2 * pipeline.cta_group)


def compared(kernel: str) -> Comparison:
    done = one_tile(kernel)
    return compare(done.header, done.traces[0], done.machine)


@pytest.mark.parametrize(
    "kernel",
    [
        "hopper_ws_d64_full", "hopper_ws_d96_full", "hopper_ws_d256_full", "blackwell_ws_d128_full",
        "blackwell_ws_d192_128_full_pair",
    ],
)  # fmt: skip
def test_both_routes_agree(kernel: str) -> None:
    found = compared(kernel)
    assert found.ii_cycles > 0
    assert abs(found.difference) <= AGREES


@pytest.mark.parametrize("kernel", ["hopper_ws_d128_full", "hopper_ws_d192_128_full"])
def test_hopper_sources_leave_the_tensor_core_idle_where_the_compiled_order_does_not(kernel: str) -> None:
    """docs/emulator.md: sums and conversions of a block stand between the source's products."""
    found, done = compared(kernel), one_tile(kernel)
    pipeline = build_pipeline(header_workload(done.header), parse_variant(done.header["variant"]), done.machine)
    assert found.model_ii_cycles == pytest.approx(pipeline.demand()["tensor"], rel=0.003)
    assert AGREES < found.difference < 0.08


@pytest.mark.parametrize("kernel", ["blackwell_ws_d128_full_pair", "blackwell_ws_d64_full_b300"])
def test_what_differs_by_the_barriers_that_the_compiler_puts_before_arrivals(kernel: str) -> None:
    found = compared(kernel)
    assert found.difference > AGREES
    assert abs(dict(found.without)[MEETINGS]) <= AGREES


@pytest.mark.parametrize(
    "kernel", ["hopper_ws_d96_full", "hopper_ws_d128_full", "hopper_ws_d192_128_full", "hopper_ws_d256_full"]
)
def test_whole_hopper_tiles_agree_with_the_pipeline(kernel: str) -> None:
    """Start, first copies from memory, epilogue: -25 to -28 % before the replay charged them."""
    work = one_tile(kernel)
    variant = parse_variant(work.header["variant"])
    pipeline = build_pipeline(header_workload(work.header), variant, work.machine)
    keys = BLOCKS * pipeline.keys_per_iteration
    shape = replace(
        header_workload(work.header), batch=1, heads_q=1, heads_kv=1, seqlen_q=pipeline.rows_per_cta, seqlen_k=keys, dtype="fp16"
    )  # fmt: skip
    model = play(shape, variant, pipeline, work.machine, 0.0).makespan_cycles
    assert compared(kernel).timeline.cycles / model - 1 == pytest.approx(0.0, abs=AGREES)


def test_an_arrival_of_several_warps_costs_their_barrier_and_one_that_is_over_a_poll() -> None:
    measured = synchronisation(load_machine("h200-sxm"))
    assert measured.arrival(4) == measured.arrival(1) + load_machine("h200-sxm")["sync.barrier_cycles"]
    assert measured.poll < measured.handover <= measured.across


@pytest.mark.parametrize("kernel", ["blackwell_ws_d128_full_b300", "blackwell_ws_d192_128_full_b300"])
def test_pairs_differ_by_the_rescale_of_every_step(kernel: str) -> None:
    found = compared(kernel)
    assert found.difference > AGREES
    assert abs(dict(found.without)[RESCALE]) <= AGREES


def test_alternate_key_blocks_differ_by_the_rescale_and_by_who_fills_a_slot() -> None:
    """Each block waits for the rescale of the one before.  Without it the source keeps the tensor core full, as K and V have rings of
    single blocks; the model, which loads an iteration's two blocks together, waits for a slot."""
    found = compared("blackwell_ws_d256_full_pair")
    done = one_tile("blackwell_ws_d256_full_pair")
    pipeline = build_pipeline(header_workload(done.header), parse_variant(done.header["variant"]), done.machine)
    tensor = pipeline.demand()["tensor"]
    assert found.difference > AGREES
    assert (1 + dict(found.without)[RESCALE]) * found.model_ii_cycles == pytest.approx(tensor, abs=1.0)
    assert found.model_ii_cycles > tensor
    assert ("qk1", "load_k") in {(edge.src, edge.dst) for edge in rec_mii(pipeline).edges}


def test_one_slot_for_v_shows_the_latency_of_copies() -> None:
    """The kernel splits three slots into two for K and one for V; the model lets both share all three."""
    found = compared("blackwell_ws_d192_128_full")
    assert found.difference > AGREES
    assert abs(dict(found.without)[f"{RESCALE} and {COPY_LATENCY}"]) <= AGREES


@pytest.mark.parametrize(
    "kernel",
    ["blackwell_ws_d64_full", "blackwell_ws_d64_full_pair", "blackwell_ws_d96_full", "blackwell_ws_d96_full_pair"],
)
def test_narrow_heads_stay_within_what_the_page_explains(kernel: str) -> None:
    """docs/emulator.md: the emulated exponentials are all in the first three quarters of P, not spread evenly."""
    assert 0 < compared(kernel).difference < 0.17


def test_a_slower_unit_makes_the_source_slower() -> None:
    done = one_tile("hopper_ws_d128_full")
    base = replay(done.traces[0], done.machine)
    slower = done.machine.with_facts({"tensor.fp16_flop_per_clk": done.machine["tensor.fp16_flop_per_clk"] / 2})
    assert replay(done.traces[0], slower).ii_cycles() == pytest.approx(2 * base.ii_cycles(), rel=0.05)


def test_trace_holds_every_wait_to_its_arrivals() -> None:
    trace = one_tile("blackwell_ws_d128_full").traces[0]
    events = [event for role in trace.roles for event in role.events]
    made = {e.key for e in events if isinstance(e, (Arrive, CopyIssue))}
    made |= {key for e in events if isinstance(e, Commit) for key in e.keys}
    waited = {e.key for e in events if isinstance(e, Wait) and e.key[1] >= 0}
    assert waited <= made
    products = [e for e in events if isinstance(e, MatrixIssue)]
    # Each block: two QK of the whole tile, and for each group P V in three pieces.
    assert len(products) == BLOCKS * 8
    assert sum(e.m * e.n * e.k for e in products) == BLOCKS * 4 * 128**3


def test_timeline_roles_do_one_thing_at_a_time() -> None:
    timeline = replay(one_tile("blackwell_ws_d128_full").traces[0], load_machine("b200"))
    assert timeline.cycles >= max(span.end for span in timeline.spans)
    events = json.loads(chrome_trace([timeline]))["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"load_role", "mma_role", "softmax_role 0", "softmax_role 1", "correction_role"} == set(names.values())
    for tid in names:
        slices = sorted((e["ts"], e["dur"]) for e in events if e["ph"] == "X" and e["tid"] == tid)
        assert all(a + d <= b + 1e-6 for (a, d), (b, _) in pairwise(slices))


def shipped(work: Workload, machine: Machine, variant: Variant) -> CompiledVariant:
    found = loop_at_hand(work, machine, variant)
    assert found is not None
    return found


def test_a_hopper_tile_goes_by_three_routes_without_a_compiler() -> None:
    path = str(kernel_path("hopper_ws_d256_full"))
    found = by_all_routes(path, None, shipped)
    assert [route.name for route in found.routes] == ["source", "pipeline", "machine code"]
    source, _, code = found.routes
    assert code.ii_cycles == pytest.approx(source.ii_cycles, rel=AGREES)
    assert all(route.tile_cycles and route.tile_cycles > BLOCKS * route.ii_cycles for route in found.routes)
    text = as_text(path, found)
    assert "machine code" in text and "Triton" in text


def test_without_machine_code_the_other_routes_stand() -> None:
    def missing(*_: object) -> CompiledVariant:
        raise PredictError("no machine code of it")

    found = by_all_routes(str(kernel_path("hopper_ws_d256_full")), None, missing)
    assert [route.name for route in found.routes] == ["source", "pipeline"]
    assert "no machine code: no machine code of it" in as_text("file", found)
