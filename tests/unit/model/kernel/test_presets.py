"""Presets of well-known models."""

from __future__ import annotations

import pytest

from tilecast.model.kernel.presets import preset, preset_names
from tilecast.model.kernel.workload import Workload, WorkloadError


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_a_workload(name: str) -> None:
    p = preset(name)
    w = Workload(1, p.heads_q, p.heads_kv, p.seqlen, p.seqlen, p.head_dim_qk, p.head_dim_v, p.mask, p.window)
    assert w.flops > 0
    assert p.source.strip()


@pytest.mark.parametrize(
    ("name", "heads", "kv", "qk", "v", "mask"),
    [
        ("llama3-8b", 32, 8, 128, 128, "causal"),
        ("llama3-70b", 64, 8, 128, 128, "causal"),
        ("qwen3-235b-a22b", 64, 4, 128, 128, "causal"),
        ("deepseek-v3", 128, 128, 192, 128, "causal"),
        ("gpt-oss-120b-window", 64, 8, 64, 64, "window"),
        ("gpt3-175b", 96, 96, 128, 128, "causal"),
        ("wan2.2", 40, 40, 128, 128, "none"),
    ],
)
def test_known_shapes(name: str, heads: int, kv: int, qk: int, v: int, mask: str) -> None:
    p = preset(name)
    assert (p.heads_q, p.heads_kv, p.head_dim_qk, p.head_dim_v, p.mask) == (heads, kv, qk, v, mask)


def test_window_counts_the_keys_before_the_query() -> None:
    # A model's "sliding window 128" is the query's own position and the 127 before it.
    assert preset("gpt-oss-120b-window").window == (127, 0)


def test_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(WorkloadError, match="unknown preset 'llama3-8'; did you mean llama3-8b"):
        preset("llama3-8")


def test_hopeless_preset_lists_all() -> None:
    with pytest.raises(WorkloadError, match=r"unknown preset 'zzz'; known: .*llama3-8b"):
        preset("zzz")
