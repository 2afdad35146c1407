"""The GEMM pipeline against sums done by hand, closed forms of its steady state, and what must never be."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilecast.model.chip.evaluate import PredictError
from tilecast.model.compiled.units.fetch import far_cycles
from tilecast.model.gemm.evaluate import evaluate_gemm, stream
from tilecast.model.gemm.families import GEMM_FAMILIES, accumulator_registers, legality, shared_bytes
from tilecast.model.gemm.forecast import best_gemm, buffer_gains, forecast_gemm
from tilecast.model.gemm.pipeline.build import build
from tilecast.model.gemm.traffic import memory_share, tiling
from tilecast.model.gemm.variant import GemmVariant, gemm_variant_text, parse_gemm_variant
from tilecast.model.gemm.workload import Gemm
from tilecast.model.kernel.verdict import VariantError
from tilecast.model.kernel.workload import WorkloadError
from tilecast.model.machine.machine import load_machine
from tilecast.model.schedule.check import check_schedule
from tilecast.model.schedule.solve import optimal_schedule, storage_of
from tilecast.model.sm.bounds import bounds
from tilecast.model.sm.simulate import steady_state

H200, B200, A100 = (load_machine(name) for name in ("h200", "b200", "a100"))
#: Copies and shared memory as fast as tensor cores want them: what is left is the accumulator's own recurrence.
FAST = B200.with_facts({"l2.bytes_per_clk_per_sm": 500.0, "tma.bytes_per_clk": 500.0, "smem.bytes_per_clk": 512.0})
BLACKWELL = GemmVariant("gemm_blackwell", 128, 128, 64, 4, 1, 2)


def demand(gemm: Gemm, variant: GemmVariant, machine, mhz: float = 1700.0):  # type: ignore[no-untyped-def]
    loop = build(gemm, variant, machine, mhz)
    return {unit: cycles / loop.tiles for unit, cycles in loop.pipeline.demand().items()}


def test_demand_of_a_hopper_tile_is_what_the_sums_say() -> None:
    """128 x 128 x 256 in bf16: 16 instructions deep, two of 64 rows, N / 2 clocks each, 64 + 128 rows of 32 bytes read."""
    for accumulators in (1, 2):
        found = demand(Gemm(8192, 4096, 256), GemmVariant(accumulators=accumulators), H200)
        assert found["tensor"] == 16 * 2 * 64
        # Operands of the products, C read and D written once each through 128 bytes a clock.
        assert found["smem"] == 16 * 2 * (64 + 128) * 32 / 128 + 2 * 128 * 128 * 2 / 128
        # A and B once for the launch, C and D, by 132 SMs that share what boxes of such rows reach of 4.226 TB/s.
        moved = (8192 + 4096) * 256 * 2 / memory_share(128) + 2 * 8192 * 4096 * 2 / memory_share(256)
        share = 4.226e12 / 1.7e9 / 132
        assert found["memory"] == pytest.approx(moved / 2048 / share)


def test_demand_of_a_blackwell_tile() -> None:
    found = demand(Gemm(8192, 8192, 256), replace(BLACKWELL, tile_n=256, stages=2), B200)
    assert found["tensor"] == 16 * 128
    assert found["tmem_read"] == 128 * 256 * 4 / 512
    pair = demand(Gemm(8192, 8192, 256), replace(BLACKWELL, tile_n=256, stages=2, cta_group=2), B200)
    assert pair["tensor"] == 16 * 128  # twice the rows on twice the SMs
    assert pair["tma"] == pytest.approx(found["tma"] - 128 * 256 * 2 / 70)  # half of B's columns


def test_where_products_and_memory_are_level_on_the_h200() -> None:
    """C and D alone: 131,072 bytes a 128 x 256 tile against 16 k + ... clocks of products, level near k = 486 at 1.9 GHz."""
    variant = GemmVariant(tile_n=256, accumulators=1, stages=2)
    wide = Gemm(65536, 65536, 486 // 16 * 16)
    found = demand(wide, variant, H200, 1900.0)
    cd = 131072 / (4.226e12 / 1.9e9 / 132)
    assert cd == pytest.approx(7779, rel=2e-3)
    assert found["tensor"] == -(-wide.k // 64) * 64 * 16
    assert found["memory"] > cd


def own(gemm: Gemm, variant: GemmVariant, machine):  # type: ignore[no-untyped-def]
    return stream(gemm, variant, machine, 1700.0, memory=False)


@pytest.mark.parametrize("k", [256, 512, 1024, 2048])
def test_one_accumulator_adds_its_epilogue_and_two_hide_it(k: int) -> None:
    """T(products) + completion + T(epilogue) + hand-over with one; the longer of the two with two."""
    gemm = Gemm(8192, 8192, k)
    one, two = (own(gemm, replace(BLACKWELL, accumulators=n, stages=8, c_stages=4), FAST) for n in (1, 2))
    products = k * 4.0  # 128 x 128 x 16 in 64 clocks
    epilogue = one.loop.pipeline.op("epilogue0").min_cycles
    handover = FAST["tensor.mma_latency_cycles"] + FAST["sync.mbarrier_roundtrip_cycles"]
    assert one.tile_cycles == pytest.approx(products + epilogue + handover, rel=1e-6)
    assert two.tile_cycles == pytest.approx(max(products, (products + epilogue + handover) / 2, epilogue), rel=0.02)


def test_products_that_fill_the_port_of_shared_memory_leave_the_epilogue_none() -> None:
    """128 x 128 from shared memory reads 128 bytes a clock, all there is: two accumulators overlap nothing."""
    gemm = Gemm(8192, 8192, 256)
    full = own(gemm, replace(BLACKWELL, accumulators=2), FAST.with_facts({"smem.bytes_per_clk": 128.0}))
    assert full.tile_cycles == pytest.approx(full.loop.pipeline.op("epilogue0").min_cycles + 1024)


def test_the_bound_is_the_recurrence_that_the_second_accumulator_halves() -> None:
    gemm = Gemm(8192, 8192, 256)
    one, two = (
        bounds(build(gemm, replace(BLACKWELL, accumulators=n), FAST, 1700.0, memory=False).pipeline) for n in (1, 2)
    )
    assert one.binding == "recurrence" and "epilogue0" in one.rec.ops_on_cycle
    assert (one.rec.distance, one.rec.cycles) == (1, pytest.approx(own(gemm, BLACKWELL, FAST).tile_cycles))
    assert two.ii_lower < one.ii_lower


def test_warpgroups_that_take_turns_hide_the_epilogue_on_hopper() -> None:
    gemm = Gemm(8192, 8192, 1024)
    turns, together = (own(gemm, GemmVariant(stages=5, accumulators=n), H200) for n in (2, 1))
    assert turns.tile_cycles == pytest.approx(1024 / 16 * 2 * 64)
    epilogue = together.loop.pipeline.op("epilogue0h0").min_cycles
    assert together.tile_cycles - turns.tile_cycles == pytest.approx(epilogue, rel=0.3)


@pytest.mark.parametrize("variant", [GemmVariant(stages=5), GemmVariant(stages=5, accumulators=1), BLACKWELL])
def test_the_solver_takes_the_pipeline_and_the_simulation_is_no_faster(variant: GemmVariant) -> None:
    machine = H200 if variant.family == "gemm_hopper" else B200
    loop = build(Gemm(8192, 8192, 128), variant, machine, 1700.0, memory=False).pipeline
    schedule = optimal_schedule(loop, storage=storage_of(machine), time_limit_s=20.0)
    assert schedule.status == "optimal" and check_schedule(loop, schedule) == []
    assert bounds(loop, with_roles=False).ii_lower - 1 <= schedule.ii_cycles
    assert schedule.bound <= steady_state(loop).ii_cycles * 1.01 + 2


def test_copies_are_served_in_order_and_no_faster_than_their_port() -> None:
    """A ring of 64 x 256 tiles needs 640 bytes every 8 clocks of products: at 40 bytes a clock the copies bind."""
    slow = H200.with_facts({"l2.bytes_per_clk_per_sm_lockstep": 40.0})
    found = own(Gemm(8192, 8192, 2048), GemmVariant(tile_m=64, tile_n=256, stages=4), slow)
    assert found.tile_cycles == pytest.approx(2048 * 640 / 40, rel=0.05)
    assert max(found.loop.pipeline.demand(), key=found.loop.pipeline.demand().__getitem__) == "tma"


def test_many_k_steps_go_on_at_the_pace_of_the_simulated_ones() -> None:
    for variant in (GemmVariant(stages=5), GemmVariant(stages=5, accumulators=1)):
        gemm = Gemm(8192, 8192, 12288)
        whole = build(gemm, variant, H200, 1700.0, most_steps=10**6)
        exact = steady_state(whole.pipeline).ii_cycles / whole.tiles
        assert whole.steps_left == 0
        assert stream(gemm, variant, H200, 1700.0).tile_cycles == pytest.approx(exact, rel=3e-3)


# -- launches ----------------------------------------------------------------------------------------------------


def test_tiles_and_traffic_by_hand() -> None:
    t = tiling(Gemm(1000, 3000, 200, beta=0.0), GemmVariant(), H200)
    assert (t.rows, t.columns, t.steps, t.tiles, t.most, t.slots) == (8, 24, 4, 192, 2, 132)
    assert t.hbm_bytes == (1000 + 3000) * 200 * 2 + 1000 * 3000 * 2
    assert t.l2_bytes == 192 * 4 * 256 * 64 * 2 + 1000 * 3000 * 2
    # B of 128 MiB does not stay in half of 63 MB: it comes again for every group of 8 rows of tiles.
    big = tiling(Gemm(8192, 65536, 1024), GemmVariant(), H200)
    assert big.hbm_input_bytes == 8192 * 1024 * 2 + 8 * 65536 * 1024 * 2


def test_the_end_of_an_odd_tile_lies_between_its_neighbours() -> None:
    found = own(Gemm(8192, 8192, 512), GemmVariant(), H200)
    ends = [found.end(n) for n in range(1, 40)]
    assert ends == sorted(ends)
    assert ends[0] < ends[1] and found.end(2.5) == pytest.approx((ends[1] + ends[2]) / 2)
    assert ends[22] - ends[20] == pytest.approx(2 * found.tile_cycles)


SIZES = st.sampled_from([256, 1000, 2048, 4096, 8192])
KS = st.sampled_from([64, 128, 256, 512, 1024, 2048])
KERNELS = st.sampled_from([
    ("h200", GemmVariant()), ("h200", GemmVariant(accumulators=1)), ("h200", GemmVariant(tile_m=64, tile_n=256)),
    ("b200", BLACKWELL), ("b200", replace(BLACKWELL, accumulators=2, cta_group=2, stages=4)),
    ("a100", GemmVariant("gemm_triton", stages=3, accumulators=1, c_stages=1)),
])  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(SIZES, SIZES, KS, KERNELS, st.sampled_from(["sustained", "short", 1000.0]))
def test_no_launch_beats_its_units_and_the_waterfall_adds_up(m, n, k, kernel, clock) -> None:  # type: ignore[no-untyped-def]
    machine, variant = load_machine(kernel[0]), kernel[1]
    answer = forecast_gemm(Gemm(m, n, k), machine, variant, clock=clock)
    run = answer.run
    peak = machine["tensor.bf16_flop_per_clk"] * machine["chip.sm_count"] * run.clock.mhz * 1e6
    assert answer.gemm.flops / run.seconds <= peak
    assert run.gbps <= machine["hbm.tbps_achieved"] * 1e3 * (1 + 1e-9)
    assert min(step.share for step in answer.waterfall) >= -1e-9
    assert sum(step.share for step in answer.waterfall) == pytest.approx(1.0, rel=1e-6)
    assert run.in_step.tile_cycles >= answer.bounds.ii_lower / run.own.loop.tiles * (1 - 1e-9)
    assert run.seconds >= run.apart_seconds


@settings(max_examples=30, deadline=None)
@given(SIZES, KS, KERNELS)
def test_more_work_takes_longer_and_faster_units_do_not(m, k, kernel) -> None:  # type: ignore[no-untyped-def]
    machine, variant = load_machine(kernel[0]), kernel[1]
    gemm = Gemm(m, 4096, k)
    seconds = evaluate_gemm(gemm, variant, machine, 1000.0).seconds
    # Served in order, less work or a faster memory may take an SM a little longer: Graham's anomalies.
    assert evaluate_gemm(replace(gemm, k=2 * k), variant, machine, 1000.0).seconds > seconds * 0.97
    assert evaluate_gemm(replace(gemm, m=2 * m), variant, machine, 1000.0).seconds >= seconds * 0.97
    faster = machine.with_facts({"hbm.tbps_achieved": 1.5 * machine["hbm.tbps_achieved"]})
    assert evaluate_gemm(gemm, variant, faster, 1000.0).seconds <= seconds * 1.03
    assert evaluate_gemm(replace(gemm, beta=0.0), variant, machine, 1000.0).seconds <= seconds * 1.03


def test_the_second_accumulator_pays_in_the_middle() -> None:
    """Short products hide under memory, long ones hide the epilogue: the gain by the knob alone peaks between."""
    gains = {g.k: g.knob_gain for g in buffer_gains(Gemm(8192, 8192, 64), B200, ks=(64, 256, 1024, 8192)) if g.knob_gain}  # fmt: skip
    assert gains[256] > gains[8192] and gains[1024] > gains[8192]
    assert gains[256] > 1.03 and gains[8192] < 1.02


def test_best_is_the_best_of_the_space() -> None:
    gemm = Gemm(4096, 4096, 512)
    found, origin = best_gemm(gemm, H200, "gemm_hopper", "short")
    assert "fastest of" in origin
    from tilecast.model.gemm.families import find_gemm_family

    times = {
        v: evaluate_gemm(gemm, v, H200, "short").seconds for v in find_gemm_family("gemm_hopper").space(gemm, H200)
    }
    assert times[found] == min(times.values())


def test_the_interval_holds_the_value_and_names_what_it_rests_on() -> None:
    answer = forecast_gemm(Gemm(8192, 8192, 512), H200, GemmVariant(stages=5), interval=True)
    low, high = answer.tflops_interval
    assert low < answer.run.tflops <= high
    effects = {effect.fact: effect for effect in answer.fact_effects}
    assert [e.largest(answer.run.tflops) for e in answer.fact_effects] == sorted((e.largest(answer.run.tflops) for e in answer.fact_effects), reverse=True)  # fmt: skip
    # Neighbours that read as if alone starve 128 x 128 tiles: 512 bytes every 8 clocks of products.
    alone = effects["l2.bytes_per_clk_per_sm_lockstep"].at_low
    assert alone is not None and alone < 0.95 * answer.run.tflops
    assert "Rests on" in answer.text() and forecast_gemm(Gemm(64, 64, 64), H200).to_dict()["tflops_interval"] == []


# -- refusals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"m": 0}, "m: expected 1 to"),
        ({"k": True}, "k: expected a whole number"),
        ({"dtype": "bf61"}, "did you mean bf16"),
        ({"c_dtype": "fp8"}, "c_dtype: expected bf16, fp16, fp32"),
        ({"in_place": True, "d_dtype": "fp32"}, "in_place: D written over C"),
        ({"in_place": True, "beta": 0.0}, "no C to write over"),
        ({"alpha": float("nan")}, "alpha: expected a finite number"),
    ],
)
def test_problems_that_make_no_sense_are_refused(values: dict[str, object], words: str) -> None:
    with pytest.raises(WorkloadError) as error:
        Gemm(**{"m": 64, "n": 64, "k": 64, **values})  # type: ignore[arg-type]
    assert words in str(error.value)


JOINED = GemmVariant("gemm_hopper", 64, 64, 64, 4, 1, 2, 1, 0, joined=1)


def test_joined_warpgroups_have_one_epilogue_and_its_code_once() -> None:
    """Beside two roles that work on halves: the same products, one role; of one wave of tiles the only epilogue's code is fetched once."""
    gemm = Gemm(1024, 1024, 1024)
    two = GemmVariant("gemm_hopper", 128, 128, 64, 5, 1, 2, 2)
    one = replace(two, joined=1, group_m=0)
    streams = [stream(gemm, v, H200, 1700.0, memory=False) for v in (two, one)]
    roles = [[role.name for role in s.loop.pipeline.roles if role.name.startswith("consumer")] for s in streams]
    assert roles == [["consumer0", "consumer1"], ["consumer0"]]
    products = [s.loop.pipeline.demand()["tensor"] for s in streams]
    assert products[0] == products[1] == 2 * 16 * 512 / 2
    assert evaluate_gemm(gemm, one, H200, "short").seconds < evaluate_gemm(gemm, two, H200, "short").seconds
    # 160 columns are products of 128 and 32, of which the second takes 24 cycles and not 16 a step of 16.
    wide = stream(gemm, replace(one, tile_n=160, c_parts=5, c_stages=5), H200, 1700.0, memory=False)
    assert wide.loop.pipeline.demand()["tensor"] == 2 * 16 * 4 * (64 + 24)


def test_first_copies_that_are_ordered_early_do_not_wait_for_the_roles() -> None:
    """By the set-up of the roles, and what the way to the first copy is shorter by; programs that meet order none early, nor do other families."""
    gemm, fetch = Gemm(1024, 1024, 1024), far_cycles(H200)
    starts = [evaluate_gemm(gemm, replace(GemmVariant(), early=early), H200, 1700.0).start_cycles for early in (0, 1)]
    assert starts[0] - starts[1] == pytest.approx(H200["launch.cta_setup_cycles"] + (127 - 115) * fetch)
    for v, machine in ((GemmVariant(in_step=4), H200), (GemmVariant("gemm_blackwell"), B200)):
        one, other = (evaluate_gemm(gemm, replace(v, early=early), machine, 1700.0).start_cycles for early in (0, 1))
        assert one == other
    # Eight warps that are one role have as many instructions each for 128 rows as four have for 64, and more to do while the code comes.
    joined = GemmVariant("gemm_hopper", 128, 192, 64, 4, 1, 3, 3, 0, joined=1)
    whole, half = (evaluate_gemm(gemm, replace(joined, tile_m=rows), H200, 1700.0).start_cycles for rows in (128, 64))
    assert whole < half


@pytest.mark.parametrize(
    ("variant", "machine", "words"),
    [
        (GemmVariant(), B200, "needs wgmma"),
        (GemmVariant(tile_m=64, accumulators=1), H200, "128 rows or more"),
        (GemmVariant(c_stages=1), H200, "multiple of 2"),
        (GemmVariant(tile_n=256), H200, "consumer thread needs"),
        (GemmVariant(stages=9), H200, "shared memory"),
        (GemmVariant(tile_k=16, stages=1), H200, ""),
        (replace(BLACKWELL, tile_m=64), B200, "tile_m must be 128"),
        (replace(BLACKWELL, accumulators=2, tile_n=256, stages=2), B200, ""),
        (GemmVariant("gemm_triton", accumulators=2), A100, "one accumulator"),
        (GemmVariant("gemm_hopper", 16, 128, stages=2), H200, "64 rows or more, got tile_m 16"),
        # Columns of two products, and warpgroups in one role.
        (GemmVariant(tile_n=192, c_stages=4, c_parts=3), H200, ""),
        (
            GemmVariant(tile_n=192, c_stages=4, c_parts=2),
            H200,
            "lies in one product's columns (128, 64), got 192 / 2: use c_parts=3",
        ),
        (
            GemmVariant(tile_m=192, tile_n=96, c_stages=4, c_parts=3),
            H200,
            "tiles of 192 rows have a power of two of columns",
        ),
        (replace(BLACKWELL, tile_n=192, c_parts=3), B200, "power of two of columns and no joined"),
        (replace(JOINED, tile_m=128), H200, ""),
        (replace(JOINED, accumulators=2), H200, "warpgroups are joined that share a tile"),
        (replace(JOINED, group_m=8), H200, "(group_m 0), got joined 1 and group_m 8: use group_m=0"),
        (GemmVariant(group_m=0), H200, "got joined 0 and group_m 0: use group_m=8"),
        (replace(JOINED, tile_n=256, stages=3), H200, "192 columns or fewer, got tile_n 256"),
    ],
)
def test_variants_are_legal_or_say_why_not(variant: GemmVariant, machine, words: str) -> None:  # type: ignore[no-untyped-def]
    verdict = legality(variant, Gemm(512, 512, 512), machine)
    assert verdict.legal == (words == "") and words in verdict.sentence()


def test_fp32_c_takes_twice_the_slots() -> None:
    v = GemmVariant()
    assert shared_bytes(v, Gemm(64, 64, 64, c_dtype="fp32")) - shared_bytes(v, Gemm(64, 64, 64)) == 2 * 128 * 128 * 2
    assert accumulator_registers(v) == 2 * accumulator_registers(replace(v, accumulators=1))


def test_refusals_of_forecasts() -> None:
    with pytest.raises(PredictError, match="holds 141 GB"):
        forecast_gemm(Gemm(1 << 20, 1 << 20, 64), H200, GemmVariant())
    with pytest.raises(PredictError, match="needs tcgen05"):
        forecast_gemm(Gemm(512, 512, 64), H200, family="gemm_blackwell")
    with pytest.raises(PredictError, match="one accumulator"):
        buffer_gains(Gemm(512, 512, 64), A100)
    with pytest.raises(PredictError, match="no fp8 matrix rate"):
        forecast_gemm(Gemm(512, 512, 64, dtype="fp8"), A100)


def test_parts_of_k_are_tiles_of_a_shorter_k_and_one_launch_more() -> None:
    """512 x 512 x 8192: 16 tiles of 128 k-steps, or 128 of 16; A and B are read once whatever shares them, every part's sums are written."""
    gemm, v = Gemm(512, 512, 8192), GemmVariant(accumulators=1, c_stages=2, c_parts=2, stages=5)
    whole, shared = (forecast_gemm(gemm, H200, replace(v, parts=n)) for n in (1, 8))
    one, eight = (f.run.own.loop.tiling for f in (whole, shared))
    assert (one.tiles, one.steps, eight.tiles, eight.steps) == (16, 128, 128, 16)
    assert one.hbm_input_bytes == eight.hbm_input_bytes == 2 * 2 * 512 * 8192
    assert (one.hbm_c_bytes, one.hbm_d_bytes) == (2 * 512 * 512,) * 2 and (eight.hbm_c_bytes, eight.hbm_d_bytes) == (
        0,
        8 * 4 * 512 * 512,
    )
    assert whole.run.merge_seconds == 0 < shared.run.merge_seconds < shared.run.seconds < 0.5 * whole.run.seconds
    for f in (whole, shared):
        assert sum(step.share for step in f.waterfall) == pytest.approx(1) and all(
            step.cycles >= -1e-6 for step in f.waterfall
        )
    assert any("sums of parts of k" in step.cause and step.cycles > 0 for step in shared.waterfall)
    # The search knows them where tiles leave SMs idle, and there alone.
    assert best_gemm(gemm, H200, "gemm_hopper", "short")[0].parts > 1
    assert all(found.parts == 1 for found in GEMM_FAMILIES["gemm_hopper"].space(Gemm(4096, 4096, 4096), H200))
    for wrong in (GemmVariant(parts=2), replace(BLACKWELL, parts=2, accumulators=1)):
        assert (
            "use accumulators=1 or parts=1"
            in legality(wrong, gemm, B200 if wrong.family == "gemm_blackwell" else H200).sentence()
        )


def test_variants_as_text_and_back() -> None:
    v = replace(BLACKWELL, accumulators=2)
    assert parse_gemm_variant(gemm_variant_text(v), GemmVariant("gemm_blackwell")) == v
    for text, words in (
        ("tile_n=100", "one of 4, 32, 64, 96, 128, 160, 192, 256, 320"), ("acumulators=2", "accumulators"), ("stages=x", "whole number"),
        ("family=gemm_hoper", "gemm_hopper"), ("family=gemm_hopper", "does not run here"), ("stages=99", "1 to 16"),
    ):  # fmt: skip
        with pytest.raises(VariantError, match=words):
            parse_gemm_variant(text, v)
