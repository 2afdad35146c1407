"""Every shipped kernel compiles for its targets, without a GPU, under the newest Triton and under 3.6.

Compiling all of them takes two cores five minutes, so what came out is a golden file: `make golden` compiles what has
changed.  Here every kernel must be recorded as it is now, what is recorded must be good, and one for each target and
release, chosen by its hash, is compiled and must come out as recorded.  TILECAST_COMPILE_ALL=1 compiles every kernel for every target.
"""

from __future__ import annotations

import csv
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from tilecast.base.data import MEASURED
from tilecast.codegen.render import BEST_ALLOCATION

pytest.importorskip("triton")
pytest.importorskip("torch")

from support.whole import is_whole

from tests.support.shipped_compile import (
    NEWEST,
    OLDEST,
    SHIPPED,
    Case,
    Compiler,
    Outcome,
    cases,
    compile_again,
    missing,
    read_record,
)
from tilecast.model.families import parse_variant

CASES = [*cases(NEWEST), *cases(OLDEST)]


def draw() -> list[Case]:
    """For each target and release, the kernel whose hash is lowest: a change of it draws another.

    With 3.6 that for Hopper alone, whose loops ship; with `--whole` those for the other targets too.
    """
    found: dict[tuple[str, str], Case] = {}
    for case in sorted(CASES, key=lambda case: case.sha):
        found.setdefault((case.target, case.release), case)
    return [case for case in found.values() if case.release == NEWEST or case.target == "sm_90a" or is_whole()]


ALL = bool(os.environ.get("TILECAST_COMPILE_ALL"))
DRAWN = [*cases(NEWEST, True), *cases(OLDEST, True)] if ALL else draw()

MATRIX = {"sm_80": "mma.sync", "sm_90a": "wgmma", "sm_100a": "tcgen05.mma", "sm_103a": "tcgen05.mma"}
SHARED = {"sm_80": 166912, "sm_90a": 232448, "sm_100a": 232448, "sm_103a": 232448}

#: Bytes a thread that backward passes with descriptors may spill: a masked and an unmasked loop hand each other dK and dV in
#: registers.  On an H200 larger tiles with such spills ran faster than smaller ones without.
MOST_SPILLED = 264
#: And under 3.6 one that is for GPUs of which none was at hand.
MOST_SPILLED_BEFORE = {"triton_tma_bwd_d256_window_b200": 280}
#: Forward kernels that spill two to four registers around their loops, by the release that does.
SPILLED_AROUND_LOOPS = {
    ("hopper_ws_d128_causal_long", OLDEST), ("hopper_ws_d192_128_full_long", NEWEST), ("hopper_ws_d192_window", NEWEST),
}  # fmt: skip
#: The same of serving kernels, as Triton 3.6 compiles them: those for Ampere spill more than those for Hopper.
MOST_SPILLED_SERVING = {
    "triton_serve_prefill_d256": 640,
    # Addresses beside an accumulator that has half of the registers: Triton 3.6 keeps them out of the loop, 3.9 does not.
    "triton_serve_d576_512_h200": 480,
}
#: Of a CTA on consumer GPUs, which run the backward passes with pointers as well.
CONSUMER_SHARED = 101376

#: Of e4m3 kernels that take all registers there are, with Triton 3.9, which places them otherwise.
MOST_SPILLED_EIGHT_BITS = {"hopper_fp8_d256_full": 480, "hopper_fp8_d256_causal": 568}

#: (head_dim, mask, CTAs that multiply together) -> warp instructions of FlashAttention-4's softmax loop for a 128x128 tile.
with (MEASURED / "sm100_softmax_sass.csv").open(encoding="utf-8") as table:
    FLASH_ATTENTION_4 = {
        (row["head_dim"], row["mask"], row["cta_group"]): int(row["count"])
        for row in csv.DictReader(table)
        if row["opcode"] == "all"
    }


@pytest.fixture(scope="module")
def compilers():
    made: dict[str, Compiler] = {}

    def of(release: str) -> Compiler:
        if why := missing(release):
            pytest.skip(why)
        if release not in made:
            made[release] = Compiler(release)
        return made[release]

    yield of
    for compiler in made.values():
        compiler.close()


def check_softmax(outcome: Outcome, case: Case) -> None:
    """The loop is no longer than FlashAttention-4's by more than a tenth, and MUFU takes what the variant leaves it."""
    kernel = SHIPPED[case.module]
    work, variant = kernel.workload, parse_variant(f"family=fa4,{kernel.variant}")
    emulated = round(variant.emulated_share * variant.tile_n)
    factors = 2 if variant.split == "k" else 1
    assert outcome.softmax_mufu == variant.tile_n - emulated + factors
    dims = str(work.head_dim_v) if work.head_dim_qk == work.head_dim_v else f"{work.head_dim_qk}/{work.head_dim_v}"
    theirs = FLASH_ATTENTION_4.get((dims, work.mask, str(variant.cta_group)))
    if theirs is not None and work.dtype != "fp8":  # counted in bf16, and other shares of exponentials
        assert outcome.softmax_instructions <= 1.1 * theirs
        if kernel.machine == "b200":
            assert outcome.softmax_instructions >= 0.9 * theirs


def check(outcome: Outcome, case: Case) -> None:
    if case.module.startswith(("triton_append", "triton_copy", "gemm_copy", "gemm_triton_one")):
        assert not outcome.matrix and not outcome.stack_bytes  # they move bytes
    elif case.module == "triton_quantize":
        assert MATRIX[case.target] in outcome.matrix.split() and not outcome.stack_bytes
    elif case.module.startswith("hopper_serve") and case.module.endswith(("e4m3", "runs")):
        assert outcome.matrix == "mma.sync"  # in registers, which each warp multiplies for itself
    elif case.module.startswith("triton_short") and case.module.endswith("few"):
        assert outcome.matrix == "mma.sync" and not outcome.stack_bytes  # a wgmma has 64 rows
    else:
        assert MATRIX[case.target] in outcome.matrix.split()
    # The simulator of compiled code follows every kernel for Hopper.
    assert outcome.unread == ""
    assert outcome.shared_bytes <= SHARED[case.target]
    assert outcome.tmem_columns <= 512
    assert outcome.triton.startswith("3.6") == (case.release == OLDEST)
    serves = case.module.startswith("blackwell_serve")
    if not serves and case.module.startswith(("blackwell_", "hopper_ws", "hopper_fp8", "hopper_prefill", "gemm_")):
        most = 0
        if case.module.startswith(("hopper_fp8", "hopper_prefill")) and case.release == NEWEST:
            # 3.6, with which they were measured and chosen, spills next to nothing.
            most = MOST_SPILLED_EIGHT_BITS.get(case.module, 16)
        if (case.module, case.release) in SPILLED_AROUND_LOOPS:
            most = 16
        if case.module.startswith("hopper_prefill"):
            # Between parts of a tile's keys, of which what it has so far stays in registers (4 to 11 % faster on an H200 than in memory with
            # 0 to 16 bytes); loops of products have none (`test_hopper_prefill`).  At head_dim 256 O takes half of a thread's registers.
            most = 256 if case.release == NEWEST else 176
            if "_d192_128" in case.module:  # behind the exponentials, where Q is given back, more is alive
                most = 360 if case.release == NEWEST else 296
        assert outcome.stack_bytes <= most
    if not serves and case.module.startswith("blackwell_") and case.release == NEWEST:
        check_softmax(outcome, case)
    if case.module.startswith("triton_bwd"):
        assert outcome.shared_bytes <= CONSUMER_SHARED
        # Six registers at the most, of head_dim 96 with a window.
        assert outcome.stack_bytes <= 24
    if case.module.startswith("triton_few_bwd"):
        # Addresses and sums around the products of a step, which waits for memory.
        assert outcome.stack_bytes <= 720
    if case.module.startswith("hopper_bwd"):
        # Ten registers at the most, twelve with a window; at head_dim 64, where K and V are held, Triton 3.9 spills in the loop.
        window = case.module.endswith("_window")
        most = (248 if window else 216) if "_d64_" in case.module and case.release == NEWEST else 48 if window else 40
        if "_d192_128_" in case.module:
            # Around the loop, and of P in float32 beside dP: rounded, P would lose dS of fp16 its small numbers.
            most = 144
        assert outcome.stack_bytes <= most
    if case.module.startswith("triton_serve"):
        assert outcome.shared_bytes <= CONSUMER_SHARED or case.target != "sm_80"
        assert outcome.stack_bytes <= MOST_SPILLED_SERVING.get(case.module, 136)
    if case.module.startswith("hopper_serve"):
        # Addresses of the warpgroup that merges, before roles part; of four warpgroups a thread has fewer registers until then.
        assert outcome.stack_bytes <= (96 if case.module.endswith("_e4m3") else 64)
    if case.module.startswith("hopper_mla"):
        # Four warpgroups leave 128 registers at launch: what is kept across items is, none of the steady loop.
        assert outcome.stack_bytes <= 320
    if case.module.startswith("blackwell_serve"):
        # Two numbers that all roles have, read once an item.
        assert outcome.stack_bytes <= 16
    if case.module.startswith("triton_tma_bwd"):
        known = MOST_SPILLED_BEFORE if case.release == OLDEST else {}
        assert outcome.stack_bytes <= known.get(case.module, MOST_SPILLED)


def test_the_record_has_every_kernel_as_it_is_now(request) -> None:
    if request.config.getoption("--update-golden"):
        compile_again(CASES)
    record = read_record()
    assert record.keys() == set(CASES), "run `make golden`, then read the diff"
    changed = [case for case in CASES if record[case][0] != case.sha]
    assert not changed, "compiled from another source: `make golden`, then read the diff"


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.module}-{case.target}-{case.release}")
def test_what_is_recorded_is_good(case) -> None:
    check(read_record()[case][1], case)


@pytest.mark.parametrize("case", DRAWN, ids=lambda case: f"{case.module}-{case.target}-{case.release}")
def test_compiles_as_recorded(case, compilers) -> None:
    outcome = compilers(case.release)(case)
    check(outcome, case)
    recorded = read_record().get(case)
    # Another release may place registers otherwise.
    if recorded is not None and recorded[1].triton == outcome.triton:
        assert outcome == recorded[1]


def test_the_oldest_triton_allocates_registers_best_without_being_asked(compilers, tmp_path: Path) -> None:
    """So the loops that ship, which it compiled, are those of sources with and without the option (`shipping.loops.compiled_text`)."""
    asked = next(case for case in CASES if case.module == "hopper_ws_d128_full" and case.release == OLDEST)
    source = asked.path.read_text(encoding="utf-8")
    plain = tmp_path / asked.path.name
    plain.write_text(source.replace(f", {BEST_ALLOCATION}", ""), encoding="utf-8")
    assert plain.read_text(encoding="utf-8") != source
    outcomes = [compilers(OLDEST)(SimpleNamespace(path=path, target=asked.target)) for path in (asked.path, plain)]
    assert outcomes[0] == outcomes[1]
    assert not outcomes[0].stack_bytes
