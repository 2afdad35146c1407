"""Blocks a tile takes in, the order of tiles, and the bytes they move: against masks written out and simple bounds."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tilecast.model.compiled.counts import greedy_makespan, hopper_counts, key_blocks, program_tiles, triton_counts
from tilecast.model.compiled.memory import memory_traffic
from tilecast.model.kernel.workload import Workload

SCHEDULERS = ("persistent", "longest-first", "paired")


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    queries, keys = draw(st.integers(1, 400)), draw(st.integers(1, 400))
    mask = draw(st.sampled_from(("none", "causal", "window")))
    reach = st.integers(-1, 300)
    window = draw(st.tuples(reach, reach)) if mask == "window" else None
    return Workload(1, 1, 1, queries, keys, 64, 64, mask, window)


def visible(work: Workload) -> np.ndarray:
    """[query, key] mask, written out from its definition: query i stands at key i + seqlen_k - seqlen_q."""
    query = np.arange(work.seqlen_q)[:, None] + work.seqlen_k - work.seqlen_q
    key = np.arange(work.seqlen_k)[None, :]
    left, right = work.window or (-1, 0 if work.mask == "causal" else -1)
    seen = np.ones((work.seqlen_q, work.seqlen_k), bool)
    if right >= 0:
        seen &= key <= query + right
    if left >= 0:
        seen &= key >= query - left
    return seen


def rows_of(seen: np.ndarray, row: int, rows: int) -> np.ndarray:
    return seen[row : row + rows]


def blocks_of(part: np.ndarray, keys: int) -> tuple[list[int], list[int]]:
    """(blocks that hold a visible key, blocks that every row sees whole) of some rows."""
    some, whole = [], []
    for b in range(-(-part.shape[1] // keys)):
        block = part[:, b * keys : (b + 1) * keys]
        if block.any():
            some.append(b)
        if block.shape[1] == keys and block.all():
            whole.append(b)
    return some, whole


def full_tiles(work: Workload, rows: int) -> list[int]:
    """Query blocks without rows beyond the end of Q; those rows see keys that no mask here describes."""
    return list(range(work.seqlen_q // rows))


TILE_N = st.sampled_from((16, 32, 64, 128))


@given(workloads(), st.sampled_from((1, 2, 3)), TILE_N)
def test_hopper_visits_the_blocks_with_visible_keys(work: Workload, warpgroups: int, keys: int) -> None:
    seen, rows = visible(work), 64 * warpgroups
    for block in full_tiles(work, rows):
        counts = hopper_counts(work, block, warpgroups, keys)
        some = [blocks_of(rows_of(seen, block * rows + 64 * w, 64), keys) for w in range(warpgroups)]
        walked = {c.blocks(1) for c in counts}
        assert len(walked) == 1, "warpgroups share a ring of K and V, so they walk it together"
        for (mine, whole), count in zip(some, counts, strict=True):
            assert min(count.passed, count.edge, count.main, count.left, count.passed_after) >= 0
            visited = 1 + count.edge + count.main + count.left
            if mine:
                assert visited == len(mine)
                # Whole blocks take the short loop, but for the last block of keys, which stands before the loops.
                assert count.main == len([b for b in whole if b != mine[-1]])
            else:
                assert visited == 1  # rows that see nothing still go through the block before the loops


@given(workloads(), st.sampled_from((64, 128)), TILE_N)
def test_triton_visits_the_blocks_with_visible_keys(work: Workload, rows: int, keys: int) -> None:
    seen = visible(work)
    for block in full_tiles(work, rows):
        mine, whole = blocks_of(rows_of(seen, block * rows, rows), keys)
        count = triton_counts(work, block, rows, keys)
        assert (count.passed, count.passed_after) == (0, 0)
        assert min(count.edge, count.main, count.left) >= 0
        if mine:
            assert count.blocks(0) == len(mine)
            assert count.main == len(whole)


@pytest.mark.parametrize("right", [0, 1, 63, 64, -1])
def test_edges_are_where_the_window_cuts_a_block(right: int) -> None:
    # Every reach to the left in turn, so that each alignment of window and blocks comes up.
    for left in range(200):
        work = Workload(1, 1, 1, 256, 256, 64, 64, "window", (left, right))
        seen = visible(work)
        for block in range(2):
            mine, whole = blocks_of(rows_of(seen, 128 * block, 128), 32)
            count = triton_counts(work, block, 128, 32)
            assert (count.blocks(0), count.main) == (len(mine), len(whole)), left
            if whole:
                assert (count.left, count.edge) == (whole[0] - mine[0], mine[-1] - whole[-1]), left
            for w, found in enumerate(hopper_counts(work, block, 2, 32)):
                mine, whole = blocks_of(rows_of(seen, 128 * block + 64 * w, 64), 32)
                assert found.main == len([b for b in whole if b != mine[-1]]), left
                if whole:
                    assert found.left == whole[0] - mine[0], left


@given(workloads(), st.integers(0, 5), st.sampled_from((64, 128)))
def test_the_keys_a_tile_sees_are_those_of_the_mask(work: Workload, block: int, rows: int) -> None:
    assume((block + 1) * rows <= work.seqlen_q)
    first, end, _, _ = key_blocks(work, block * rows, rows, 1)
    keys = np.flatnonzero(rows_of(visible(work), block * rows, rows).any(0))
    if keys.size:
        assert (first, end) == (keys[0], keys[-1] + 1)
    assert 0 <= first < end <= work.seqlen_k


def test_a_causal_tile_by_hand() -> None:
    work = Workload(1, 1, 1, 512, 512, 64, 64, "causal")
    # Rows 128 to 255 in blocks of 64 keys: warpgroup 0 ends at block 2, warpgroup 1 at block 3.
    first, second = hopper_counts(work, 1, 2, 64)
    assert (first.passed, first.edge, first.main) == (1, 0, 2)
    assert (second.passed, second.edge, second.main) == (0, 0, 3)
    found = triton_counts(work, 1, 128, 64)
    assert (found.edge, found.main, found.left) == (2, 2, 0)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@given(blocks=st.integers(1, 20), heads=st.integers(1, 20), programs=st.integers(1, 50))
def test_programs_share_out_every_tile_once(scheduler: str, blocks: int, heads: int, programs: int) -> None:
    shared = list(program_tiles(scheduler, blocks, heads, programs))
    assert len(shared) == programs
    assert sorted(itertools.chain(*shared)) == sorted(itertools.product(range(blocks), range(heads)))
    if scheduler != "paired":  # whose middle blocks are pairs of one
        sizes = [len(tiles) for tiles in shared]
        assert max(sizes) - min(sizes) <= 1


def test_paired_tiles_of_a_causal_head_add_up_to_the_same_work() -> None:
    for tiles in program_tiles("paired", 8, 6, 12):
        work = [block + 1 for block, _ in tiles]
        assert {long + short for long, short in zip(work[::2], work[1::2], strict=True)} == {9}


def test_longest_first_never_takes_up_a_longer_tile_later() -> None:
    for tiles in program_tiles("longest-first", 8, 6, 5):
        blocks = [block for block, _ in tiles]
        assert blocks == sorted(blocks, reverse=True)


def test_longest_first_turns_back_so_that_sums_even_out() -> None:
    shares = [sum(block + 1 for block, _ in tiles) for tiles in program_tiles("longest-first", 8, 1, 2)]
    assert shares == [8 + 5 + 4 + 1, 7 + 6 + 3 + 2]


@pytest.mark.parametrize("scheduler", ["grid", "work-stealing", ""])
def test_schedulers_without_persistent_programs_are_refused(scheduler: str) -> None:
    with pytest.raises(ValueError, match=f"got '{scheduler}'"):
        list(program_tiles(scheduler, 4, 4, 2))


COSTS = st.lists(st.integers(1, 1000).map(float), min_size=1, max_size=60)


@given(COSTS, st.integers(1, 20))
def test_greedy_spans_keep_grahams_bounds(costs: list[float], slots: int) -> None:
    span = greedy_makespan(iter(range(len(costs))), costs.__getitem__, slots)
    least = max(max(costs), sum(costs) / slots)
    assert least <= span * (1 + 1e-12)
    assert span <= sum(costs) / slots + (1 - 1 / slots) * max(costs) + 1e-9
    assert greedy_makespan(iter(range(len(costs))), costs.__getitem__, len(costs)) == max(costs)
    assert greedy_makespan(iter(range(len(costs))), costs.__getitem__, 1) == sum(costs)


def test_greedy_goes_to_the_slot_that_is_free_first() -> None:
    assert greedy_makespan(iter([0, 1, 2, 3]), [5.0, 1.0, 1.0, 4.0].__getitem__, 2) == 6.0


# --- bytes -------------------------------------------------------------------------------------------------------


def q_and_o(work: Workload) -> float:
    return float(work.dtype_bytes * work.batch * work.heads_q * work.seqlen_q * (work.head_dim_qk + work.head_dim_v))


def kv_bytes(work: Workload, keys: int) -> float:
    return float(work.dtype_bytes * work.batch * work.heads_kv * keys * (work.head_dim_qk + work.head_dim_v))


@st.composite
def launches(draw: st.DrawFn) -> tuple[Workload, list[list[tuple[int, int]]], int]:
    group = draw(st.sampled_from((1, 2, 4)))
    heads_kv = draw(st.integers(1, 3))
    mask = draw(st.sampled_from(("none", "causal")))
    length = 128 * draw(st.integers(1, 6))
    work = Workload(draw(st.integers(1, 2)), group * heads_kv, heads_kv, length, length, 64, 128, mask)
    blocks, heads = length // 128, work.batch * work.heads_q
    tiles = [(b, h) for h in range(heads) for b in draw(st.permutations(range(blocks)))]
    wave = draw(st.integers(1, len(tiles)))
    return work, [tiles[i : i + wave] for i in range(0, len(tiles), wave)], 128


@given(launches(), st.sampled_from((1.0, 1e5, 1e6, 1e9)))
def test_keys_and_values_come_at_least_once_and_never_more_than_copied(launch, l2_bytes: float) -> None:  # type: ignore[no-untyped-def]
    work, waves, rows = launch
    found = memory_traffic(work, waves, rows, l2_bytes)
    moved, share = found.memory_bytes, found.missed_share
    copied = sum(
        (key_blocks(work, b * rows, rows, 1)[1]) * 2.0 * (work.head_dim_qk + work.head_dim_v)
        for wave in waves
        for b, _ in wave
    )
    once = kv_bytes(work, work.seqlen_k)
    from_memory = moved - q_and_o(work)
    assert once * (1 - 1e-12) <= from_memory <= copied * (1 + 1e-12)
    assert share == pytest.approx(from_memory / copied)
    assert 0 < share <= 1
    if l2_bytes == 1e9 or len(waves) == 1:  # everything stays, or nothing needs to
        assert from_memory == pytest.approx(once)


@given(launches())
def test_a_larger_cache_never_moves_more(launch) -> None:  # type: ignore[no-untyped-def]
    work, waves, rows = launch
    moved = [memory_traffic(work, waves, rows, size).memory_bytes for size in (1.0, 1e5, 5e5, 1e6, 1e7, 1e9)]
    assert moved == sorted(moved, reverse=True)


def test_without_a_cache_every_wave_reads_its_keys_again() -> None:
    work = Workload(1, 1, 1, 512, 512, 64, 64)
    waves = [[(b, 0)] for b in range(4)]
    found = memory_traffic(work, waves, 128, 1.0)
    moved, share = found.memory_bytes, found.missed_share
    assert (moved - q_and_o(work), share) == (4 * kv_bytes(work, 512), 1.0)


def test_what_was_used_longest_ago_leaves_the_cache_first() -> None:
    work = Workload(1, 2, 2, 512, 512, 64, 64)
    one = 512 * 128 * 2.0
    waves = [[(0, 0)], [(0, 1)], [(0, 0)], [(1, 0)]]
    # Room for one head beside what a wave streams: head 1 sends head 0 out, which then stays for its second wave.
    found = memory_traffic(work, waves, 128, 2 * (one + 2 * 128 * 256))
    moved, share = found.memory_bytes, found.missed_share
    assert (moved - q_and_o(work), share) == (3 * one, 3 / 4)


def test_keys_come_again_when_too_much_has_passed_since_they_were_read() -> None:
    work = Workload(1, 3, 3, 512, 512, 64, 64)
    one, tile = 512 * 128 * 2.0, 128 * 128 * 2.0
    cycle = [[(b, h)] for b in range(2) for h in range(3)]
    # Between two waves of a head three heads and three tiles of Q and O pass; half of the cache must hold them.
    distance = 3 * (one + tile)
    assert memory_traffic(work, cycle, 128, 2 * distance).memory_bytes - q_and_o(work) == 3 * one
    assert memory_traffic(work, cycle, 128, 2 * distance - 1.0).memory_bytes - q_and_o(work) == 6 * one


def test_query_heads_of_a_group_share_keys() -> None:
    waves = [[(b, h) for h in range(8) for b in range(4)]]
    own, shared = Workload(1, 8, 8, 512, 512, 64, 64), Workload(1, 8, 2, 512, 512, 64, 64)
    assert (
        memory_traffic(own, waves, 128, 1e9).missed_share
        == 4 * memory_traffic(shared, waves, 128, 1e9).missed_share
        == 1 / 4
    )
