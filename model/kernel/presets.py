"""Attention shapes of well-known models."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from tilecast.base.words import nearest
from tilecast.model.kernel.workload import WorkloadError


@dataclass(frozen=True, slots=True)
class Preset:
    """One model's attention: head counts and dimensions, its own mask, a default sequence length, the source."""

    name: str
    heads_q: int
    heads_kv: int
    head_dim_qk: int
    head_dim_v: int
    seqlen: int
    mask: str
    window: tuple[int, int] | None
    source: str


@lru_cache(maxsize=1)
def presets() -> dict[str, Preset]:
    """All presets by name."""
    raw = tomllib.loads((Path(__file__).parent / "presets.toml").read_text(encoding="utf-8"))
    return {
        name: Preset(
            name,
            e["heads"],
            e["heads_kv"],
            e["head_dim"],
            e.get("head_dim_v", e["head_dim"]),
            e["seqlen"],
            e["mask"],
            tuple(e["window"]) if "window" in e else None,
            e["source"],
        )
        for name, e in raw.items()
    }


def preset_names() -> tuple[str, ...]:
    """Names of all presets."""
    return tuple(presets())


def preset(name: str) -> Preset:
    """The preset called ``name``; WorkloadError with the nearest names when there is none."""
    known = presets()
    if name not in known:
        raise WorkloadError(f"unknown preset '{name}'{nearest(name, known)}")
    return known[name]
