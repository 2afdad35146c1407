"""Blocks of query tiles against a mask drawn element by element."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilecast.model.chip.tiles import head_tiles
from tilecast.model.kernel.workload import Workload

SIDES = st.integers(-1, 90)


def visible(work: Workload) -> np.ndarray:
    """(seqlen_q, seqlen_k): which keys each query sees."""
    left, right = {"none": (-1, -1), "causal": (-1, 0)}.get(work.mask, work.window or (-1, -1))
    distance = np.arange(work.seqlen_k)[None, :] - np.arange(work.seqlen_q)[:, None] - (work.seqlen_k - work.seqlen_q)
    seen = np.ones_like(distance, dtype=bool)
    if left >= 0:
        seen &= distance >= -left
    if right >= 0:
        seen &= distance <= right
    return seen


@settings(max_examples=200)
@given(
    seqlen_q=st.integers(1, 150), seqlen_k=st.integers(1, 150), rows=st.integers(1, 70), keys=st.integers(1, 70),
    mask=st.sampled_from(("none", "causal", "window")), left=SIDES, right=SIDES,
)  # fmt: skip
def test_blocks_are_those_that_hold_a_visible_key(
    seqlen_q: int, seqlen_k: int, rows: int, keys: int, mask: str, left: int, right: int
) -> None:
    window = (left, right) if mask == "window" else None
    work = Workload(seqlen_q=seqlen_q, seqlen_k=seqlen_k, mask=mask, window=window)
    found = head_tiles(work, rows, keys)
    seen = visible(work)
    starts = range(0, seqlen_q, rows)
    assert (found.count, found.weight) == (len(starts), 1.0)
    for n, row in enumerate(starts):
        tile = seen[row : row + rows]
        touched = [k for k in range(0, seqlen_k, keys) if tile[:, k : k + keys].any()]
        # A loop runs over all blocks from the first to the last that holds a visible key.
        inside = range(touched[0], touched[-1] + 1, keys) if touched else range(0)
        whole = sum(tile[:, k : k + keys].all() and k + keys <= seqlen_k for k in inside)
        assert found.iterations[n] == len(inside)
        assert found.masked[n] == len(inside) - whole
        assert found.inside[n] == sum(len(tile) * (min(k + keys, seqlen_k) - k) for k in inside)


def test_long_sequences_are_sampled_evenly() -> None:
    work = Workload(seqlen_q=1 << 20, seqlen_k=1 << 20, mask="causal")
    found = head_tiles(work, 128, 128)
    assert found.count == 8192
    assert len(found.iterations) == 2048 and found.weight == 4.0
    # 1 + 2 + ... + 8192 blocks, of which each tile masks the one on its diagonal.
    assert abs(found.total_iterations / (8192 * 8193 / 2) - 1) < 1e-3
    assert set(found.masked) == {1}


@pytest.mark.parametrize("mask", ["none", "causal"])
def test_a_kernel_whose_first_block_masks_has_a_masked_block_in_every_tile(mask: str) -> None:
    work = Workload(seqlen_q=1024, seqlen_k=1024, mask=mask)
    plain, first = head_tiles(work, 128, 128), head_tiles(work, 128, 128, first_masked=True)
    assert list(plain.masked) == [mask == "causal"] * 8
    assert list(first.masked) == [1] * 8 and list(first.iterations) == list(plain.iterations)
