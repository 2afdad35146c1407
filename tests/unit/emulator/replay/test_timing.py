"""Two routes to one number: the replay of what the source executed, and the pipeline simulation of its variant."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

import numpy as np
import pytest

from tilecast.codegen.generate import generate
from tilecast.codegen.hopper import forward
from tilecast.emulator.replay.compare import (
    ADDRESSES,
    AGREES,
    Comparison,
    compare,
    without_addresses,
    without_compiled_waits,
)
from tilecast.emulator.replay.costs import synchronisation
from tilecast.emulator.replay.timeline import chrome_trace
from tilecast.emulator.replay.timing import BESIDE, COPY_LATENCY, COPY_ORDER, MEETINGS, RESCALE, ROOM, replay
from tilecast.emulator.routes import as_text, by_all_routes
from tilecast.emulator.run import Emulation, emulate, kernel_path
from tilecast.emulator.source import Source
from tilecast.emulator.trace import Arrive, Commit, CopyIssue, MatrixIssue, Step, Wait, Work
from tilecast.model.chip.evaluate import PredictError
from tilecast.model.chip.launch import play
from tilecast.model.compiled.evaluate import CompiledVariant
from tilecast.model.compiled.forecast import forecast
from tilecast.model.compiled.loops.shelf import loop_at_hand
from tilecast.model.families import build_pipeline, find_family, parse_variant
from tilecast.model.kernel.header import header_workload
from tilecast.model.kernel.variant import Variant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine, load_machine

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
        "hopper_ws_d256_full", "hopper_ws_d128_causal", "blackwell_ws_d64_full_b300", "blackwell_ws_d128_full",
        "blackwell_ws_d128_full_pair", "blackwell_ws_d192_128_full_pair", "blackwell_ws_d256_full_pair",
    ],
)  # fmt: skip
def test_both_routes_agree(kernel: str) -> None:
    found = compared(kernel)
    assert found.ii_cycles > 0
    assert abs(found.difference) <= AGREES


@pytest.mark.parametrize("kernel", ["hopper_ws_d96_full", "hopper_ws_d128_full"])
def test_products_of_warpgroups_in_the_order_of_their_issue_agree_by_all_routes(kernel: str) -> None:
    """In turns, an instruction of each warpgroup, they all end late: the replay was 22 and 27 % above the pipeline until it served them
    in the order of their issue, as machine code is simulated."""
    found = compared(kernel)
    assert abs(found.difference) <= 0.02
    done = one_tile(kernel)
    written = header_workload(done.header)
    code = shipped(written, done.machine, parse_variant(done.header["variant"])).code
    assert code is not None
    seen = forecast(code, replace(written, dtype="fp16"), done.machine, done.machine["chip.clock_rated_mhz"])
    assert found.model_ii_cycles == pytest.approx(seen.cycles_per_block, rel=0.06)


def test_addresses_before_products_are_what_hoppers_short_loop_has_more_in_the_pipeline() -> None:
    """Two warpgroups and 64 keys: no unit is full, so that a warpgroup's own order decides; the pipeline has the addresses and
    descriptors that compiled code works out before a product, the source has none."""
    found = compared("hopper_ws_d64_causal")
    assert found.difference < -AGREES
    assert abs(dict(found.without)[ADDRESSES]) <= AGREES
    assert abs(compared("hopper_ws_d96_causal_long").difference) <= AGREES


def test_arithmetic_beside_wgmma_takes_the_register_ports() -> None:
    """d64: what was measured of a warp beside wgmma decides; without it the source is as far below the pipeline."""
    found = compared("hopper_ws_d64_full")
    assert AGREES < found.difference < 0.06
    assert dict(found.without)[BESIDE] < -2 * AGREES


@pytest.mark.parametrize("kernel", ["hopper_ws_d64_full", "hopper_ws_d256_full"])
def test_whole_hopper_tiles_agree_with_the_pipeline(kernel: str) -> None:
    """Start, first copies from memory, epilogue: -25 to -28 % before the replay charged them."""
    work = one_tile(kernel)
    variant = parse_variant(work.header["variant"])
    pipeline = build_pipeline(header_workload(work.header), variant, work.machine)
    keys = BLOCKS * pipeline.keys_per_iteration
    shape = replace(
        header_workload(work.header), batch=1, heads_q=1, heads_kv=1, seqlen_q=pipeline.rows_per_cta, seqlen_k=keys, dtype="fp16"
    )  # fmt: skip
    model = play(shape, variant, without_compiled_waits(pipeline), work.machine, 0.0).makespan_cycles
    assert compared(kernel).timeline.cycles / model - 1 == pytest.approx(0.0, abs=AGREES)


def test_an_arrival_of_several_warps_costs_their_barrier_and_one_that_is_over_a_poll() -> None:
    measured = synchronisation(load_machine("h200-sxm"))
    assert measured.arrival(4) == measured.arrival(1) + load_machine("h200-sxm")["sync.barrier_cycles"]
    assert measured.poll < measured.handover <= measured.across


def test_copies_that_move_one_after_the_other_are_there_in_time() -> None:
    """Side by side, each K and V takes as long as all that are on their way, which one slot for V shows."""
    found, done = compared("blackwell_ws_d192_128_full"), one_tile("blackwell_ws_d192_128_full")
    assert abs(found.difference) <= AGREES
    assert replay(done.traces[0], done.machine, (COPY_ORDER,)).ii_cycles() > 1.1 * found.model_ii_cycles


def test_one_slot_for_v_shows_the_latency_of_copies() -> None:
    """The kernel splits three slots into two for K and one for V; the model lets both share all three."""
    found = compared("blackwell_ws_d192_128_causal_b300")
    assert found.difference > AGREES
    assert abs(dict(found.without)[COPY_LATENCY]) <= AGREES


def test_d96_differs_by_barriers_and_by_how_far_its_groups_are_apart() -> None:
    """docs/emulator.md: two softmax groups that meet less at MUFU, after one pause of the second, are as fast as in the pipeline."""
    found, done = compared("blackwell_ws_d96_full"), one_tile("blackwell_ws_d96_full")
    assert found.difference > AGREES
    fence = Work(0, [Step(0, "fence", 1.0, (), None, (), None)])
    roles = [
        replace(role, events=[*role.events[:20], *([fence] * 16), *role.events[20:]])
        if role.name == "softmax_role 1"
        else role
        for role in done.traces[0].roles
    ]
    apart = replay(replace(done.traces[0], roles=tuple(roles)), done.machine, (MEETINGS,)).ii_cycles()
    assert apart == pytest.approx(found.model_ii_cycles, rel=AGREES)


def test_a_slower_unit_makes_the_source_slower() -> None:
    done = one_tile("hopper_ws_d256_full")
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


def tile_to_pipeline(kernel: str, text: str | None = None, without: tuple[str, ...] = (), *, masks: bool = True, waits: bool = True, addresses: bool = True, query: bool = True) -> float:  # fmt: skip
    """Of a whole tile, the relative difference of the replay's cycles to the pipeline's; each without what is left out of it."""
    source = Source(kernel_path(kernel), text)
    header, chip = source.header(), load_machine(source.header()["machine"])
    written, variant = header_workload(header), parse_variant(header["variant"])
    pipeline = build_pipeline(written, variant, chip)
    rows, keys = pipeline.rows_per_cta * pipeline.cta_group, BLOCKS * pipeline.keys_per_iteration
    work = replace(written, batch=1, heads_q=1, heads_kv=1, seqlen_q=rows, seqlen_k=keys, dtype="fp16")
    rng = np.random.default_rng(0)
    q, k, v = (
        rng.standard_normal((1, 1, length, width)).astype(np.float16)
        for length, width in ((rows, work.head_dim_qk), (keys, work.head_dim_qk), (keys, work.head_dim_v))
    )
    done = emulate(kernel_path(kernel), q, k, v, sms=2 * pipeline.cta_group, window=work.window, text=text)
    if not waits:
        pipeline = without_compiled_waits(pipeline)
    if not addresses:
        pipeline = without_addresses(pipeline)
    if not query:
        pipeline = replace(pipeline, edge_read_bytes=0.0)
    model = play(work, variant, pipeline, chip, 0.0, masks).makespan_cycles
    return replay(done.traces[0], chip, without).cycles / model - 1


@pytest.mark.parametrize("kernel", ["blackwell_ws_d128_window", "blackwell_ws_d128_causal"])
def test_masks_cost_what_a_thread_computes(kernel: str) -> None:
    """51 and 15 % above the pipeline while a bit for sixteen columns counted sixteen times; without masks the routes are as far apart."""
    assert -0.11 < tile_to_pipeline(kernel) < 0.0
    text = kernel_path(kernel).read_text(encoding="utf-8")
    plain = re.sub(r"^            hide_keys\(.*$", "            pass", text, flags=re.MULTILINE)
    assert plain != text
    assert 0.0 < tile_to_pipeline(kernel, plain, masks=False) < AGREES


def test_the_pipeline_fetches_q_before_k() -> None:
    """In the source they follow each other through the copy engine, while the latency of the first runs."""
    assert tile_to_pipeline("hopper_ws_d192_128_full") < -AGREES
    assert abs(tile_to_pipeline("hopper_ws_d192_128_full", query=False)) <= AGREES


@pytest.mark.parametrize(
    "kernel", ["blackwell_ws_d64_full", "blackwell_ws_d128_full", "blackwell_ws_d192_128_full_pair"]
)
def test_whole_blackwell_tiles_agree_without_barriers_before_arrivals(kernel: str) -> None:
    assert tile_to_pipeline(kernel) > AGREES
    assert abs(tile_to_pipeline(kernel, without=(MEETINGS, RESCALE))) <= AGREES


def test_waits_of_the_compiler_are_what_causal_tiles_on_hopper_have_more_in_the_pipeline() -> None:
    """A tile's pipeline has the waits that Triton's compiler makes, addresses before products, and Q before K; the source has none of these."""
    assert tile_to_pipeline("hopper_ws_d128_causal") < -2 * AGREES
    assert tile_to_pipeline("hopper_ws_d128_causal", waits=False) > 0.5 * tile_to_pipeline("hopper_ws_d128_causal")
    assert (
        abs(tile_to_pipeline("hopper_ws_d128_causal", waits=False, addresses=False, masks=False, query=False)) <= AGREES
    )
    assert abs(tile_to_pipeline("hopper_ws_d96_causal_long", waits=False, addresses=False)) <= AGREES
    # What is left of d64 is the first blocks.
    assert tile_to_pipeline("hopper_ws_d64_causal") < -2 * AGREES
    assert abs(tile_to_pipeline("hopper_ws_d64_causal", waits=False, addresses=False, masks=False, query=False)) < 0.06


@pytest.mark.parametrize("kernel", ["hopper_ws_d96_full", "hopper_ws_d128_full"])
def test_whole_tiles_of_kernels_whose_products_fill_the_tensor_core_agree(kernel: str) -> None:
    """Without the waits that the compiler makes and Q before K, which the source has not."""
    assert -0.07 < tile_to_pipeline(kernel) < 0.0
    assert abs(tile_to_pipeline(kernel, waits=False, query=False)) <= 0.03


def test_who_finds_no_room_lets_others_in_between(tmp_path, monkeypatch) -> None:
    """Two warpgroups of 96 columns in tiles of 64 and 32, whose products are under way together; whole products would let each be through sooner."""
    work = Workload(4, 16, 16, 4096, 4096, 96, mask="causal")
    variant = parse_variant(
        "family=fa3,warpgroups=2,kv_stages=3,q_stages=2,tile_n=64,ping_pong=false,rescale=anchored,scheduler=paired"
    )
    machine = load_machine("h200-sxm")
    monkeypatch.setattr(forward, "written_columns", lambda columns: columns)
    file = tmp_path / "two_warpgroups.py"
    file.write_text(generate(work, machine, find_family("fa3"), variant, compiler=None).source)
    found = compared(str(file))
    assert dict(found.without)[ROOM] < found.difference - 0.04
