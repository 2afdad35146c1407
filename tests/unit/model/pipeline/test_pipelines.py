"""Pipelines: demand equals the closed tables, cycles equal the published counters, legality names resources."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tilecast.model.compiled.code import KernelCode
from tilecast.model.compiled.forecast import ctas_per_sm
from tilecast.model.families import (
    FAMILIES,
    build_pipeline,
    legal_space,
    legality,
    named_knobs,
    native_family,
    parse_variant,
    published_variant,
)
from tilecast.model.forecast.answer import pipe_shares
from tilecast.model.kernel.variant import variant_text
from tilecast.model.kernel.variants.fa2 import Fa2Variant
from tilecast.model.kernel.variants.fa3 import Fa3Variant
from tilecast.model.kernel.variants.fa4 import Fa4Variant
from tilecast.model.kernel.variants.unfused import UnfusedVariant
from tilecast.model.kernel.verdict import VariantError
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine
from tilecast.model.pipeline.rescaling import rescale_share
from tilecast.model.pipeline.unfused import kernels
from tilecast.model.sm.simulate import steady_state
from tilecast.validation.measured.recorded import read_profiles
from tilecast.validation.measured.run import CODES

B200, B300, H200 = load_machine("b200"), load_machine("b300"), load_machine("h200-sxm")
HOPPER_LOOPS = [
    code
    for code in read_profiles(CODES).values()
    if code.family == "hopper_ws" and not any(one.kind == "spill" for one in code.consumers[0][-1].instructions)
]


def test_fa4_demand_is_the_papers_table() -> None:
    p = build_pipeline(Workload(), Fa4Variant(), B200)
    demand = p.demand()
    assert demand["tensor"] == 2048  # M = 256: 2 x 1024
    assert demand["smem"] == 1536
    assert demand["mufu"] == 2 * (1024 + 8)  # and one scale a row
    assert build_pipeline(Workload(dtype="fp8"), Fa4Variant(), B200).demand()["tensor"] == 1024
    assert build_pipeline(Workload(head_dim_qk=192, head_dim_v=128), Fa4Variant(), B200).demand()["tensor"] == 2560
    assert build_pipeline(Workload(), Fa4Variant(), B300).demand()["mufu"] == 2 * (512 + 4)


def test_masks_in_tensor_memory_wait_for_each_piece_and_masks_in_registers_are_alu_alone() -> None:
    causal = Workload(mask="causal")
    scores = 128 * 128
    demand = {}
    for home in ("registers", "tmem"):
        made = build_pipeline(causal, Fa4Variant(mask_home=home), B200)
        demand[home] = dict(dict(made.mask_demand)["max0"])
        assert made.first_block_masked == (home == "registers")
    # 164 of 274 and 175 of 295 instructions of a thread that holds a row of 128 scores.
    assert demand["registers"] == pytest.approx({"alu": 328.0, "issue": 175.4}, rel=2e-3)
    assert demand["tmem"]["alu"] == pytest.approx(548.0, rel=2e-3)
    assert demand["tmem"][""] == 4 * B200["tmem.load_latency_cycles"]
    assert demand["tmem"]["tmem_read"] == scores * 4 / B200["tmem.read_bytes_per_clk"]


def test_row_maxima_that_came_with_the_load_are_found_again_behind_a_mask_in_registers() -> None:
    causal = Workload(mask="causal")
    found = [
        dict(dict(build_pipeline(causal, Fa4Variant(mask_home="registers", load_max=known), B300).mask_demand)["max0"])
        for known in (False, True)
    ]
    assert found[1]["alu"] - found[0]["alu"] == pytest.approx(128 * 128 / 2 / B300["alu.lanes"])


def test_a_pair_reads_half_of_k_and_v() -> None:
    pair = build_pipeline(Workload(), Fa4Variant(cta_group=2), B200).demand()
    assert pair["tensor"] == 2048
    assert pair["smem"] == 1024  # 512 a tile: Q whole, half of K and V (FA4P)


@pytest.mark.parametrize("share", [0.0, 0.125, 0.25])
def test_emulation_moves_work_from_mufu_to_fma(share: float) -> None:
    base = build_pipeline(Workload(), Fa4Variant(), B200).demand()
    moved = build_pipeline(Workload(), Fa4Variant(emulated_share=share), B200).demand()
    assert base["mufu"] - moved["mufu"] == pytest.approx(share * 2 * 16384 / 16)
    assert moved["fma"] - base["fma"] == pytest.approx(share * 2 * 16384 * 7.45 / 128)


@pytest.mark.parametrize(("dtype", "rescales"), [("bf16", 1.0), ("fp16", 1.0), ("fp8", rescale_share(8.0))])
def test_conditional_rescales_as_compiled(dtype: str, rescales: float) -> None:
    work = Workload(dtype=dtype)
    sums = 64 * Fa3Variant().tile_n / 128  # come in the same run
    fma = [
        dict(build_pipeline(work, Fa3Variant(rescale=rescale), H200).op("rescale0").instructions)["fma"] - sums
        for rescale in ("always", "conditional")
    ]
    assert fma[0] == 64 * 128 / 128
    assert fma[1] == pytest.approx(rescales * fma[0])


@pytest.mark.parametrize("code", HOPPER_LOOPS[::9], ids=lambda code: f"{code.variant} {code.mask}")
def test_a_step_holds_its_warpgroup_as_its_machine_code_does(code: KernelCode) -> None:
    """Barriers and polls of the recorded loops, and stall counts ahead of the first product."""
    variant = parse_variant(code.variant)
    work = Workload(
        head_dim_qk=code.head_dim_qk, head_dim_v=code.head_dim_v, mask=code.mask if code.mask == "causal" else "none"
    )
    (loop,) = (stretch.instructions for stretch in code.consumers[0] if stretch.role == "main")
    kinds = [one.kind for one in loop]
    turns = variant.ping_pong and variant.warpgroups > 1
    # The release of Q in masked loops stands behind a branch.
    barriers = kinds.count("barrier") - (code.mask != "none") - 3 * (variant.rescale == "conditional")
    polls = kinds.count("wait") - turns
    assert (barriers, polls) == (3 + (not variant.overlap) + turns, 2)
    ahead = sum(one.stall for one in loop[: kinds.index("mma")] if one.kind not in ("barrier", "wait"))
    assert 45 <= ahead <= 92
    barrier = H200["sync.barrier_cycles"] + H200["sync.barrier_spread_cycles"] / 2
    pipeline = build_pipeline(work, variant, H200)
    held = sum(op.min_cycles for op in pipeline.ops if op.kind == "barrier" and op.tile == 0)
    # V is polled under QK where products overlap.
    rest = held - barriers * barrier - (polls - variant.overlap) * H200["sync.wait_done_cycles"]
    assert rest == pytest.approx(55 if variant.overlap else 70)


PORTABLE_LOOPS = [
    code
    for table in (CODES, CODES.with_name("h200_tuner_code.txt"))
    for code in read_profiles(table).values()
    if code.family == "triton" and code.stack_bytes == 0
]


@pytest.mark.parametrize("code", PORTABLE_LOOPS[::4], ids=lambda code: f"{code.variant} {code.mask} {code.head_dim_qk}")
def test_a_step_of_the_portable_kernel_is_as_its_machine_code_is(code: KernelCode) -> None:
    """CTAs that fit an SM, barriers and polls, cycles around the products, and instructions on every pipe."""
    variant = parse_variant(code.variant)
    work = Workload(
        head_dim_qk=code.head_dim_qk, head_dim_v=code.head_dim_v, mask=code.mask if code.mask == "causal" else "none"
    )
    loop = next(stretch.instructions for stretch in code.consumers[0] if stretch.role == "main")
    pipeline = build_pipeline(work, variant, H200)
    assert pipeline.ctas_per_sm == ctas_per_sm(code, H200)
    held = {op.name: op.min_cycles for op in pipeline.ops if op.kind == "barrier" and op.tile == 0}
    kinds = [one.kind for one in loop]
    barriers = kinds.count("barrier") - (code.head_dim_qk == 192)  # a third tile to ask for
    assert barriers == (3 if variant.kv_stages > 1 else 10)
    barrier, poll = H200["sync.barrier_cycles"] + H200["sync.barrier_spread_cycles"] / 2, H200["sync.wait_done_cycles"]
    again = (code.head_dim_qk == 192) * (H200["tensor.mma_latency_cycles"] + poll)
    assert sum(held.values()) == pytest.approx(47 + 50 + barriers * barrier + 2 * poll + again)
    if variant.kv_stages > 1:
        ahead = sum(one.stall for one in loop[: kinds.index("mma")] if one.kind not in ("barrier", "wait"))
        assert 40 <= ahead <= 90
    asked = {
        pipe: sum(dict(op.instructions).get(pipe, 0) for op in pipeline.ops if op.tile == 0)
        for pipe in ("mufu", "fma", "alu")
    }
    for pipe, count in asked.items():
        if pipe == "alu" and code.head_dim_qk == 192:
            continue  # addresses of a third tile are on it
        assert sum(one.pipe == pipe for one in loop) == pytest.approx(count, rel=0.1, abs=22), pipe


def test_eight_warps_of_a_tile_of_64_each_have_all_of_s() -> None:
    work = Workload()
    four, eight = (Fa2Variant(tile_m=64, tile_n=32, warps=warps, kv_stages=2) for warps in (4, 8))
    one, two = (build_pipeline(work, v, H200) for v in (four, eight))
    assert two.demand()["mufu"] / two.ctas_per_sm == 2 * one.demand()["mufu"] / one.ctas_per_sm


def test_streams_of_a_cta_go_in_step_and_ctas_of_one_come_apart() -> None:
    """Two streams of one CTA leave the tensor core idle under their softmax; two CTAs of one stream do not."""
    work = Workload()
    together = build_pipeline(work, Fa2Variant(tile_m=128, tile_n=64, warps=8, kv_stages=3), H200)
    apart = build_pipeline(work, Fa2Variant(tile_m=64, tile_n=64, warps=4, kv_stages=3), H200)
    assert (together.ctas_per_sm, apart.ctas_per_sm) == (1, 2)
    assert together.in_step is None and apart.in_step is None
    assert steady_state(apart).ii_cycles < 0.9 * steady_state(together).ii_cycles


def test_ctas_of_two_streams_are_half_way_in_step() -> None:
    work = Workload(head_dim_qk=64, head_dim_v=64)
    two = build_pipeline(work, Fa2Variant(tile_m=128, tile_n=64, warps=8, kv_stages=3), H200)
    assert two.ctas_per_sm == 2 and two.in_step is not None
    free, locked = steady_state(replace(two, in_step=None)).ii_cycles, steady_state(two.in_step).ii_cycles
    assert steady_state(two).ii_cycles == pytest.approx((free + locked) / 2) and free < locked


@pytest.mark.parametrize("stages", [1, 2])
def test_a_shallow_ring_waits_for_its_tiles(stages: int) -> None:
    work = Workload()
    deeper, shallow = (Fa2Variant(tile_m=128, tile_n=64, warps=8, kv_stages=n) for n in (stages + 1, stages))
    periods = [steady_state(build_pipeline(work, v, H200)).ii_cycles for v in (deeper, shallow)]
    assert periods[1] > periods[0] + 100


def test_hopper_demand() -> None:
    demand = build_pipeline(Workload(), Fa3Variant(), H200).demand()
    assert demand["tensor"] == 2048
    assert demand["mufu"] == 1024 + 4 * 128 / 16  # and one of every thread of a row's quad
    assert demand["regs"] > 0.9 * 2048  # the port that accumulators in registers load


# Cycles of a 128 x 128 tile, flash-attention #2701 (NCU); the SM's constants are one set, none chosen on these.
@pytest.mark.parametrize(
    ("machine", "dtype", "share", "measured", "within"),
    [
        ("b200", "bf16", 0.1875, 1168, 0.06),
        ("b200", "fp8", 0.1875, 1174, 0.09),
        ("b300", "bf16", 0.0, 1025, 0.06),
        ("b300", "fp8", 0.0, 928, 0.06),
    ],
)
def test_fa4_cycles_against_published_counters(
    machine: str, dtype: str, share: float, measured: float, within: float
) -> None:
    p = build_pipeline(Workload(dtype=dtype), Fa4Variant(cta_group=2, emulated_share=share), load_machine(machine))
    assert steady_state(p).ii_cycles / 2 == pytest.approx(measured, rel=within)


def test_fa4_pipe_shares_against_published_counters() -> None:
    p = build_pipeline(Workload(), Fa4Variant(cta_group=2, emulated_share=0.1875), B200)
    shares = pipe_shares(p, steady_state(p), B200)
    for name, percent in {"tensor": 87.7, "xu": 71.9, "fma": 20.0, "alu": 31.2}.items():
        assert 100 * shares[name] == pytest.approx(percent, abs=5.0), name


def test_head_dim_256_reaches_the_fixed_clock_run() -> None:
    p = build_pipeline(Workload(head_dim_qk=256, head_dim_v=256), Fa4Variant(cta_group=2, split="k"), B200)
    assert steady_state(p).ii_cycles / 2 == pytest.approx(2165, rel=0.03)  # cudnn-frontend PR #488


def test_hopper_arithmetic_under_wgmma_matches_the_measurement() -> None:
    """Softmax mix beside wgmma: 14.3 to 15.5 cycles an element per sub-partition (h200_corun.csv)."""
    demand = build_pipeline(Workload(head_dim_qk=64, head_dim_v=64), Fa3Variant(overlap=False), H200)
    elements = 128 * 128 / 128
    arithmetic = sum(o.cycles("regs") for o in demand.ops if o.kind not in ("qk", "pv", "rescale"))
    under = arithmetic / elements / (1 - H200["regs.mma_share"])
    assert under == pytest.approx(15.0, rel=0.12)


def test_unfused_reads_and_writes_scores_twice() -> None:
    w = Workload(batch=2, heads_q=4, heads_kv=4, seqlen_q=1024, seqlen_k=1024, head_dim_qk=64, head_dim_v=64)
    parts = kernels(w, UnfusedVariant(), B200)
    scores = 2 * 4 * 1024 * 1024 * 2
    assert len(parts) == 3
    assert parts[0].write_bytes == scores
    assert parts[1].read_bytes + parts[1].write_bytes == 2 * scores
    assert parts[2].read_bytes == scores + 2 * 4 * 1024 * 64 * 2
    assert sum(p.tensor_flop for p in parts) == w.flops


@pytest.mark.parametrize(
    ("variant", "workload", "machine", "resource"),
    [
        (
            Fa4Variant(),
            Workload(head_dim_qk=256, head_dim_v=256),
            B200,
            r"tensor memory .* needs 768 columns but the limit is 512 \(over by 256\)",
        ),
        (Fa4Variant(kv_stages=12), Workload(), B200, r"shared memory .* bytes but the limit is 232448"),
        (Fa4Variant(load_max=True), Workload(), B200, r"tcgen05.ld.red"),
        (Fa4Variant(), Workload(), H200, r"tcgen05.* which h200-sxm does not have"),
        (
            Fa3Variant(warpgroups=3),
            Workload(),
            H200,
            r"a consumer thread needs 184 registers but the limit is 160",
        ),
        (Fa3Variant(kv_stages=4), Workload(), H200, r"shared memory"),
        (Fa2Variant(), Workload(dtype="fp8"), load_machine("a100"), r"a100 has no fp8 matrix rate"),
        (Fa2Variant(tile_n=128), Workload(head_dim_qk=256, head_dim_v=256), load_machine("rtx-5090"), r"shared memory"),
    ],
)
def test_illegal_names_resource_amount_and_lever(
    variant: object, workload: Workload, machine: object, resource: str
) -> None:
    import re

    verdict = legality(variant, workload, machine)
    assert not verdict.legal
    assert re.search(resource, verdict.sentence())
    assert verdict.lever


@pytest.mark.parametrize("machine", ["a100", "b200", "b300", "h200-sxm", "rtx-5090", "gb10"])
@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_spaces_are_legal_and_build(machine: str, dims: tuple[int, int], mask: str) -> None:
    chip = load_machine(machine)
    w = Workload(head_dim_qk=dims[0], head_dim_v=dims[1], mask=mask)
    found = legal_space(native_family(chip).name, w, chip)
    assert found
    for variant in found[:: len(found) // 7 + 1]:
        assert legality(variant, w, chip).legal
        p = build_pipeline(w, variant, chip)
        executed = p.demand()["tensor"] * chip["tensor.bf16_flop_per_clk"]
        rows = p.rows_per_cta * p.ctas_per_sm
        assert executed >= 2 * rows * p.keys_per_iteration * sum(dims) * 0.999


@pytest.mark.parametrize("machine", ["b200", "h200-sxm", "a100"])
@pytest.mark.parametrize("family", ["fa2", "unfused"])
def test_published_variants_of_portable_families_are_legal(machine: str, family: str) -> None:
    w = Workload()
    assert legality(published_variant(family, w, load_machine(machine)), w, load_machine(machine)).legal


def test_variant_text_round_trips() -> None:
    for family, record in FAMILIES.items():
        variant = record.variant()
        assert parse_variant(variant_text(variant)) == variant
        assert variant.family == family
    changed = parse_variant("emulated-share=0.25,cta_group=2,split_p=false", Fa4Variant())
    assert changed == Fa4Variant(emulated_share=0.25, cta_group=2, split_p=False)


def test_old_names_of_knobs_are_taken() -> None:
    assert parse_variant("fa4:stages=1") == Fa4Variant(softmax_tiles=1)
    assert parse_variant("triton:stages=3,tile_n=32") == Fa2Variant(kv_stages=3, tile_n=32)
    assert named_knobs("fa2:stages=3", FAMILIES["fa2"]) == {"kv_stages": 3}
    with pytest.raises(VariantError, match="knob 'kv_stages' is given twice"):
        parse_variant("fa2:stages=3,kv_stages=2")
    with pytest.raises(VariantError, match="knob 'tile_n' is given twice"):
        parse_variant("fa4:tile_n=64,tile-n=128")
    with pytest.raises(VariantError, match="'kv_stages' takes one of 1, 2, 3, 4, got '0'"):
        parse_variant("fa2:kv_stages=0")
    with pytest.raises(VariantError, match="family fa3 has no knob 'stages'"):
        parse_variant("fa3:stages=2")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("emulatd_share=0.1", r"no knob 'emulatd_share'; did you mean emulated_share"),
        ("family=fa5", r"unknown family 'fa5'; did you mean"),
        ("cta_group=3", r"'cta_group' takes one of 1, 2, got '3'"),
        ("emulated_share=2", r"takes 0 to 1, got '2'"),
        ("tile_n=100", r"multiples of 16"),
        ("split_p=maybe", r"takes true or false"),
        ("tile_n=many", r"takes a whole number, got 'many'"),
        ("tile_n", r"expected knob=value, got 'tile_n'"),
    ],
)
def test_wrong_variants_are_refused(text: str, message: str) -> None:
    with pytest.raises(VariantError, match=message):
        parse_variant(text, Fa4Variant())


def test_a_variant_without_a_family_is_refused_with_an_example() -> None:
    with pytest.raises(
        VariantError, match="no family is named in 'tile_n=64': begin with one, as in fa3:tile_n=64; known: fa4"
    ):
        parse_variant("tile_n=64")
