"""Hopper's forward before compilation against what the recorded machine code has: order of a step, spills, masks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from statistics import mean

import pytest

from tilecast.model.chip.evaluate import evaluate
from tilecast.model.compiled.code import KernelCode, WarpInstruction
from tilecast.model.families import build_pipeline, parse_variant
from tilecast.model.kernel.variants.fa2 import Fa2Variant
from tilecast.model.kernel.variants.fa3 import Fa3Variant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine
from tilecast.model.pipeline.hopper.order import exp_parts, pv_parts
from tilecast.model.pipeline.hopper.registers import spill_demand, spilled_words
from tilecast.model.pipeline.softmax_cost import mask_instructions
from tilecast.validation.measured.recorded import read_profiles
from tilecast.validation.measured.run import CODES

H200 = load_machine("h200-sxm")
KERNELS = [code for table in (CODES, CODES.with_name("h200_tuner_code.txt")) for code in read_profiles(table).values()]
HOPPER = [code for code in KERNELS if code.family == "hopper_ws"]


def _work(code: KernelCode) -> Workload:
    window = (1024, 0) if code.mask == "window" else None
    return Workload(head_dim_qk=code.head_dim_qk, head_dim_v=code.head_dim_v, mask=code.mask, window=window)


def _variant(code: KernelCode) -> Fa3Variant:
    variant = parse_variant(code.variant)
    assert isinstance(variant, Fa3Variant)
    return variant


def _loop(code: KernelCode, role: str = "main") -> tuple[WarpInstruction, ...]:
    return next(stretch.instructions for stretch in code.consumers[0] if stretch.role == role)


def _exponentials(instructions: Iterable[WarpInstruction]) -> int:
    return sum(one.pipe == "mufu" for one in instructions)


def test_exponentials_stand_before_the_wait_for_pv_as_compiled() -> None:
    """With overlap; "always" at head_dim 128 and 128 keys is compiled in two ways, with all of them before and with none."""
    apart: dict[tuple[str, bool], list[float]] = {}
    for code in HOPPER:
        variant, work = _variant(code), _work(code)
        if not variant.overlap or code.stack_bytes > 100 or variant.tile_n == 128:
            continue
        loop = _loop(code)
        waits = {one.amount: at for at, one in enumerate(loop) if one.kind == "mma_wait"}
        listed = _exponentials(loop[waits[1] : waits[0]]) / _exponentials(loop)
        parts = exp_parts(work, variant, H200)
        steps = [step.op for step in build_pipeline(work, variant, H200).roles[1].program]
        early = sum(share for part, share in parts.items() if steps.index(f"exp0{part}") < steps.index("have_o0"))
        apart.setdefault((variant.rescale, work.mask == "none"), []).append(abs(early - listed))
    assert len(apart) == 6
    for group, differences in apart.items():
        assert mean(differences) < 0.13, group


def test_without_overlap_pv_stands_amid_exponentials_as_compiled() -> None:
    """In unmasked loops; a few of "conditional" with 32 keys have both instructions before them."""
    agrees: dict[bool, list[bool]] = {True: [], False: []}
    for code in HOPPER:
        variant, work = _variant(code), _work(code)
        if variant.overlap or code.stack_bytes > 100:
            continue
        loop = _loop(code)
        issued = [at for at, one in enumerate(loop) if one.kind == "mma" and one.from_registers]
        amid = _exponentials(loop[issued[0] : issued[-1]]) > 0
        agrees[work.mask == "none"].append(amid == (len(pv_parts(work, variant)) == 2))
    assert all(agrees[False])
    assert mean(agrees[True]) > 0.85
    assert min(map(len, agrees.values())) > 30


def test_v_is_multiplied_whole_however_it_is_issued() -> None:
    work = Workload(seqlen_q=512, seqlen_k=512)
    variant = Fa3Variant(overlap=False, ping_pong=False)
    apart = build_pipeline(work, variant, H200)
    whole = build_pipeline(Workload(seqlen_q=512, seqlen_k=512, mask="causal"), variant, H200)
    assert apart.demand()["tensor"] == whole.demand()["tensor"]


def test_kernels_are_forecast_to_spill_that_do() -> None:
    """Words that are stored in every step, of kernels that Triton compiles."""
    for code in HOPPER:
        variant, work = _variant(code), _work(code)
        stored = sum(one.amount for one in _loop(code) if one.kind == "spill") / 4
        if spill_demand(work, variant, H200):
            assert stored > 10, code.variant
        else:
            assert stored < 10, code.variant
    many = Fa3Variant(tile_n=256, overlap=False)
    assert spilled_words(Workload(head_dim_qk=64, head_dim_v=64), many, H200) == pytest.approx(
        64 + 128 + 32 + 0.2 * 192 - 168
    )


def test_flash_attentions_own_tile_spills_nothing() -> None:
    assert spilled_words(Workload(), Fa3Variant(tile_n=176), H200) == 0


@pytest.mark.parametrize("mask", ["causal", "window"])
def test_masked_blocks_have_the_instructions_of_the_recorded_ones(mask: str) -> None:
    """Beyond plain blocks, an ALU instruction is 1 / 128 of an element's."""
    extra = []
    for code in KERNELS:
        if code.mask != mask or "rescale=anchored" in code.variant or code.stack_bytes > 100:
            continue
        keys = int(dict(part.split("=") for part in code.variant.split(","))["tile_n"])
        pipes = [Counter(one.pipe for one in _loop(code, role)) for role in ("edge", "main")]
        mmas = [one for one in _loop(code) if one.kind == "mma" and not one.from_registers]
        tiles = max(1, round(sum(one.amount * 16 for one in mmas) / (keys * code.head_dim_qk)))
        extra.append((pipes[0]["alu"] - pipes[1]["alu"]) / (keys * tiles * 64 / 128))
    work = Workload(mask=mask, window=(1024, 0) if mask == "window" else None)
    assert mean(extra) == pytest.approx(mask_instructions(work), rel=0.2)


def test_portable_kernels_on_hopper_begin_anew_for_masked_blocks() -> None:
    work = Workload(1, 132, 132, 4096, 4096, mask="causal")
    variant = Fa2Variant(tile_m=128, tile_n=64, warps=8, kv_stages=2)
    with_restart = evaluate(work, H200, variant, 1500.0)
    pipeline = with_restart.pipeline
    assert pipeline.restart_cycles > H200["tma.latency_l2_cycles"]
    assert build_pipeline(Workload(), variant, load_machine("a100")).restart_cycles == 0
