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
     "use": "few",                    optional: "one" and "one, by columns" for products of one row, "few" for few rows, "small" for few tiles of a short k, "parts" for those that leave SMs idle
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
_OPTIONAL = ("k_min", "k_max", "gpu", "tile", "use")
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
    #: What it is kept for: one of `USES`, or "" for any product.
    use: str = ""


def least_waves(tiles: Sequence[tuple[int, int]], m: int, n: int, sms: int) -> int:
    """Number of the (rows, columns) of ``tiles`` whose launch multiplies least for an (m, n) product on ``sms`` SMs, the first among equals:
    as many waves as it takes to give every SM a tile, each as long as a tile is large."""
    taken = [-(-(-(-m // rows) * -(-n // columns)) // sms) * rows * columns for rows, columns in tiles]
    return taken.index(min(taken))


@dataclass(frozen=True)
class Pace:
    """What a kernel takes that shares k, in microseconds, for `parts_of`."""

    #: Programs that an SM has, the k of a step, and its length.
    programs: int
    tile_k: int
    step_us: float
    #: What every tile of a program adds that no products hide.
    tile_us: float


#: A launch more, each part's sum of an element, bytes a microsecond at which sums go to L2 and come back, and at which the memory gives A
#: and B; and paces: fitted to times by parts on an H200 (docs/gemm.md).  A k-step of 128 x 128 x 64 is 512 cycles of products, 0.26 us at
#: 1.98 GHz, and an epilogue some 2200.
_MERGE_US, _PART_US, _MERGE_BYTES, _MEMORY_BYTES = 0.7, 0.1, 1.2e7, 4.2e6
#: Programs of one row wait for all that they have asked for at every step; those of h200_gemm_one.csv were in view.  Of small tiles
#: it is as the forecasts have it.
PACES = {
    ONE: Pace(6, 128, 1.0, 0.3), ONE_COLUMN: Pace(8, 512, 0.5, 1.0), FEW: Pace(3, 64, 0.19, 0.6), SMALL: Pace(1, 64, 0.22, 0.6),
    PARTS: Pace(1, 64, 0.26, 1.3),
}  # fmt: skip


@functools.lru_cache(maxsize=1 << 12)
def parts_of(
    pace: Pace, tile: tuple[int, int], m: int, n: int, k: int, sms: int, whole: tuple[tuple[int, int], ...] = (),
    small: bool = False,
) -> int:  # fmt: skip
    """Parts of k for which an (m, n) product of ``tile`` ends first on ``sms`` SMs; 1 where none is faster than a k in one.

    ``whole``: tiles of the kernels that run where k is not parted, if not those of ``tile``; ``small``: one of
    small tiles runs there instead.  A program takes its share of k-steps of as many tiles as come to it, none faster than the memory gives A and B; sums of parts are
    written, read and added by one more launch.
    """
    rows, columns = -(-m // tile[0]), -(-n // tile[1])
    steps, slots = -(-k // pace.tile_k), sms * pace.programs
    read = 2.0 * (m + n) * k / _MEMORY_BYTES
    # Of a part every row of its tiles is written, and those that D has are read.
    moved = 4.0 * n * (rows * tile[0] + m) / _MERGE_BYTES

    def taken(parts: int) -> float:
        if parts == 1 and small:
            return max(read, steps * PACES[SMALL].step_us + PACES[SMALL].tile_us)
        if parts == 1 and whole:
            (r, c), size = whole[least_waves(whole, m, n, sms)], tile[0] * tile[1]
            return max(
                read, -(-(-(-m // r) * -(-n // c)) // sms) * (steps * pace.step_us * r * c / size + pace.tile_us)
            )
        waves = -(-rows * columns * parts // slots)
        own = max(read, waves * (-(-steps // parts) * pace.step_us + pace.tile_us))
        return own + (_MERGE_US + parts * (_PART_US + moved) if parts > 1 else 0.0)

    return min(range(1, min(MOST_PARTS, steps) + 1), key=taken)


def sharing(
    capability: tuple[int, int], use: str, c_bytes: int = 2, k: int = 1, entries: tuple[GemmEntry, ...] | None = None
) -> GemmEntry | None:
    """The kernel kept for ``use`` of a C with elements of ``c_bytes`` and of such a k, None where there is none for a device."""
    known = shipped_gemm() if entries is None else entries
    fitting = [
        e for e in known if e.use == use and e.runs_on(capability) and c_bytes <= e.c_bytes and e.k_min <= k <= e.k_max
    ]
    return max(fitting, key=lambda e: (e.preference, -e.c_bytes), default=None)


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
