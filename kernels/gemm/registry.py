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
     "accumulators": 2,               optional: 2 where an epilogue runs beside the next tile's products
     "use": "few",                    optional: "one" and "one, by columns" for products of one row, "few" for few rows, "small" for few tiles (there may be several), "parts" for those that leave SMs idle
     "preference": 10}                higher wins

Among kernels of one preference that tell their tiles the one that ends first runs (`choice`), the first of the index among about equals:
which sums an element has, and in which order, is the same in all of them.

The environment variable TILECAST_GEMM_FAMILY (read once) names a family to try before the others where it has a kernel, for
instance gemm_hopper or gemm_blackwell, which are not preferred until they have been measured.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilecast.kernels import registry
from tilecast.kernels.registry import INDEX, RegistryError, Shipped, capabilities, index_rows, whole_number

GEMM_INDEX = INDEX.with_name("gemm.json")
FAMILY_VARIABLE = "TILECAST_GEMM_FAMILY"
_FIELDS = ("module", "family", "c_bytes", "any_strides", "capability", "preference")
_OPTIONAL = ("k_min", "k_max", "gpu", "tile", "accumulators", "use")
_NO_LIMIT = 1 << 62
#: Kernels of products with one row, B by rows or by columns, with few rows, of small tiles, and those that share a tile's k.
USES = ONE, ONE_COLUMN, FEW, SMALL, PARTS = "one", "one, by columns", "few", "small", "parts"
#: Parts that k is shared among at most: a merge asks for all of an element's sums at once.
MOST_PARTS = 32


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
    accumulators: int = 1
    #: What it is kept for: one of `USES`, or "" for any product.
    use: str = ""


@dataclass(frozen=True)
class Pace:
    """What a kernel of few rows takes that shares k, in microseconds, for `parts_of`."""

    #: Programs that an SM has, the k of a step, and its length.
    programs: int
    tile_k: int
    step_us: float
    #: What every tile of a program adds that no products hide.
    tile_us: float


#: A launch more, each part's sum of an element, bytes a microsecond at which sums go to L2 and come back, and at which the memory gives A
#: and B; and paces: fitted to times by parts on an H200 (docs/gemm.md).
_MERGE_US, _PART_US, _MERGE_BYTES, _MEMORY_BYTES = 0.7, 0.1, 1.2e7, 4.2e6
#: Programs of one row wait for all that they have asked for at every step; those of h200_gemm_one.csv were in view.
PACES = {ONE: Pace(6, 128, 1.0, 0.3), ONE_COLUMN: Pace(8, 512, 0.5, 1.0), FEW: Pace(3, 64, 0.19, 0.6)}


@functools.lru_cache(maxsize=1 << 12)
def parts_of(pace: Pace, tile: tuple[int, int], m: int, n: int, k: int, sms: int) -> int:
    """Parts of k for which an (m, n) product of ``tile`` ends first on ``sms`` SMs; 1 where none is faster than a k in one.

    A program takes its share of k-steps of as many tiles as come to it, none faster than the memory gives A and B; sums of parts are
    written, read and added by one more launch.
    """
    rows, columns = -(-m // tile[0]), -(-n // tile[1])
    steps, slots = -(-k // pace.tile_k), sms * pace.programs
    read = 2.0 * (m + n) * k / _MEMORY_BYTES
    # Of a part every row of its tiles is written, and those that D has are read.
    moved = 4.0 * n * (rows * tile[0] + m) / _MERGE_BYTES

    def taken(parts: int) -> float:
        waves = -(-rows * columns * parts // slots)
        own = max(read, waves * (-(-steps // parts) * pace.step_us + pace.tile_us))
        return own + (_MERGE_US + parts * (_PART_US + moved) if parts > 1 else 0.0)

    return min(range(1, min(MOST_PARTS, steps) + 1), key=taken)


def sharing(
    capability: tuple[int, int], use: str, c_bytes: int = 2, k: int = 1, entries: tuple[GemmEntry, ...] | None = None
) -> GemmEntry | None:
    """The kernel kept for ``use`` of a C with elements of ``c_bytes`` and of such a k, None where there is none for a device."""
    fitting = _fitting(capability, use, c_bytes, k, entries)
    return max(fitting, key=lambda e: (e.preference, -e.c_bytes), default=None)


def _fitting(
    capability: tuple[int, int], use: str, c_bytes: int, k: int, entries: tuple[GemmEntry, ...] | None
) -> list[GemmEntry]:
    """All that are kept for ``use``, in the order of the index."""
    known = shipped_gemm() if entries is None else entries
    return [
        e for e in known if e.use == use and e.runs_on(capability) and c_bytes <= e.c_bytes and e.k_min <= k <= e.k_max
    ]


def candidates(
    capability: tuple[int, int], c_bytes: int, k: int, entries: tuple[GemmEntry, ...] | None = None, gpu: str = ""
) -> tuple[GemmEntry, ...]:
    """Kernels for a problem on a device named ``gpu``, best first, down to the first that takes any strides."""
    known = shipped_gemm() if entries is None else entries
    fitting = [
        e
        for e in known
        if not e.use and e.runs_on(capability) and c_bytes <= e.c_bytes and e.k_min <= k <= e.k_max and e.gpu in gpu
    ]
    fitting.sort(key=lambda e: (-e.preference, e.c_bytes))
    last = next((i for i, e in enumerate(fitting) if e.any_strides), len(fitting) - 1)
    return tuple(fitting[: last + 1])


def together(
    capability: tuple[int, int], c_bytes: int, k: int, entries: tuple[GemmEntry, ...] | None = None, gpu: str = ""
) -> tuple[GemmEntry, ...]:
    """Kernels of which any may run a product of whole tiles, by how long each takes: those kept for few tiles, then the best that tell their
    tiles; where the best one tells none, that alone."""
    found = candidates(capability, c_bytes, k, entries, gpu)
    if not found or found[0].tile is None:
        return found[:1]
    same = [e for e in found if (e.preference, e.c_bytes) == (found[0].preference, found[0].c_bytes)]
    few = [e for e in _fitting(capability, SMALL, c_bytes, k, entries) if e.c_bytes == found[0].c_bytes]
    return (*few, *same)


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
        accumulators=whole_number(row, "accumulators", where) if "accumulators" in row else 1,
        use=_use(row.get("use", ""), where),
    )


def _use(value: Any, where: str) -> str:
    if value not in ("", *USES):
        raise RegistryError(f"{where}: use: expected {', '.join(map(repr, USES))}, got {value!r}")
    return str(value)


def _tile(value: Any, where: str) -> tuple[int, int]:
    if not (isinstance(value, list) and len(value) == 2 and all(isinstance(n, int) and n > 0 for n in value)):
        raise RegistryError(f"{where}: tile: expected [rows, columns], got {value!r}")
    return value[0], value[1]
