"""Which shipped kernel runs a problem: facts from ``generated/index.json``, never from the simulator.

The index is a JSON list, one object per kernel module, written by the generator:

    {"module": "hopper_ws_d128_causal",   file in kernels/generated, without .py
     "family": "hopper_ws",               for people and messages
     "capability": [[9, 0]],              exact (major, minor) pairs, or {"min": [8, 0]} for that and anything newer
     "head_dim_qk": 128, "head_dim_v": 128,
     "head_dim_min": 72,                  optional: it also takes heads with fewer columns, a multiple of 8 from ... on
     "mask": "causal",                    none, causal or window; a window kernel takes any (left, right) at run time
     "dtypes": ["bf16", "fp16"],          or ["fp8"] or ["fp8", "e5m2"]: e4m3 or e5m2 in, bf16 out, `launching.e4m3_launcher`
     "seqlen_q_min": 0,                   optional, 0: query rows of a sequence from ...
     "seqlen_q_max": null,                optional, null (no limit): ... to, inclusive
     "seqlen_k_max": null,                optional, null (no limit): keys of a sequence up to, inclusive
     "rows_max": null,                    optional, null (no limit): query rows of all heads that share a key/value head, up to, inclusive
     "taller": {"module": "...", "time": 0.82}, optional: a kernel of taller tiles with the same bits, which runs where its rounds of tiles
                                          take less, and the time of a tile of this one over one of it
     "triton_min": [3, 9],                optional: the first Triton release that compiles it
     "pass": "bwd",                       optional, "fwd": attention, its gradients ("bwd"), the serving step ("serve"), or attention of short
                                          sequences ("short")
     "cache": "e4m3",                     optional, of serving kernels: what K and V are; "" (as q) or bytes of e4m3
     "forecast": {...},                   optional: for people; not read here
     "preference": 10}                    higher wins

A module provides ``launch(q, k, v, out, lse, scale)``, a window module ``launch(..., scale, window_left, window_right)``
with -1 for no limit, and ``plan``, which `launching.launcher` asks once for a shape; q, k, v, out are (batch, heads, seqlen, head_dim) views with unit last stride, lse is contiguous
float32 (batch, heads_q, seqlen_q) or None.  A backward module provides ``launch(q, k, v, out, lse, dout, dq, dk, dv, scale,
window_left, window_right, dlse, terms)`` and its ``plan`` (`launching.backward_launcher`), ``workspaces(terms)`` where it
needs more, and ``PIECES`` where its terms are pieces (`launching.terms_shape`).  A serving module provides ``launch``, ``plan`` and
``scratch`` (`serving.launching`); its lengths are rows of a sequence, queries * heads_q / heads_kv, and its mask is a window.  So are those of a
module for short sequences, whose ``launch`` and ``plan`` are a window module's; `serving.few_rows` says what goes there.

Among the kernels that cover a problem the highest preference wins, then the narrower mask, then the narrower heads, then the module name.  Only
facts of one sequence, or of the model as key heads are, enter the choice (never the batch), so what a sequence gets does not
depend on its company.  Between a kernel and its ``taller`` one the batch decides, as they give the same bits.

The environment variable TILECAST_FAMILY (read once) names a family to try before the others where it has a kernel, for
instance blackwell_ws, or blackwell_serving among those to serve with, which are not preferred until they have been measured.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

INDEX = Path(__file__).parent / "generated" / "index.json"
PACKAGE = "tilecast.kernels.generated"
DTYPES = ("bf16", "fp16", "fp8", "e5m2")
#: Kernel masks that compute a problem's mask, narrowest first: a causal problem is a window of (-1, 0), and so on.
COVERED_BY = {"none": ("none", "window"), "causal": ("causal", "window"), "window": ("window",)}
NO_LIMIT = 2**62

_REQUIRED = ("module", "family", "capability", "head_dim_qk", "head_dim_v", "mask", "dtypes", "preference")
_OPTIONAL = ("head_dim_min", "seqlen_q_min", "seqlen_q_max", "seqlen_k_max", "rows_max", "taller", "triton_min", "pass", "cache", "forecast")  # fmt: skip
PASSES = ("fwd", "bwd", "serve", "short")
CACHES = ("", "e4m3")
#: Names a family whose kernels go first.
FAMILY_VARIABLE = "TILECAST_FAMILY"


class RegistryError(ValueError):
    """An index file that does not follow the schema: file, entry, field, expected, got."""


@dataclass(frozen=True)
class Shipped:
    """What every shipped kernel has, whatever it computes.  ``exact`` capabilities, or when empty anything from ``minimum`` on."""

    module: str
    family: str
    exact: frozenset[tuple[int, int]]
    minimum: tuple[int, int] | None
    #: Higher wins.
    preference: int

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Whether a device of this (major, minor) compute capability runs the kernel."""
        return capability in self.exact or (self.minimum is not None and capability >= self.minimum)


K = TypeVar("K", bound=Shipped)


@dataclass(frozen=True)
class Entry(Shipped):
    """A kernel of attention, and the problems that it computes."""

    head_dim_qk: int
    head_dim_v: int
    mask: str
    dtypes: frozenset[str]
    seqlen_q_min: int
    seqlen_q_max: int
    triton_min: tuple[int, int] = (0, 0)
    #: Keys of a sequence for which another kernel is no better.
    seqlen_k_max: int = NO_LIMIT
    #: Query rows of the heads that share a key/value head up to which it computes a sequence.
    rows_max: int = NO_LIMIT
    #: "bwd" for gradients, "serve" for packed and paged batches, "short" for short sequences.
    direction: str = "fwd"
    #: Of serving kernels, what K and V are: "", as q, or "e4m3".
    cache: str = ""
    #: Fewest columns of heads, a multiple of 8, that it takes as well; 0: only its own.
    head_dim_min: int = 0
    #: The module of a kernel of taller tiles with the same bits, and the time of a tile of this one over one of it.
    taller: tuple[str, float] | None = None

    def covers(self, capability: tuple[int, int], dtype: str, head_dim_qk: int, head_dim_v: int, mask: str) -> bool:
        """Whether the kernel computes such problems, for some query length."""
        return (
            self._takes(head_dim_qk, head_dim_v)
            and dtype in self.dtypes
            and self.mask in COVERED_BY[mask]
            and self.runs_on(capability)
        )

    def _takes(self, head_dim_qk: int, head_dim_v: int) -> bool:
        """Whether heads are as wide as the kernel's, or narrower ones that it takes too."""
        if (self.head_dim_qk, self.head_dim_v) == (head_dim_qk, head_dim_v):
            return True
        fits = 0 < head_dim_qk <= self.head_dim_qk and 0 < head_dim_v <= self.head_dim_v
        multiples = head_dim_qk % 8 == head_dim_v % 8 == 0
        return fits and multiples and 0 < self.head_dim_min <= max(head_dim_qk, head_dim_v)


def reduce_mask(left: int, right: int, seqlen_q: int, seqlen_k: int) -> tuple[str, int, int]:
    """(mask, left, right) of the cheapest equivalent mask: limits that hide nothing from any row become -1.

    Query row i sits at key i + seqlen_k - seqlen_q (bottom right).  The first row reaches every key once
    right >= seqlen_q - 1, the last one once left >= seqlen_k - 1.  Lengths are at least 1.
    """
    if left >= seqlen_k - 1:
        left = -1
    if right >= seqlen_q - 1:
        right = -1
    if left >= 0 or right > 0:
        return "window", left, right
    return ("causal" if right == 0 else "none"), left, right


def candidates(
    capability: tuple[int, int],
    dtype: str,
    head_dim_qk: int,
    head_dim_v: int,
    mask: str,
    entries: tuple[Entry, ...] | None = None,
) -> tuple[Entry, ...]:
    """Kernels for a problem, best first; the first whose query lengths fit is the one to run.

    ``dtype`` is one of `DTYPES`, ``mask`` as `reduce_mask` says.  Kernels that a better one makes unreachable are left out,
    so that what comes back is what has to be imported.  Empty where nothing fits.
    """
    known = shipped() if entries is None else entries
    fitting = [e for e in known if e.covers(capability, dtype, head_dim_qk, head_dim_v, mask)]
    fitting.sort(key=lambda e: (-e.preference, COVERED_BY[mask].index(e.mask), e.head_dim_qk + e.head_dim_v, e.module))
    kept: list[Entry] = []
    for entry in fitting:
        if not _unreachable(entry, kept):
            kept.append(entry)
    return tuple(kept)


def _unreachable(entry: Entry, better: Sequence[Entry]) -> bool:
    """Whether better kernels, one or several together, take all that ``entry`` takes."""
    reached = entry.seqlen_q_min
    for k in sorted(better, key=lambda k: k.seqlen_q_min):
        if k.seqlen_q_min <= reached and entry.seqlen_k_max <= k.seqlen_k_max and entry.rows_max <= k.rows_max:
            reached = max(reached, k.seqlen_q_max + 1)
    return reached > entry.seqlen_q_max


def head_dims(
    capability: tuple[int, int], dtype: str, mask: str, entries: tuple[Entry, ...] | None = None
) -> tuple[tuple[int, int], ...]:
    """(head_dim_qk, head_dim_v) for which `candidates` finds a kernel, ascending."""
    known = shipped() if entries is None else entries
    pairs = {(e.head_dim_qk, e.head_dim_v) for e in known}
    return tuple(sorted(p for p in pairs if candidates(capability, dtype, *p, mask, known)))


def widened(
    capability: tuple[int, int], dtype: str, head_dim_qk: int, head_dim_v: int, mask: str, entries: tuple[Entry, ...]
) -> tuple[int, int] | None:
    """Those of `head_dims` with the fewest columns into which such heads fit; None where none do."""
    fitting = (p for p in head_dims(capability, dtype, mask, entries) if head_dim_qk <= p[0] and head_dim_v <= p[1])
    return min(fitting, key=sum, default=None)


def widest_of_any(capability: tuple[int, int], dtype: str, entries: tuple[Entry, ...]) -> int:
    """Columns of the widest kernel that also takes heads of fewer, a multiple of 8; 0: there is none."""
    fitting = (e for e in entries if e.head_dim_min and dtype in e.dtypes and e.runs_on(capability))
    return max((min(e.head_dim_qk, e.head_dim_v) for e in fitting), default=0)


def select(
    capability: tuple[int, int],
    dtype: str,
    head_dim_qk: int,
    head_dim_v: int,
    mask: str,
    seqlen_q: int,
    entries: tuple[Entry, ...] | None = None,
    seqlen_k: int = 0,
    group: int = 1,
) -> Entry | None:
    """The kernel that the operator runs for a sequence of ``seqlen_q`` query rows and ``seqlen_k`` keys (0: as many) where ``group`` query
    heads share a key/value head; None where none fits."""
    found = candidates(capability, dtype, head_dim_qk, head_dim_v, mask, entries)
    keys = seqlen_k or seqlen_q
    rows = group * seqlen_q
    return next(
        (
            e
            for e in found
            if e.seqlen_q_min <= seqlen_q <= e.seqlen_q_max and keys <= e.seqlen_k_max and rows <= e.rows_max
        ),
        None,
    )


@functools.cache
def launcher(entry: Entry) -> Callable[..., Any]:
    """The kernel's ``launch`` with a memory for shapes (`launching.launcher`), one for all who ask.

    Imports the kernel's module (and with it Triton) on first use; ImportError as Python gives it.
    """
    module = importlib.import_module(f"{PACKAGE}.{entry.module}")
    from tilecast.kernels import launching  # loads torch

    if entry.direction == "bwd":
        return launching.backward_launcher(module)
    if "fp8" in entry.dtypes:
        return launching.e4m3_launcher(module)
    if entry.taller is None:
        return launching.launcher(module)
    name, time = entry.taller
    return launching.launcher(module, (importlib.import_module(f"{PACKAGE}.{name}"), time))


def shipped() -> tuple[Entry, ...]:
    """Forward kernels that ship with this package and the Triton at hand compiles, in the order TILECAST_FAMILY asks for."""
    return _of_pass("fwd")


def shipped_backward() -> tuple[Entry, ...]:
    """The same of backward passes."""
    return _of_pass("bwd")


def shipped_serving() -> tuple[Entry, ...]:
    """The same of kernels to serve with."""
    return _of_pass("serve")


def shipped_short() -> tuple[Entry, ...]:
    """The same of kernels for short sequences."""
    return _of_pass("short")


@functools.cache
def _of_pass(direction: str) -> tuple[Entry, ...]:
    return tuple(e for e in _of_both() if e.direction == direction)


@functools.cache
def _of_both() -> tuple[Entry, ...]:
    if not INDEX.is_file():
        return ()
    return usable(read_index(INDEX), _triton_version(), os.environ.get(FAMILY_VARIABLE, ""))


def usable(entries: tuple[Entry, ...], triton: tuple[int, int] | None, family: str = "") -> tuple[Entry, ...]:
    """The entries that a Triton release compiles (None: all), those of ``family`` with a preference above all others.

    Raises RegistryError for a family that has no kernel.
    """
    known = {e.family for e in entries if e.direction != "bwd"}
    asked = preferring(entries, family, known, FAMILY_VARIABLE)
    return tuple(e for e in asked if triton is None or triton >= e.triton_min)


def preferring(entries: tuple[K, ...], family: str, families: Iterable[str], variable: str) -> tuple[K, ...]:
    """The entries with those of ``family`` ("": none) above all others; RegistryError where it is none of ``families``.

    ``variable`` names the environment variable that asks for it.
    """
    if not family:
        return entries
    known = sorted(families)
    if family not in known:
        raise RegistryError(f"{variable}: expected {', '.join(known)} (or unset), got '{family}'")
    above = max(e.preference for e in entries) + 1
    return tuple(replace(e, preference=e.preference + above) if e.family == family else e for e in entries)


def _triton_version() -> tuple[int, int] | None:
    """(major, minor) of the installed Triton; None without one, and the import of a kernel will say so."""
    try:
        major, minor, *_ = importlib.metadata.version("triton").split(".")
    except importlib.metadata.PackageNotFoundError:
        return None
    return int(major), int(minor)


def read_index(path: Path) -> tuple[Entry, ...]:
    """Entries of one index file, in its order; RegistryError where it breaks the schema."""
    entries = tuple(_entry(row, where) for row, where in index_rows(path, _REQUIRED, _OPTIONAL))
    names = [e.module for e in entries]
    twice = sorted({n for n in names if names.count(n) > 1})
    if twice:
        raise RegistryError(f"{path}: expected every module once, got '{twice[0]}' {names.count(twice[0])} times")
    return entries


def index_rows(
    path: Path, required: tuple[str, ...], optional: tuple[str, ...]
) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Objects of an index file and where each stands; RegistryError for other content, and for fields missing or unknown."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise RegistryError(f"{path}: expected a JSON list of kernels, got {error}") from None
    if not isinstance(rows, list):
        raise RegistryError(f"{path}: expected a JSON list of kernels, got {type(rows).__name__}")
    for number, row in enumerate(rows):
        where = f"{path}: entry {number}"
        if not isinstance(row, Mapping):
            raise RegistryError(f"{where}: expected an object, got {type(row).__name__}")
        missing = [name for name in required if name not in row]
        if missing:
            raise RegistryError(f"{where}: field '{missing[0]}' is missing")
        # A field we do not know may be a condition we would ignore.
        unknown = sorted(set(row) - set(required) - set(optional))
        if unknown:
            raise RegistryError(f"{where}: unknown field '{unknown[0]}'; known are {', '.join(required + optional)}")
        yield row, where


def _entry(row: Mapping[str, Any], where: str) -> Entry:
    where = f"{where} ({row['module']})"
    if not isinstance(row["module"], str) or not row["module"].isidentifier():
        raise RegistryError(f"{where}: field 'module': expected a module name, got {row['module']!r}")
    if row["mask"] not in COVERED_BY:
        raise RegistryError(f"{where}: field 'mask': expected {', '.join(COVERED_BY)}, got {row['mask']!r}")
    direction = row.get("pass", "fwd")
    if direction not in PASSES:
        raise RegistryError(f"{where}: field 'pass': expected {', '.join(PASSES)}, got {direction!r}")
    cache = row.get("cache", "")
    if cache not in CACHES:
        raise RegistryError(f"{where}: field 'cache': expected {', '.join(map(repr, CACHES))}, got {cache!r}")
    dtypes = row["dtypes"]
    if not isinstance(dtypes, list) or not dtypes or not set(dtypes) <= set(DTYPES):
        raise RegistryError(f"{where}: field 'dtypes': expected some of {', '.join(DTYPES)}, got {dtypes!r}")
    exact, minimum = capabilities(row["capability"], where, bare=True)
    last = row.get("seqlen_q_max")
    return Entry(
        module=row["module"],
        family=str(row["family"]),
        exact=exact,
        minimum=minimum,
        head_dim_qk=whole_number(row, "head_dim_qk", where),
        head_dim_v=whole_number(row, "head_dim_v", where),
        mask=row["mask"],
        dtypes=frozenset(dtypes),
        seqlen_q_min=whole_number(row, "seqlen_q_min", where) if "seqlen_q_min" in row else 0,
        seqlen_q_max=NO_LIMIT if last is None else whole_number(row, "seqlen_q_max", where),
        seqlen_k_max=NO_LIMIT if row.get("seqlen_k_max") is None else whole_number(row, "seqlen_k_max", where),
        rows_max=NO_LIMIT if row.get("rows_max") is None else whole_number(row, "rows_max", where),
        preference=whole_number(row, "preference", where),
        triton_min=_pair(row.get("triton_min", [0, 0]), "triton_min", where),
        direction=direction,
        cache=cache,
        head_dim_min=whole_number(row, "head_dim_min", where) if "head_dim_min" in row else 0,
        taller=_taller(row["taller"], where) if "taller" in row else None,
    )


def _taller(value: Any, where: str) -> tuple[str, float]:
    named = isinstance(value, Mapping) and set(value) == {"module", "time"} and isinstance(value["module"], str)
    if not named or not isinstance(value["time"], float) or not 0.0 < value["time"] <= 1.0:
        raise RegistryError(
            f"{where}: field 'taller': expected a module and a time above 0 and at most 1, got {value!r}"
        )
    return value["module"], value["time"]


def _pair(value: Any, name: str, where: str) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2 or not all(type(n) is int for n in value):
        raise RegistryError(f"{where}: field '{name}': expected [major, minor], got {value!r}")
    return value[0], value[1]


def whole_number(row: Mapping[str, Any], name: str, where: str) -> int:
    """A field that is a whole number of at least 0; RegistryError for another value."""
    value = row[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise RegistryError(f"{where}: field '{name}': expected a whole number of at least 0, got {value!r}")
    return value


def capabilities(
    value: Any, where: str, *, bare: bool = False
) -> tuple[frozenset[tuple[int, int]], tuple[int, int] | None]:
    """``exact`` and ``minimum`` of the field 'capability'; with ``bare`` one pair may stand without its list."""
    minimum = isinstance(value, Mapping) and set(value) == {"min"}
    if minimum:
        pairs = [value["min"]]
    elif isinstance(value, list) and value:
        # One bare pair is what people write for one device.
        pairs = [value] if bare and isinstance(value[0], int) else value
    else:
        pairs = [None]
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2 or not all(type(n) is int for n in pair):
            raise RegistryError(
                f"{where}: field 'capability': expected [[major, minor], ...] or {{'min': [major, minor]}}, got {value!r}"
            )
    versions = [(major, minor) for major, minor in pairs]
    return (frozenset(), versions[0]) if minimum else (frozenset(versions), None)
