"""e4m3 kernels of the hopper_ws family on the emulator, and what the family refuses in e4m3."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tilecast.codegen.generate import generate
from tilecast.codegen.shipping.ship import KERNELS, read_e4m3_list
from tilecast.model.compiled.counts import program_tiles
from tilecast.model.families import find_family, legality, parse_variant, writable
from tilecast.model.kernel.variants.fa3 import Fa3Variant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine

pytest.importorskip("torch")

from tests.support.eight_bits import SINK, judge

H200 = load_machine("h200-sxm")
SHIPPED = {kernel.module: kernel for kernel in read_e4m3_list() if kernel.family == "hopper_ws"}
#: Chained and promoted products, whose exponentials are partly polynomials, in turns, without overlap, with P in words.
OTHERS = (
    "warpgroups=2,tile_n=128,kv_stages=2,rescale=always,emulated_share=0.125,ping_pong=true,scheduler=grid",
    "warpgroups=3,tile_n=64,kv_stages=2,rescale=always,overlap=false,ping_pong=false,scheduler=grid",
    "warpgroups=2,tile_n=256,kv_stages=2,rescale=always,overlap=false,ping_pong=true,scheduler=grid",
    "warpgroups=1,tile_n=32,kv_stages=3,rescale=conditional,rescale_threshold=2,overlap=false,ping_pong=false,scheduler=longest-first",
)


@pytest.mark.parametrize("module", SHIPPED)
def test_shipped_kernels_compute_attention(module: str) -> None:
    path, work = KERNELS / "generated" / f"{module}.py", SHIPPED[module].workload
    judge(path, work, 150, 300, (2, 1), "late", machine="h200")
    judge(path, work, 70, 200, (4, 2), "random", machine="h200", along_keys=True, scores=SINK)
    judge(path, work, 200, 90, (1, 1), "random", machine="h200")  # causal rows without a key


@pytest.mark.parametrize("variant", OTHERS)
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_other_variants_compute_attention(variant: str, mask: str, tmp_path: Path) -> None:
    work = Workload(1, 2, 1, 150, 300, 64, mask=mask, dtype="fp8")
    file = tmp_path / "kernel.py"
    file.write_text(generate(work, H200, find_family("fa3"), parse_variant(f"family=fa3,{variant}")).source)
    judge(file, work, 150, 300, (2, 1), "random", machine="h200")


def test_every_tile_comes_once_however_many_rounds_are_pairs() -> None:
    """`work_tile` of a file that ships, its lines run for all programs at once: heads, query blocks, programs, all rounds of pairs there are."""
    source = (KERNELS / "generated" / "hopper_fp8_d128_causal.py").read_text()
    body = source[source.index("def work_tile(") :]
    dealt: dict[str, object] = {"own_copy": lambda x: x, "TILE_M": 1}
    dealt["gl"] = gl = SimpleNamespace(where=np.where, minimum=np.minimum)
    exec(body[: body.index("\n\n\n")], dealt)

    def tiles(heads_q: int, batch: int, blocks: int, programs: int, turns: int, pair_turns: int) -> list[list[tuple[int, int]]]:  # fmt: skip
        """Of each program its (query block, head) in order."""
        problem = SimpleNamespace(
            query_blocks=blocks, heads=heads_q * batch, heads_q=heads_q, turns=turns, pair_turns=pair_turns
        )
        gl.program_id, gl.num_programs = lambda _axis: np.arange(programs), lambda _axis: programs
        found: list[list[tuple[int, int]]] = [[] for _ in range(programs)]
        for turn in range(turns):
            given = dealt["work_tile"](problem, turn)  # type: ignore[operator]
            b, h, row, there = (np.broadcast_to(x, programs) for x in given)
            for pid in np.flatnonzero(there):
                found[pid].append((int(row[pid]), int(b[pid] * heads_q + h[pid])))
        return found

    for heads_q, batch, blocks, programs in itertools.product(
        (1, 2, 3, 5), (1, 2, 3), range(1, 8), (1, 2, 3, 4, 7, 12)
    ):
        heads, pairs = heads_q * batch, (blocks + 1) // 2
        shape, everything = (heads_q, batch, blocks), sorted(itertools.product(range(blocks), range(heads)))
        trips = -(-pairs * heads // programs)
        dealings = {
            "paired": (programs, 2 * trips, 2 * trips),
            "longest-first": (programs, -(-blocks * heads // programs) | 1, 0),
        }
        for scheduler, (some, turns, pair_turns) in dealings.items():
            if turns > 1:
                given = tiles(*shape, some, turns, pair_turns)
                whole = (
                    scheduler == "longest-first" or blocks * heads > programs
                )  # else the forecast has a program to each
                assert not whole or given == list(program_tiles(scheduler, blocks, heads, programs)), (shape, scheduler)
                assert sorted(itertools.chain(*given)) == everything, (shape, scheduler)
        assert sorted(itertools.chain(*tiles(*shape, blocks * heads, 1, 0))) == everything
        for rounds in range((pairs * heads - 1) // programs + 1):
            left = heads - rounds * programs // pairs
            given = tiles(*shape, programs, 2 * rounds - -blocks * left // programs, 2 * rounds)
            if 2 * rounds - -blocks * left // programs == 1:
                continue  # one turn is a program to each tile
            assert sorted(itertools.chain(*given)) == everything, (shape, programs, rounds)
            if blocks * heads > programs:
                assert given == list(program_tiles("paired", blocks, heads, programs, rounds)), (
                    shape,
                    programs,
                    rounds,
                )


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_the_chosen_variant_can_be_written(dim: int, mask: str) -> None:
    made = generate(Workload(head_dim_qk=dim, mask=mask, dtype="fp8"), H200, find_family("fa3"))
    assert isinstance(made.variant, Fa3Variant)
    # O in the accumulator of the matrix unit loses long sums: only who asks for it gets that.
    assert made.variant.rescale == "always"
    assert "float8e4nv" in made.source


@pytest.mark.parametrize(
    ("knobs", "dim", "text"),
    [
        ("rescale=anchored", 128, "use rescale=always or conditional"),
        ("rescale=conditional,rescale_threshold=8", 128, "must be at most 4 in e4m3"),
        ("rescale=conditional,rescale_threshold=2.5", 128, "must be a whole number in e4m3"),
        ("tile_n=256,warpgroups=3,rescale=always,overlap=false", 64, "a consumer thread needs 184 registers"),
        ("tile_n=64,rescale=always", 96, "head_dim_qk must be 32, 64, 128, 256 in e4m3, got 96"),
    ],
)
def test_refusals_name_reason_and_lever(knobs: str, dim: int, text: str) -> None:
    verdict = writable(parse_variant(f"family=fa3,{knobs}"), Workload(head_dim_qk=dim, dtype="fp8"), H200)
    assert not verdict.legal and text in verdict.sentence()


def test_promoted_products_need_registers() -> None:
    work = Workload(head_dim_qk=256, dtype="fp8")
    promoted, chained = Fa3Variant(tile_n=64), Fa3Variant(tile_n=64, rescale="conditional", rescale_threshold=4)
    assert legality(promoted, work, H200).legal and writable(chained, work, H200).legal
    # Without overlap a product is there before S is; three warpgroups leave 160 registers, which a mask overdraws.
    three = Fa3Variant(warpgroups=3, tile_n=64, overlap=False)
    assert writable(three, Workload(head_dim_qk=128, dtype="fp8"), H200).legal
    assert not writable(three, Workload(head_dim_qk=128, dtype="fp8", mask="causal"), H200).legal
    verdict = writable(promoted, work, H200)
    assert not verdict.legal and "a consumer thread under Triton needs 336 registers" in verdict.sentence()
    # One half of the columns after the other, without overlap, they fit.
    assert writable(Fa3Variant(overlap=False, ping_pong=False), work, H200).legal
