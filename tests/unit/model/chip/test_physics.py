"""What no forecast may do, whatever the machine, the shape and the kernel."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tilecast.model.chip.dealing import dealing
from tilecast.model.chip.evaluate import PredictError, evaluate, evaluate_seconds
from tilecast.model.chip.power import Activity, settle
from tilecast.model.families import legality, native_family, published_variant
from tilecast.model.forecast.binding import binding
from tilecast.model.forecast.predict import predict
from tilecast.model.forecast.waterfall import waterfall
from tilecast.model.kernel.variant import Variant
from tilecast.model.kernel.variants.fa4 import Fa4Variant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine, load_machine, machine_names
from tilecast.model.machine.schema import KEYS

MACHINES = tuple(load_machine(name) for name in machine_names())
WORKLOADS = st.builds(
    lambda batch, heads, seqlen_q, seqlen_k, dim, mask: Workload(
        batch, heads, heads, seqlen_q, seqlen_k, dim, dim, mask, (200, 0) if mask == "window" else None
    ).reduced(),
    st.integers(1, 6), st.sampled_from([1, 3, 8, 32]), st.sampled_from([1, 64, 300, 512, 1000, 4096]),
    st.sampled_from([1, 128, 777, 4096]), st.sampled_from([48, 64, 128, 256]), st.sampled_from(["none", "causal", "window"]),
)  # fmt: skip
#: Hand-out in order: dealing unequal tiles round robin can be slower on more SMs, on real ones as well.
DYNAMIC = ("grid", "longest-first")


def draw_kernel(data: st.DataObject, schedulers: tuple[str, ...] | None = None) -> tuple[Workload, Machine, Variant]:
    work = data.draw(WORKLOADS)
    machine = data.draw(st.sampled_from(MACHINES))
    family = data.draw(st.sampled_from([native_family(machine).name, "fa2"]))
    variant = published_variant(family, work, machine)
    if schedulers is None:
        schedulers = (*DYNAMIC, "persistent")
    variant = replace(variant, scheduler=data.draw(st.sampled_from(schedulers)))  # type: ignore[arg-type]
    return work, machine, variant


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_more_sms_are_never_slower(data: st.DataObject) -> None:
    work, machine, variant = draw_kernel(data, DYNAMIC)
    # Hopper's longest-first kernels are dealt tiles in turns.
    assume(dealing(variant.family, variant.scheduler).hand == "free")
    counts = sorted(data.draw(st.lists(st.integers(2, 400), min_size=2, max_size=4, unique=True)))
    clock = data.draw(st.sampled_from([1000.0, "sustained"]))
    machines = [machine.with_facts({"chip.sm_count": count}) for count in counts]
    times = [evaluate_seconds(work, m, variant, clock) for m in machines if legality(variant, work, m).legal]
    assert all(more <= fewer * (1 + 1e-9) for fewer, more in pairwise(times)), (counts, times)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_waterfalls_add_up_without_negative_steps_and_stay_below_peak(data: st.DataObject) -> None:
    work, machine, variant = draw_kernel(data)
    if not legality(variant, work, machine).legal:
        return
    clock = data.draw(st.sampled_from(["sustained", "short", 700.0, machine["chip.clock_max_mhz"]]))
    answer = evaluate(work, machine, variant, clock)
    steps = waterfall(work, machine, answer)
    assert sum(step.share for step in steps) == pytest.approx(1.0, abs=1e-9)
    assert all(step.share >= -1e-9 for step in steps), [(s.cause, s.share) for s in steps]
    peak = machine[f"tensor.{work.dtype}_flop_per_clk"] * machine["chip.sm_count"] * answer.clock.mhz / 1e6
    assert answer.tflops <= peak


#: A fact that feeds what `Binding.name` names.
FEEDS = {
    "tensor": "tensor.bf16_flop_per_clk", "smem": "smem.bytes_per_clk", "mufu": "mufu.ex2_per_clk", "fma": "fma.lanes",
    "alu": "alu.lanes", "issue": "issue.warp_inst_per_clk", "tma": "tma.bytes_per_clk", "HBM bandwidth": "hbm.tbps_achieved",
    "L2 bandwidth": "l2.bytes_per_clk_per_sm", "power limit": "chip.tdp_w",
}  # fmt: skip


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_half_of_what_binds_is_slower(data: st.DataObject) -> None:
    work, machine, variant = draw_kernel(data)
    if not legality(variant, work, machine).legal:
        return
    clock = data.draw(st.sampled_from([1000.0, "sustained"]))
    answer = evaluate(work, machine, variant, clock)
    bound = binding(work, machine, answer)
    if bound.kind == "launch":
        slower, least = {"launch.kernel_us": 2 * machine["launch.kernel_us"]}, 1.5
    elif bound.kind == "start":
        latencies = [k for k in machine if k.startswith(("launch.cta", "tma.latency", "l2.latency"))]
        slower, least = {k: 2 * machine[k] for k in latencies}, 1.01
    elif bound.name in FEEDS:
        rate = FEEDS[bound.name]
        slower, least = {rate: machine[rate] / 2}, 1.05
    elif bound.kind == "recurrence":
        # The operations of the chain: their units slower, and what lies between them longer.
        units = {unit for op in bound.chain for unit, _ in answer.pipeline.op(op).demand}
        slower = {FEEDS[unit]: machine[FEEDS[unit]] / 2 for unit in units if unit in FEEDS}
        slower |= {
            k: 2 * machine[k] for k in machine if k.endswith("latency_cycles") and 2 * machine[k] <= KEYS[k].high
        }
        least = 1.05
    elif bound.kind == "occupancy":
        twice = evaluate_seconds(replace(work, batch=2 * work.batch), machine, variant, 1000.0)
        assert twice <= 1.2 * evaluate_seconds(work, machine, variant, 1000.0)
        return
    else:
        return
    worse = machine.with_facts({k: v for k, v in slower.items() if machine.has(k)})
    if not legality(variant, work, worse).legal:
        return
    assert evaluate_seconds(work, worse, variant, clock) >= least * answer.seconds, (bound.kind, bound.name)


def test_mma_sync_beside_tcgen05_and_operand_fetch_have_steps_of_their_own() -> None:
    work = Workload(4, 16, 16, 8192, 8192)
    b200, h200 = load_machine("b200"), load_machine("h200-sxm")
    old = evaluate(work, b200, published_variant("fa2", work, b200), 1500.0)
    share = {s.cause: s.share for s in waterfall(work, b200, old)}
    assert share["score elements outside the mask"] == 0
    assert share["ragged tiles: rows and keys beyond the tensor's edge"] == 0
    assert share["mma.sync, below the rate of the GPU's own matrix instructions"] > 0.4
    narrow = replace(published_variant("fa3", work, h200), tile_n=48)  # type: ignore[arg-type]
    fetch = {s.cause: s.share for s in waterfall(work, h200, evaluate(work, h200, narrow, 1500.0))}
    # 64 x 48: (16 + 48 / 4) cycles of fetch where the array takes 24.
    assert fetch["matrix instructions wait for operands from shared memory"] > 0.03


def test_ragged_and_masked_blocks_are_told_apart() -> None:
    ragged = Workload(4, 16, 16, 4096, 4000)
    p = predict(ragged, "b200", Fa4Variant(), interval=False)
    share = {s.cause: s.share for s in p.waterfall}
    assert share["score elements outside the mask"] == 0
    # 4000 keys are 31.25 blocks of 128: 32 are executed.
    edge = share["ragged tiles: rows and keys beyond the tensor's edge"]
    useful = (
        share["tensor cores at peak rate and top clock"]
        + share["clock (power limit or tensor load) below the top clock"]
    )
    assert edge / useful == pytest.approx(4096 / 4000 - 1, rel=1e-6)
    assert "extra work in ragged last blocks" in share
    causal = predict(Workload(4, 16, 16, 4096, 4096, mask="causal"), "b200", Fa4Variant(), interval=False)
    assert "extra work in masked blocks" in {s.cause for s in causal.waterfall}


def test_first_loads_take_what_the_busy_sms_move() -> None:
    """Eight tiles of 128 x 128 queries: the copy engines of eight SMs hold them, not a share of the memory for each SM."""
    work = Workload(1, 8, 8, 128, 128)
    h200 = load_machine("h200-sxm")
    variant = published_variant("fa3", work, h200)
    times = {n: evaluate_seconds(work, h200.with_facts({"chip.sm_count": n}), variant, 1500.0) for n in (8, 132, 1000)}
    assert times[8] == times[132] == times[1000]


def test_one_sm_and_no_clock_within_the_limit_are_refused_in_a_sentence() -> None:
    b200 = load_machine("b200")
    work = Workload()
    pair = legality(Fa4Variant(cta_group=2), work, b200.with_facts({"chip.sm_count": 1}))
    assert not pair.legal
    assert "takes two SMs" in pair.sentence()
    assert evaluate_seconds(work, b200.with_facts({"chip.sm_count": 1}), Fa4Variant(), 1000.0) > 0
    with pytest.raises(PredictError, match=r"draws .* W even at 100 MHz, above its limit of 1000 W"):
        evaluate_seconds(work, b200.with_facts({"power.idle_w": 2000}), Fa4Variant(), "sustained")


def test_a_clock_above_the_top_is_refused() -> None:
    with pytest.raises(PredictError, match="expected 50 to 1410 MHz, the top clock of a100, got 4000"):
        predict(Workload(), "a100", clock=4000.0)


def test_what_memory_cannot_hold_is_refused_with_numbers() -> None:
    big = Workload(100, 128, 128, 131072, 131072)
    # Q, K, V and O of 16 bits: 4 x 2 x 100 x 128 x 131072 x 128 bytes.
    assert big.tensor_bytes == 4 * 2 * 100 * 128 * 131072 * 128
    with pytest.raises(PredictError, match="take 1718 GB, the memory of gb10 holds 128 GB"):
        predict(big, "gb10")
    long = Workload(1, 16, 16, 131072, 131072)
    with pytest.raises(PredictError, match=r"score matrix.*GB"):
        predict(long, "b200", family="unfused")
    assert all(m.has("hbm.capacity_gb") for m in MACHINES)


def test_power_is_averaged_over_the_kernels_not_over_the_sum_of_their_floors() -> None:
    """Two launches of 1 ms, one held by its SMs at any clock and one by memory: 50 W x 2 ms of energy, not of 1 ms."""
    facts = {"power.idle_w": 0, "power.active_w_at_1ghz": 0, "power.hbm_pj_per_byte": 100, "chip.tdp_w": 60}
    machine = load_machine("b200").with_facts(facts)
    work = Activity(0.0, "bf16", (), 0.0, 1e9)  # 0.1 J
    clock = settle(machine, work, lambda ghz: 1e-3 + 1.965e-3 / ghz, "sustained")
    assert clock.bound == "boost"
    assert clock.power_w == pytest.approx(50, rel=1e-6)


def test_unfused_attention_waits_for_memory_or_for_the_power_that_memory_takes() -> None:
    work = Workload(4, 16, 16, 8192, 8192)
    b200 = load_machine("b200")
    variant = published_variant("unfused", work, b200)
    fast = evaluate(work, b200, variant, 1900.0)
    assert binding(work, b200, fast).name == "HBM bandwidth"
    memory = next(s for s in waterfall(work, b200, fast, fused=False) if s.cause.startswith("memory"))
    assert memory.share > 0.4
    held = evaluate(work, b200, variant, "sustained")
    assert binding(work, b200, held).name == "power limit"
    twice = evaluate_seconds(work, b200.with_facts({"hbm.tbps_achieved": 14}), variant, "sustained")
    assert twice > 0.98 * held.seconds
    assert evaluate_seconds(work, b200.with_facts({"chip.tdp_w": 2000}), variant, "sustained") < 0.85 * held.seconds


@pytest.mark.parametrize(("keys", "heads"), [(1, 1), (1, 8)])
def test_a_launch_without_a_loop_does_not_wait_for_its_loop(keys: int, heads: int) -> None:
    p = predict(Workload(1, heads, heads, keys, keys), "b200", Fa4Variant(), interval=False)
    assert p.binding.kind in ("launch", "start")
    text = p.text()
    assert "recurrence" not in text.split("What it waits for")[1].split("Busy share")[0]
    assert "idle SMs: fewer tiles than SMs" in text
    assert "a decode kernel splits the keys over SMs" in text
