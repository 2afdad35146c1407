"""What FlashAttention-3 and FlashAttention-4 ship on Hopper, as their sources say."""

from __future__ import annotations

import pytest

from tilecast.model.families import legality
from tilecast.model.kernel.variants.fa3 import Fa3Variant, published, published_by_fa4
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine

H200 = load_machine("h200-sxm")


def work(d: int, mask: str, dtype: str = "bf16", dv: int = 0) -> Workload:
    return Workload(1, 8, 8, 4096, 4096, d, dv or d, mask, (512, 0) if mask == "window" else None, dtype)


@pytest.mark.parametrize(
    ("shape", "rows", "keys", "turns"),
    [
        (work(64, "causal"), 192, 128, True),
        (work(128, "none"), 128, 176, True),
        (work(128, "causal"), 128, 128, True),
        (work(192, "none", dv=128), 128, 128, False),
        (work(192, "window", dv=128), 128, 96, False),
        (work(192, "none"), 128, 112, False),
        (work(256, "causal"), 128, 80, False),
        (work(64, "none", "fp8"), 192, 160, False),
        (work(128, "causal", "fp8"), 128, 224, True),
        (work(256, "none", "fp8"), 128, 128, True),
    ],
)
def test_tiles_and_turns_of_flash_attention_3(shape: Workload, rows: int, keys: int, turns: bool) -> None:
    found = published(shape, H200)
    assert (64 * found.warpgroups, found.tile_n, found.ping_pong, found.overlap) == (rows, keys, turns, True)
    assert found.scheduler == ("persistent" if shape.mask == "none" else "work-stealing")


def test_flash_attention_4_keeps_tiles_of_128_keys_and_a_cta_a_tile() -> None:
    assert published_by_fa4(work(64, "none")) == Fa3Variant(warpgroups=3, tile_n=128)
    assert published_by_fa4(work(128, "none")) == Fa3Variant(tile_n=128)
    assert published_by_fa4(work(256, "causal")) == Fa3Variant(tile_n=80, ping_pong=False, scheduler="longest-grid")


@pytest.mark.parametrize("mask", ["none", "causal", "window"])
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_what_is_shipped_is_legal(mask: str, dtype: str) -> None:
    for d in (32, 64, 96, 128, 192, 256):
        shape = work(d, mask, dtype)
        assert legality(published(shape, H200), shape, H200).legal, (d, mask, dtype)
        assert legality(published_by_fa4(shape), shape, H200).legal, (d, mask, dtype)
