"""Which shipped kernel multiplies: facts from ``generated/gemm.json``, never from the simulator.

The index is a JSON list, one object per kernel module, written by the generator:

    {"module": "gemm_hopper_turns",   file in kernels/generated, without .py
     "family": "gemm_hopper",         for people and messages
     "c_bytes": 2,                    an element of C and D may have up to so many bytes
     "any_strides": false,            whether tensors may lie anyhow; else rows (of A and B also columns) of whole 16 bytes
     "capability": [[9, 0]],          exact (major, minor) pairs, or {"min": [8, 0]} for that and anything newer
     "k_min": 320, "k_max": 767,      optional, inclusive
     "preference": 10}                higher wins

The environment variable TILECAST_GEMM_FAMILY (read once) names a family to try before the others where it has a kernel, for
instance gemm_hopper or gemm_blackwell, which are not preferred until they have been measured.
"""

from __future__ import annotations

import functools
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilecast.kernels.registry import INDEX, RegistryError

GEMM_INDEX = INDEX.with_name("gemm.json")
FAMILY_VARIABLE = "TILECAST_GEMM_FAMILY"
_FIELDS = ("module", "family", "c_bytes", "any_strides", "capability", "preference")
_OPTIONAL = ("k_min", "k_max")
_NO_LIMIT = 1 << 62


@dataclass(frozen=True)
class GemmEntry:
    """One shipped kernel.  ``exact`` capabilities, or when empty anything from ``minimum`` on."""

    module: str
    family: str
    c_bytes: int
    any_strides: bool
    exact: frozenset[tuple[int, int]]
    minimum: tuple[int, int] | None
    k_min: int
    k_max: int
    preference: int

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Whether a device of this (major, minor) compute capability runs the kernel."""
        return capability in self.exact or (self.minimum is not None and capability >= self.minimum)


def candidates(capability: tuple[int, int], c_bytes: int, k: int, entries: tuple[GemmEntry, ...] | None = None) -> tuple[GemmEntry, ...]:  # fmt: skip
    """Kernels for a problem, best first, down to the first that takes any strides."""
    known = shipped_gemm() if entries is None else entries
    fitting = [e for e in known if e.runs_on(capability) and c_bytes <= e.c_bytes and e.k_min <= k <= e.k_max]
    fitting.sort(key=lambda e: (-e.preference, e.c_bytes, e.module))
    last = next((i for i, e in enumerate(fitting) if e.any_strides), len(fitting) - 1)
    return tuple(fitting[: last + 1])


@functools.cache
def shipped_gemm() -> tuple[GemmEntry, ...]:
    """The kernels that ship, those of TILECAST_GEMM_FAMILY above the others; RegistryError for a family that has none."""
    entries = read_gemm_index(GEMM_INDEX) if GEMM_INDEX.is_file() else ()
    return preferring(entries, os.environ.get(FAMILY_VARIABLE, ""))


def preferring(entries: tuple[GemmEntry, ...], family: str) -> tuple[GemmEntry, ...]:
    """The entries with those of ``family`` ("": none) above all others; RegistryError for a family that has no kernel."""
    if not family:
        return entries
    families = sorted({e.family for e in entries})
    if family not in families:
        raise RegistryError(f"{FAMILY_VARIABLE}: expected {', '.join(families)} (or unset), got '{family}'")
    above = max(e.preference for e in entries) + 1
    return tuple(GemmEntry(**{**vars(e), "preference": e.preference + above * (e.family == family)}) for e in entries)


def read_gemm_index(path: Path) -> tuple[GemmEntry, ...]:
    """Entries of one index file; RegistryError where it breaks the schema."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise RegistryError(f"{path}: expected a JSON list of kernels, got {error}") from None
    if not isinstance(rows, list):
        raise RegistryError(f"{path}: expected a JSON list of kernels, got {type(rows).__name__}")
    return tuple(_entry(row, f"{path}: entry {number}") for number, row in enumerate(rows))


def _entry(row: Any, where: str) -> GemmEntry:
    if not isinstance(row, dict):
        raise RegistryError(f"{where}: expected an object, got {type(row).__name__}")
    missing = [name for name in _FIELDS if name not in row]
    if missing:
        raise RegistryError(f"{where}: field '{missing[0]}' is missing")
    # A field we do not know may be a condition we would ignore.
    unknown = sorted(set(row) - set(_FIELDS) - set(_OPTIONAL))
    if unknown:
        raise RegistryError(f"{where}: unknown field '{unknown[0]}'; known are {', '.join(_FIELDS + _OPTIONAL)}")
    capability = row["capability"]
    minimum = capability.get("min") if isinstance(capability, dict) else None
    pairs = [minimum] if isinstance(capability, dict) else capability
    if not isinstance(pairs, list) or not all(
        isinstance(p, list) and len(p) == 2 and all(type(n) is int for n in p) for p in pairs
    ):
        raise RegistryError(f"{where}: field 'capability': expected [[major, minor], ...] or {{'min': [major, minor]}}, got {capability!r}")  # fmt: skip
    versions = [(p[0], p[1]) for p in pairs]
    for name in ("c_bytes", "preference", *(n for n in _OPTIONAL if n in row)):
        if type(row[name]) is not int or row[name] < 0:
            raise RegistryError(f"{where}: field '{name}': expected a whole number of at least 0, got {row[name]!r}")
    return GemmEntry(
        str(row["module"]), str(row["family"]), row["c_bytes"], bool(row["any_strides"]),
        frozenset() if minimum else frozenset(versions), versions[0] if minimum else None,
        row.get("k_min", 1), row.get("k_max", _NO_LIMIT), row["preference"],
    )  # fmt: skip
