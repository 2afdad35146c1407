"""Which shipped kernel multiplies: facts from ``generated/gemm.json``, never from the simulator.

The index is a JSON list, one object per kernel module, written by the generator:

    {"module": "gemm_hopper_turns",   file in kernels/generated, without .py
     "family": "gemm_hopper",         for people and messages
     "c_bytes": 2,                    an element of C and D may have up to so many bytes
     "any_strides": false,            whether tensors may lie anyhow; else rows (of A and B also columns) of whole 16 bytes
     "capability": [[9, 0]],          exact (major, minor) pairs, or {"min": [8, 0]} for that and anything newer
     "k_min": 320, "k_max": 767,      optional, inclusive
     "gpu": "H100",                   optional: for devices whose name has it; "": any
     "tile": [192, 128],              optional: rows and columns of its tiles of D
     "preference": 10}                higher wins

Among kernels of one preference that tell their tiles the one whose waves of tiles multiply least runs (`least_waves`): which sums an
element has, and in which order, is the same in all of them.

The environment variable TILECAST_GEMM_FAMILY (read once) names a family to try before the others where it has a kernel, for
instance gemm_hopper or gemm_blackwell, which are not preferred until they have been measured.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilecast.kernels import registry
from tilecast.kernels.registry import INDEX, RegistryError, Shipped, capabilities, index_rows, whole_number

GEMM_INDEX = INDEX.with_name("gemm.json")
FAMILY_VARIABLE = "TILECAST_GEMM_FAMILY"
_FIELDS = ("module", "family", "c_bytes", "any_strides", "capability", "preference")
_OPTIONAL = ("k_min", "k_max", "gpu", "tile")
_NO_LIMIT = 1 << 62


@dataclass(frozen=True)
class GemmEntry(Shipped):
    """A kernel of products, and those that it computes."""

    c_bytes: int
    any_strides: bool
    k_min: int
    k_max: int
    #: Part of the names of the devices that it is for.
    gpu: str = ""
    #: Rows and columns of a tile; None where the choice does not go by them.
    tile: tuple[int, int] | None = None


def least_waves(tiles: Sequence[tuple[int, int]], m: int, n: int, sms: int) -> int:
    """Number of the (rows, columns) of ``tiles`` whose launch multiplies least for an (m, n) product on ``sms`` SMs, the first among equals:
    as many waves as it takes to give every SM a tile, each as long as a tile is large."""
    taken = [-(-(-(-m // rows) * -(-n // columns)) // sms) * rows * columns for rows, columns in tiles]
    return taken.index(min(taken))


def candidates(
    capability: tuple[int, int], c_bytes: int, k: int, entries: tuple[GemmEntry, ...] | None = None, gpu: str = ""
) -> tuple[GemmEntry, ...]:
    """Kernels for a problem on a device named ``gpu``, best first, down to the first that takes any strides."""
    known = shipped_gemm() if entries is None else entries
    fitting = [
        e for e in known if e.runs_on(capability) and c_bytes <= e.c_bytes and e.k_min <= k <= e.k_max and e.gpu in gpu
    ]
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
    return registry.preferring(entries, family, {e.family for e in entries}, FAMILY_VARIABLE)


def read_gemm_index(path: Path) -> tuple[GemmEntry, ...]:
    """Entries of one index file; RegistryError where it breaks the schema."""
    return tuple(_entry(row, where) for row, where in index_rows(path, _FIELDS, _OPTIONAL))


def _entry(row: Mapping[str, Any], where: str) -> GemmEntry:
    exact, minimum = capabilities(row["capability"], where)
    return GemmEntry(
        module=str(row["module"]),
        family=str(row["family"]),
        exact=exact,
        minimum=minimum,
        preference=whole_number(row, "preference", where),
        c_bytes=whole_number(row, "c_bytes", where),
        any_strides=bool(row["any_strides"]),
        k_min=whole_number(row, "k_min", where) if "k_min" in row else 1,
        k_max=whole_number(row, "k_max", where) if "k_max" in row else _NO_LIMIT,
        gpu=str(row.get("gpu", "")),
        tile=_tile(row["tile"], where) if "tile" in row else None,
    )


def _tile(value: Any, where: str) -> tuple[int, int]:
    if not (isinstance(value, list) and len(value) == 2 and all(isinstance(n, int) and n > 0 for n in value)):
        raise RegistryError(f"{where}: tile: expected [rows, columns], got {value!r}")
    return value[0], value[1]
