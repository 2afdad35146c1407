"""Parts of query heads and of keys, and chains of sums: what the rules must never do, and that what is forecast is what generated files launch."""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilecast.base.module_file import module_of
from tilecast.codegen.shipping.ship import KERNELS
from tilecast.model.backward import FEW_BACKWARD, HOPPER_BACKWARD, TRITON_BACKWARD, build_backward
from tilecast.model.kernel.variants.fa3_backward import dq_chains, dq_sums
from tilecast.model.kernel.variants.hopper.few_backward import FewBackwardVariant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine
from tilecast.model.pipeline.backward.kernels import LoopKernel
from tilecast.model.pipeline.backward.parts import part_keys, parts_of, query_head_parts
from tilecast.model.training.evaluate import evaluate_backward
from tilecast.model.training.launch import run_loop, tiles_of

H200 = load_machine("h200-sxm")
LENGTHS = st.integers(1, 40_000)
MEASURED = Path(__file__).parents[4] / "data" / "measured"
#: Of modules: keys of a program, query rows that it takes once, and the time of those beside it.
PROGRAMS = (
    ("hopper_bwd_d256", 64, 160, 0.6),
    ("hopper_bwd_d192_128_causal", 64, 160, 0.6),
    ("hopper_bwd", 128, 96, 0.0),
    ("triton", 64, 80, 0.0),
)


@given(
    st.integers(1, 72),
    st.integers(1, 40),
    LENGTHS,
    LENGTHS,
    st.sampled_from([(-1, -1), (-1, 0), (64, 0), (500, 20), (0, -1)]),
    st.sampled_from([0.0, 0.6]),
)
def test_every_part_has_query_heads_and_many_programs_are_not_divided(
    group, heads_kv, seqlen_q, seqlen_k, window, beside
) -> None:
    parts = query_head_parts(group, heads_kv, seqlen_q, seqlen_k, *window, 128, 96, beside, 132)
    heads = -(-group // parts)
    assert 1 <= parts <= group and (parts - 1) * heads < group  # the last one has some
    if heads_kv * -(-seqlen_k // 128) >= 8 * 132:  # one sequence fills the SMs eight times
        assert parts <= 2


@pytest.mark.parametrize(
    ("problem", "parts"),
    [
        ((8, 2, 4096, 4096, -1, 0), 8),  # 64 programs of 512 steps at most for 132 SMs
        ((2, 8, 4096, 4096, -1, 0), 2),  # 256 programs
        ((4, 8, 2048, 2048, -1, 0), 2),
        ((7, 2, 1024, 1024, -1, 0), 7),
        ((6, 8, 1024, 1024, -1, 0), 3),
        ((8, 1, 256, 256, -1, 0), 8),  # two programs
        ((16, 8, 2778, 77, -1, -1), 8),
        ((8, 2, 1, 8192, -1, 0), 1),  # one query: nothing to divide
        ((8, 4, 4096, 4096, 512, 0), 1),  # 128 programs alike
        ((8, 2, 4096, 4096, 512, 0), 2),
        ((1, 2, 4096, 4096, -1, 0), 1),
    ],
)
def test_parts_of_known_problems(problem, parts: int) -> None:
    assert query_head_parts(*problem, 128, 96, 0.0, 132) == parts


@pytest.mark.parametrize(
    ("table", "mean", "worst"), [("h200_backward_parts_short.csv", 0.015, 0.1), ("h200_backward_parts.csv", 0.05, 0.4)]
)
def test_in_the_mean_over_batches_the_rule_is_near_the_best_that_was_measured(table, mean, worst) -> None:
    """Of the batches that were timed, one or two of those in the second table, before parts were added up four at a time."""
    timed: dict[tuple[str, ...], dict[int, list[float]]] = {}
    with (MEASURED / table).open(newline="") as file:
        for row in csv.DictReader(file):
            problem = tuple(row[name] for name in ("module", "heads_q", "heads_kv", "queries", "keys", "window_left"))
            timed.setdefault(problem, {}).setdefault(int(row["parts"]), []).append(math.log(float(row["us"])))
    behind = []
    for (module, *sizes), found in timed.items():
        heads_q, heads_kv, queries, keys, left = map(int, sizes)
        program = next(rest for name, *rest in PROGRAMS if module.startswith(name))
        right = 0 if "causal" in module or left >= 0 else -1
        parts = query_head_parts(heads_q // heads_kv, heads_kv, queries, keys, left, right, *program, 132)
        logs = {n: sum(each) / len(each) for n, each in found.items()}
        behind.append(logs[parts] - min(logs.values()))
    assert sum(behind) / len(behind) < mean and max(behind) < worst


@pytest.mark.parametrize(
    "module", ["hopper_bwd_d128_causal", "hopper_bwd_d256_full", "triton_bwd_d64_window", "triton_bwd_d96_full"]
)
def test_generated_files_ask_the_same_rule(module: str) -> None:
    pytest.importorskip("triton")
    found = module_of(KERNELS / "generated" / f"{module}.py").query_head_parts
    for group in (1, 4, 7, 48):
        for lengths in ((33, 4000), (1000, 1000), (9000, 200)):
            for window in ((-1, -1), (-1, 0), (128, 0)):
                asked = (group, 2, *lengths, *window, 64, 80, 0.6, 132)
                assert found(*asked) == query_head_parts(*asked)


@pytest.mark.parametrize("family", [HOPPER_BACKWARD, TRITON_BACKWARD])
def test_programs_of_parts_are_more_and_shorter_and_their_sums_are_a_launch(family) -> None:
    whole, shared = Workload(1, 8, 8, 1024, mask="causal"), Workload(1, 8, 1, 1024, mask="causal")
    assert parts_of(whole, 128, 64, 0.0, H200) == 1
    for work in (whole, shared):
        made = build_backward(work, family.chosen(work, H200), H200)
        keys = next(k for k in made.launches if isinstance(k, LoopKernel) and k.owns == "keys")
        tiles, heads = tiles_of(keys, work)
        assert heads == work.batch * work.heads_kv * keys.parts
        steps = tiles.total_iterations * heads
        if work is whole:
            assert keys.parts == 1 and "sum of parts" not in {k.name for k in made.launches}
            alone = steps
        else:
            assert keys.parts > 1 and made.launches[-1].name == "sum of parts"
            assert steps == pytest.approx(alone, rel=0.05)


# --- keys of few rows, and chains ---------------------------------------------------------------------------------------


def timed(table: str) -> dict[tuple[int, ...], dict[str, float]]:
    """Problem -> what ran -> microseconds."""
    found: dict[tuple[int, ...], dict[str, float]] = {}
    with (MEASURED / table).open(newline="") as file:
        for row in csv.DictReader(file):
            names = ("batch", "heads_q", "heads_kv", "queries", "keys", "head_dim", "causal")
            if row["us"]:
                found.setdefault(tuple(int(row[name]) for name in names), {})[row["what"]] = float(row["us"])
    return found


@given(st.integers(1, 64), st.integers(1, 128), LENGTHS, st.sampled_from([64, 128]), st.sampled_from([64, 128, 256]))
def test_every_part_has_keys(heads_kv, rows, seqlen_k, tile, columns) -> None:
    keys = part_keys(heads_kv, rows, seqlen_k, tile, columns, 132)
    parts = -(-seqlen_k // keys)
    assert keys % tile == 0 and 1 <= parts <= 2 * 132
    # As `plan` deals them: evenly, and none has none.
    each = math.ceil(math.ceil(seqlen_k / parts) / tile) * tile
    assert each <= keys and (parts - 1) * each < seqlen_k


def test_parts_of_keys_are_near_the_best_of_those_measured() -> None:
    """Sizes that were timed next to the rule's; one batch of the several that it takes the mean of."""
    behind = []
    for (_, heads_q, heads_kv, queries, keys, dim, _), found in timed("h200_backward_few.csv").items():
        form = {64: "few bn64 w4 s3", 128: "few bn128 w8 s2"}.get(dim, "few bn64 w8 s2")
        sizes = {int(name.rpartition("keys")[2]): us for name, us in found.items() if name.startswith(f"{form} keys")}
        rows = heads_q // heads_kv * queries
        if not sizes or rows > 64 or (dim == 128 and queries > 32):
            continue
        wide = 1 << (dim - 1).bit_length()
        asked = part_keys(heads_kv, rows, keys, int(form[6:].split()[0]), wide, 132)
        nearest = min(sizes, key=lambda size: abs(math.log(size / asked)))
        behind.append(sizes[nearest] / min(sizes.values()) - 1)
    assert len(behind) > 12
    assert sum(behind) / len(behind) < 0.065 and max(behind) < 0.26


def test_few_rows_are_as_fast_as_others_where_they_are_preferred() -> None:
    for (_, heads_q, heads_kv, queries, keys, dim, _), found in timed("h200_backward_few.csv").items():
        few = [us for name, us in found.items() if name.startswith("few")]
        if heads_q // heads_kv * queries <= 64 and (queries <= 32 or dim == 64 or (dim == 128 and keys <= 128)):
            assert min(few) < found["others"], (heads_q, heads_kv, queries, keys, dim)


def test_few_keys_are_faster_by_programs_that_walk_over_rows_wherever_they_ship() -> None:
    """Up to 64 queries and keys of 64 columns, 352 rows of a key head: but where all are one tile, which has a kernel of its own."""
    looked = 0
    for (_, heads_q, heads_kv, queries, keys, dim, _), found in timed("h200_backward_few_keys.csv").items():
        rows = heads_q // heads_kv * queries
        if dim <= 64 and queries <= 64 and keys <= 64 and 64 < rows <= 352 and "walks r64 w4 s1" in found:
            looked += 1
            assert found["walks r64 w4 s1"] < 0.9 * found["before"], (heads_q, heads_kv, queries, keys)
    assert looked >= 9


def test_few_rows_are_forecast_as_long_as_they_take() -> None:
    """What ships, in the parts that its rule takes: code from far, copies of memory, and sums of parts are in it."""
    errors = []
    for (batch, heads_q, heads_kv, queries, keys, dim, causal), found in timed("h200_backward_few.csv").items():
        work = Workload(batch, heads_q, heads_kv, queries, keys, dim, dim, "causal" if causal else "none")
        if dim == 192:  # of 128 columns of V
            work = Workload(batch, heads_q, heads_kv, queries, keys, 192, 128, work.mask)
        rows = heads_q // heads_kv * queries
        tile_n, warps, stages = {64: (128, 8, 3) if rows > 64 else (64, 4, 3), 128: (64, 4, 2) if keys <= 128 else (128, 8, 2)}.get(
            dim, (64, 8, 2)
        )  # fmt: skip
        asked = part_keys(heads_kv, rows, keys, tile_n, 1 << (dim - 1).bit_length(), 132)
        parts = math.ceil(keys / asked)
        us = [us for name, us in found.items() if name.startswith(f"few bn{tile_n} w{warps} s{stages} keys")
              and math.ceil(keys / int(name.rpartition("keys")[2])) == parts]  # fmt: skip
        if us:
            variant = FewBackwardVariant(rows=max(16, 1 << (rows - 1).bit_length()), tile_n=tile_n, warps=warps, stages=stages)  # fmt: skip
            errors.append(evaluate_backward(work, H200, variant, 1980.0).seconds * 1e6 / us[0] - 1)
    assert len(errors) >= 22
    assert sum(map(abs, errors)) / len(errors) < 0.16 and abs(sum(errors)) / len(errors) < 0.12


def test_code_that_no_cache_holds_makes_a_launch_longer() -> None:
    """By its instructions: from far once, again for each program that shares an SM where the first cache does not hold them."""
    work = Workload(14, 5, 5, 24, 24)
    (main,) = build_backward(work, FewBackwardVariant(rows=32), H200).loops
    bare = replace(main, instructions=(0.0, 0.0, 0.0))
    longer = run_loop(main, work, H200).cycles() - run_loop(bare, work, H200).cycles()
    far = H200["code.fetch_far_cycles"] * (main.instructions[0] + main.instructions[2])
    assert far - 1.0 < longer < far + H200["code.fetch_far_cycles"] * main.instructions[1]


@given(st.integers(1, 128), st.integers(1, 5000), st.integers(1, 600))
def test_chains_have_eight_blocks_and_many_heads_or_steps_have_one(heads, steps, blocks) -> None:
    chains = dq_chains(heads, steps, blocks)
    assert chains == 1 or 8 * chains <= blocks
    if 2 * heads * (steps + 2) > 264:
        assert chains == 1


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 128), st.integers(1, 600), st.integers(0, 600))
def test_only_few_blocks_have_sums_of_their_own(batch, heads, steps, blocks, seen) -> None:
    """Of one chain, and the fewer programs there are the sooner: what the bits may not depend on."""
    chains = dq_chains(heads, steps, blocks)
    sums = dq_sums(chains, batch * heads, steps, blocks, min(seen, blocks))
    assert sums in (chains, blocks) and (chains == 1 or sums == chains)
    assert sums <= max(chains, 15)
    if batch * heads * (steps + 2) > 132 or 2 * seen < blocks:
        assert sums == chains
    assert dq_sums(chains, heads, steps, blocks, blocks) >= dq_sums(chains, batch * heads, steps, blocks, blocks)


def test_sums_of_blocks_are_taken_where_they_are_faster() -> None:
    """Of those measured; what is left to turns would gain 13 % at most."""
    looked = {True: 0, False: 0}
    for (batch, heads_q, heads_kv, queries, keys, dim, causal), found in timed("h200_backward_sums.csv").items():
        group, tile, blocks = heads_q // heads_kv, 128 if dim == 64 else 64, -(-keys // 128)
        parts = query_head_parts(group, heads_kv, queries, keys, -1, 0 if causal else -1, 128, 96, 0.0, 132)
        steps = -(-queries // tile) * -(-group // parts)
        chains, seen = dq_chains(heads_kv * parts, steps, blocks), (keys - queries) // 128 if causal else blocks
        if chains > 1 or blocks == 1:
            continue
        own = dq_sums(chains, batch * heads_kv * parts, steps, blocks, seen) > 1
        looked[own] += 1
        times = found["own sums"], found["in turn"]
        assert times[0] <= times[1] if own else times[1] <= 1.13 * times[0], (batch, heads_q, heads_kv, queries, keys)
    assert looked[True] >= 14 and looked[False] >= 12


def test_chains_are_near_the_best_of_those_measured() -> None:
    """But in a batch that fills the SMs anyway, which the rule must not ask for: four chains for each of 16 sequences of 8 heads."""
    behind = {}
    for (batch, heads_q, heads_kv, queries, keys, dim, causal), found in timed("h200_backward_chains.csv").items():
        group, tile = heads_q // heads_kv, 128 if dim == 64 else 64
        parts = query_head_parts(group, heads_kv, queries, keys, -1, 0 if causal else -1, 128, 96, 0.0, 132)
        steps = -(-queries // tile) * -(-group // parts)
        asked = dq_chains(heads_kv * parts, steps, -(-keys // 128))
        counts = {int(name.rpartition(" ")[2]): us for name, us in found.items() if name.startswith("chains")}
        nearest = min(counts, key=lambda count: abs(math.log(count / asked)))
        behind[batch, heads_q, queries, keys] = counts[nearest] / min(counts.values()) - 1
        assert asked > 1 or counts[1] <= 1.05 * found["before"]
    assert behind.pop((16, 8, 128, 4096)) < 0.26
    assert sum(behind.values()) / len(behind) < 0.03 and max(behind.values()) < 0.2


@pytest.mark.parametrize(
    "module", ["triton_few_bwd_d64", "triton_few_bwd_d256", "hopper_bwd_d64_full", "hopper_bwd_d128_causal"]
)
def test_generated_files_ask_these_rules(module: str) -> None:
    pytest.importorskip("triton")
    loaded = module_of(KERNELS / "generated" / f"{module}.py")
    for heads, size in ((1, 70), (2, 900), (8, 28881)):
        if hasattr(loaded, "part_keys"):
            asked = heads, 28, size, 64, 128, 132
            assert loaded.part_keys(*asked) == part_keys(*asked)
        else:
            assert loaded.dq_chains(heads, 3, size) == dq_chains(heads, 3, size)
            assert loaded.dq_sums(1, heads, 3, size, 2) == dq_sums(1, heads, 3, size, 2)


def test_few_rows_read_keys_once_and_sums_of_their_parts_are_a_launch() -> None:
    work = Workload(2, 14, 2, 4, 28881)
    made = build_backward(work, FewBackwardVariant(), H200)
    (main,) = made.loops
    tiles, heads = tiles_of(main, work)
    parts = heads // (2 * 2)
    assert tiles.count == 1 and parts > 20
    assert 28881 / 64 <= tiles.total_iterations * parts < 1.2 * 28881 / 64
    assert main.row_bytes == 4 * 128 * 2 * 2 / 2
    assert [k.name for k in made.launches] == ["gradients", "sum of dQ"]
    assert made.launches[1].read_bytes == parts * 2 * 2 * 28 * 128 * 4
    assert [
        k.name for k in build_backward(Workload(24, 14, 2, 8, 8), FEW_BACKWARD.chosen(work, H200), H200).launches
    ] == ["gradients"]
