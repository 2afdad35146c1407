"""Profiles, the programs made from them and the forecasts they give, on profiles of real H200 kernels."""

from __future__ import annotations

import base64
import lzma
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilecast.base.data import MEASURED
from tilecast.model.compiled.code import (
    KINDS,
    LATENCIES,
    PIPES,
    CodeError,
    KernelCode,
    Stretch,
    WarpInstruction,
    dump_codes,
    load_codes,
)
from tilecast.model.compiled.costs import warp_costs
from tilecast.model.compiled.counts import hopper_counts, triton_counts
from tilecast.model.compiled.energy import activity, settled_clock
from tilecast.model.compiled.forecast import ctas_per_sm, forecast
from tilecast.model.compiled.loops.shelf import loops_at_hand
from tilecast.model.compiled.program import hopper_cta, triton_cta
from tilecast.model.compiled.shares import executed
from tilecast.model.compiled.sm import Step
from tilecast.model.families import parse_variant
from tilecast.model.kernel.variants.fa2 import Fa2Variant
from tilecast.model.kernel.variants.fa3 import Fa3Variant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine, load_machine

CODES = MEASURED / "h200_code.txt"
H200 = load_machine("h200-sxm")
MHZ = 1700.0


@cache
def profiles() -> tuple[KernelCode, ...]:
    return tuple(load_codes(CODES.read_text(encoding="utf-8")))


def pick(family: str, mask: str, head_dim: int, **knobs: object) -> KernelCode:
    """The first profile that has these knobs."""
    for code in profiles():
        variant = parse_variant(code.variant)
        if (code.family, code.mask, code.head_dim_qk) == (family, mask, head_dim) and all(
            getattr(variant, name) == value for name, value in knobs.items()
        ):
            return code
    raise LookupError(f"no profile of {family} {mask} {head_dim} {knobs}")


PERSISTENT = {"family": "hopper_ws", "mask": "none", "head_dim": 128, "scheduler": "persistent", "warpgroups": 2}
LONGEST = {"family": "hopper_ws", "mask": "causal", "head_dim": 128, "scheduler": "longest-first", "tile_n": 64}
TRITON = {"family": "triton", "mask": "causal", "head_dim": 64, "tile_m": 64}
THREE = pytest.mark.parametrize("kernel", [PERSISTENT, LONGEST, TRITON], ids=lambda k: f"{k['family']}-{k['mask']}")


def shape(code: KernelCode, seqlen: int, heads: int = 16, batch: int = 1) -> Workload:
    window = (300, 0) if code.mask == "window" else None
    return Workload(
        batch, heads, heads, seqlen, seqlen, code.head_dim_qk, code.head_dim_v, code.mask, window, code.dtype
    )


def what_if(**facts: float) -> Machine:
    """The H200 with some facts multiplied."""
    names = {name: name.replace("__", ".") for name in facts}
    return H200.with_facts({names[name]: factor * H200[names[name]] for name, factor in facts.items()})


# --- files of profiles -------------------------------------------------------------------------------------------

INSTRUCTION = st.builds(
    WarpInstruction, st.sampled_from(PIPES), st.integers(1, 15), st.integers(0, 63), st.integers(0, 7),
    st.integers(0, 7),
    st.sampled_from(LATENCIES), st.sampled_from(KINDS), st.integers(0, 256), st.booleans(), st.booleans(),
)  # fmt: skip
STRETCH = st.builds(Stretch, st.sampled_from(("once", "edge", "main")), st.lists(INSTRUCTION, max_size=5).map(tuple))
CODE = st.builds(
    KernelCode, st.text(max_size=8), st.text(max_size=8), st.integers(16, 256), st.integers(16, 256), st.just("none"),
    st.just("bf16"), st.just("sm_90a"), st.text(max_size=8), st.integers(4, 16),
    st.integers(24, 255), st.integers(0, 232448),
    st.integers(0, 64), st.integers(0, 64), st.lists(st.lists(STRETCH, max_size=3).map(tuple), max_size=3).map(tuple),
)  # fmt: skip


@given(st.lists(CODE, max_size=2))
@settings(max_examples=25)
def test_profiles_survive_the_round_trip(codes: list[KernelCode]) -> None:
    assert load_codes(dump_codes(codes)) == codes


def packed(text: str) -> str:
    return base64.b85encode(lzma.compress(text.encode())).decode()


@pytest.mark.parametrize(
    "text", ["", "gpu,machine\n", "{}", packed("no json"), packed("{}"), packed("[]"),
             packed('{"instructions": [3], "kernels": []}'),
             packed('{"instructions": [], "kernels": [{}]}'), "é"]
)  # fmt: skip
def test_other_files_are_refused(text: str) -> None:
    with pytest.raises(CodeError, match=r"not a file of machine-code profiles .*: write one with tilecast profile"):
        load_codes(text)


def test_a_truncated_file_is_refused() -> None:
    text = dump_codes(list(profiles()[:2])).strip()
    for length in (len(text) // 2, len(text) - 5, 10):
        with pytest.raises(CodeError):
            load_codes(text[:length])


def test_an_instruction_outside_the_table_is_refused() -> None:
    text = lzma.decompress(base64.b85decode(dump_codes([pick(**PERSISTENT)]).strip())).decode()  # type: ignore[arg-type]
    assert text.count('["main",[') == 2
    with pytest.raises(CodeError, match="IndexError"):
        load_codes(packed(text.replace('["main",[', '["main",[99999,', 1)))


def test_committed_profiles_are_distinct_and_within_the_vocabulary() -> None:
    assert len({code.key() for code in profiles()}) == len(profiles())
    for code in profiles():
        assert code.stack_bytes == 0 or code.family == "triton" or code.registers <= 255
        for instruction in {i for consumer in code.consumers for s in consumer for i in s.instructions}:
            assert instruction.pipe in PIPES
            assert instruction.kind in KINDS
            assert instruction.latency in LATENCIES


# --- programs ----------------------------------------------------------------------------------------------------


def tagged(program: Iterable[Step]) -> list[tuple[str, tuple[str, int]]]:
    """Kind and tag of the instructions that have one: a program is walked once."""
    return [(i.kind, tag) for i, tag in program if tag is not None]


def tags(found: list[tuple[str, tuple[str, int]]], kind: str) -> Counter[tuple[str, int]]:
    return Counter(tag for its, tag in found if its == kind and tag[0] != "turn")


def test_hopper_programs_await_every_copy_and_release_every_slot_once() -> None:
    seen = 0
    for code in profiles()[::3]:
        variant = parse_variant(code.variant)
        if not isinstance(variant, Fa3Variant):
            continue
        seen += 1
        work = shape(code, 768)
        blocks = [0, 768 // (64 * variant.warpgroups) - 1]  # causal: no whole block, and most
        tiles = [hopper_counts(work, b, variant.warpgroups, variant.tile_n) for b in blocks]
        cta = hopper_cta(code, variant, tiles, warp_costs(H200, MHZ), cold=False)
        copied = Counter(tag for tag, *_ in cta.copies)
        assert set(copied.values()) == {1}
        for w, program in enumerate(map(tagged, cta.programs)):
            mine = {tag for tag in copied if tag[0] in ("K", "V", f"Q{w}")}
            assert tags(program, "wait") == dict.fromkeys(mine, 1), code.variant
            assert tags(program, "arrive") == dict.fromkeys(mine, 1), code.variant
            turns = [tag for kind, tag in program if kind in ("wait", "arrive") and tag == ("turn", 0)]
            assert bool(turns) == (variant.ping_pong and variant.warpgroups > 1)
            assert len(turns) % 2 == 0
    assert seen > 40


def test_hopper_programs_wait_before_they_release() -> None:
    code = pick(**PERSISTENT)
    variant = parse_variant(code.variant)
    assert isinstance(variant, Fa3Variant)
    tiles = [hopper_counts(shape(code, 1024), b, variant.warpgroups, variant.tile_n) for b in (0, 1)]
    for program in hopper_cta(code, variant, tiles, warp_costs(H200, MHZ), cold=False).programs:
        waited = set()
        for instruction, tag in program:
            if instruction.kind == "wait":
                waited.add(tag)
            elif instruction.kind == "arrive" and tag is not None:
                assert tag in waited


@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_e4m3_programs_multiply_what_they_waited_for(head_dim: int, mask: str) -> None:
    """Kept loops that add P V up first wait for V before they wait for the next K; their tiles are a byte an element."""
    work = Workload(1, 8, seqlen_q=1536, head_dim_qk=head_dim, head_dim_v=head_dim, mask=mask, dtype="fp8")
    orders = set()
    for kept in loops_at_hand(work, H200).values():
        code, variant = kept.code, parse_variant(kept.code.variant)
        assert isinstance(variant, Fa3Variant)
        tiles = [hopper_counts(work, 3, variant.warpgroups, variant.tile_n)]
        cta = hopper_cta(code, variant, tiles, warp_costs(H200, MHZ), cold=False)
        sizes = {tag[0][0]: size for tag, size, *_ in cta.copies}
        assert sizes == dict.fromkeys("KV", variant.tile_n * head_dim) | {"Q": 64.0 * head_dim}
        for program in cta.programs:
            awaited: set[tuple[str, int]] = set()
            released: set[tuple[str, int]] = set()
            for instruction, tag in program:
                if instruction.kind == "wait" and tag is not None:
                    awaited.add(tag)
                elif instruction.kind == "arrive" and tag is not None:
                    released.add(tag)
                elif instruction.kind == "mma":
                    # P comes from registers, Q from shared memory; what is multiplied is the oldest tile that is held.
                    name = "V" if instruction.from_registers else "K"
                    number = next(n for n in count() if (name, n) not in released)
                    assert (name, number) in awaited, (code.variant, name, number)
        orders.add(variant.overlap)
    assert False in orders


def test_triton_programs_await_what_they_load() -> None:
    seen = 0
    for code in profiles()[::2]:
        variant = parse_variant(code.variant)
        if not isinstance(variant, Fa2Variant):
            continue
        seen += 1
        work = shape(code, 768)
        for block in (0, 768 // variant.tile_m - 1):
            counts = triton_counts(work, block, variant.tile_m, variant.tile_n)
            cta = triton_cta(code, variant, counts, 2, 100.0, warp_costs(H200, MHZ), 0.0)
            blocks = range(2 * counts.blocks(0))
            wanted = {(name, n): 1 for n in blocks for name in ("K", "V")} | {("Q", 0): 1, ("Q", 1): 1}
            first, *others = programs = [tagged(program) for program in cta.programs]
            assert tags(first, "load") == wanted, (code.variant, counts)
            for program in programs:
                assert tags(program, "wait") == wanted, (code.variant, counts)
            for program in others:
                assert not tags(program, "load")
    assert seen > 20


# --- forecasts ---------------------------------------------------------------------------------------------------


@THREE
def test_longer_sequences_take_longer(kernel: dict[str, object]) -> None:
    code = pick(**kernel)  # type: ignore[arg-type]
    cycles = [forecast(code, shape(code, n), H200, MHZ).cycles for n in (512, 1024, 2048)]
    assert cycles == sorted(cycles)
    # Twice the length is four times the work at most; less shows where not all SMs were busy.
    assert 1.5 < cycles[-1] / cycles[-2] < 4.1


@THREE
def test_more_sms_are_never_slower(kernel: dict[str, object]) -> None:
    code = pick(**kernel)  # type: ignore[arg-type]
    # Memory and caches grow along, so that only the sharing out of tiles differs.
    cycles = [
        forecast(
            code, shape(code, 1024), what_if(chip__sm_count=f, hbm__tbps_achieved=f, l2__store_tbps=f, l2__bytes=f), MHZ
        ).cycles
        for f in (0.5, 1.0)
    ]
    assert cycles == sorted(cycles, reverse=True)


@THREE
def test_slower_memory_is_never_faster(kernel: dict[str, object]) -> None:
    code = pick(**kernel)  # type: ignore[arg-type]
    work = shape(code, 512, heads=32)
    answers = [forecast(code, work, what_if(hbm__tbps_achieved=f), MHZ) for f in (1.0, 0.5, 0.02)]
    assert [a.cycles for a in answers] == sorted(a.cycles for a in answers)
    assert answers[0].memory_bytes == answers[2].memory_bytes
    assert answers[2].memory_cycles == pytest.approx(50 * answers[0].memory_cycles)
    assert answers[2].cycles >= answers[2].memory_cycles + answers[2].launch_cycles


@THREE
def test_a_forecast_is_no_faster_than_the_tensor_cores(kernel: dict[str, object]) -> None:
    code = pick(**kernel)  # type: ignore[arg-type]
    work = shape(code, 2048)
    answer = forecast(code, work, H200, MHZ)
    assert answer.cycles > executed(code, work, H200).tensor_cycles / H200["chip.sm_count"]
    # Each whole block: 2 x rows x keys x (Dqk + Dv) at the peak rate, for every CTA on the SM.
    variant = parse_variant(code.variant)
    rows = 64 * variant.warpgroups if isinstance(variant, Fa3Variant) else variant.tile_m  # type: ignore[union-attr]
    flop = 2 * rows * variant.tile_n * (code.head_dim_qk + code.head_dim_v) * answer.ctas_per_sm
    assert flop / H200["tensor.bf16_flop_per_clk"] <= answer.cycles_per_block * (1 + 1e-9)


def test_the_launch_is_part_of_the_answer() -> None:
    code = pick(**PERSISTENT)
    answer = forecast(code, shape(code, 512), H200, MHZ)
    assert 0 < answer.launch_cycles < answer.cycles
    assert answer.tiles == 16 * 512 // 128


def test_a_profile_of_another_kernel_is_refused() -> None:
    code = pick(**PERSISTENT)
    work = shape(code, 512)
    for other in (replace(work, head_dim_qk=64), replace(work, head_dim_v=64), replace(work, mask="causal")):
        with pytest.raises(CodeError, match=f"head_dim 128/128, mask none; got .*{other.head_dim_qk}"):
            forecast(code, other, H200, MHZ)
    with pytest.raises(CodeError, match="got blackwell_ws"):
        forecast(replace(code, family="blackwell_ws", variant="family=fa4"), work, H200, MHZ)


def test_ctas_on_an_sm_are_what_the_scarcest_resource_allows() -> None:
    code = pick(**TRITON)
    lean = replace(code, registers=32, shared_bytes=1024, warps=4)
    assert ctas_per_sm(replace(lean, shared_bytes=int(H200["smem.per_sm_bytes"]) // 3 - 1024), H200) == 3
    assert ctas_per_sm(replace(lean, registers=255), H200) == 2  # 256 x 128 threads x 4 bytes of 256 KiB
    assert ctas_per_sm(lean, H200) == H200["sm.max_warps"] // 4
    assert ctas_per_sm(replace(lean, shared_bytes=10**6), H200) == 1


# --- what it draws ----------------------------------------------------------------------------------------------


def test_activity_of_whole_tiles_is_what_the_shape_says() -> None:
    code = pick(**PERSISTENT)  # type: ignore[arg-type]
    work = shape(code, 2048)
    found = activity(code, work, H200, forecast(code, work, H200, MHZ))
    assert found.tensor_flop == work.flops
    # K and V for every tile of 128 rows, Q and O once.
    rows = 2 * 128 * (code.head_dim_qk + code.head_dim_v) // 2
    assert found.l2_bytes == 16 * (2048 // 128 * 2048 * rows / 128 + 2048 * rows / 128) * 2
    # One exponential for every score, and few beside them.
    exponentials = dict(found.unit_cycles)["mufu"] * H200["mufu.ex2_per_clk"]
    assert 16 * 2048**2 <= exponentials <= 1.02 * 16 * 2048**2


@THREE
def test_a_settled_clock_draws_what_the_limit_allows_and_falls_when_the_work_takes_less_time(
    kernel: dict[str, object],
) -> None:
    code = pick(**kernel)  # type: ignore[arg-type]
    work = shape(code, 2048, heads=32)
    seen = forecast(code, work, H200, MHZ)
    clocks = [settled_clock(code, work, H200, cycles=seen.cycles * factor) for factor in (0.5, 1.0, 2.0, 20.0)]
    assert [c.mhz for c in clocks] == sorted(c.mhz for c in clocks)
    assert clocks[0].bound == "power"
    assert clocks[0].power_w == pytest.approx(H200["chip.tdp_w"], rel=1e-3)
    assert clocks[-1].bound == "boost"
    assert clocks[-1].mhz == pytest.approx(H200["chip.clock_max_mhz"] * H200["power.tensor_clock_share"])
    short = settled_clock(code, work, H200, "short", cycles=seen.cycles * 0.5)
    assert short.mhz > clocks[0].mhz
    # Without cycles, those of the forecast at the clock it gives.
    own = settled_clock(code, work, H200)
    assert own.mhz == pytest.approx(
        settled_clock(code, work, H200, cycles=forecast(code, work, H200, own.mhz).cycles).mhz, rel=5e-3
    )
