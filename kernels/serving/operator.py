"""``torch.ops.tilecast.attention_serving``: one operator for caches, pages and packed sequences, and how it finds its kernels.

Two kernels share a batch: one takes sequences of few rows (decode), the other those of more (prefill).  Which one takes a
sequence depends on that sequence and on how its cache lies alone, and so do its splits: it gets the same bits in every batch.
"""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tilecast.kernels import registry
from tilecast.kernels.again import watched
from tilecast.kernels.errors import UnsupportedError, scale_refusal
from tilecast.kernels.registration import register
from tilecast.kernels.scratch import Counters
from tilecast.kernels.selection import DTYPE_NAMES, capability_of
from tilecast.kernels.serving.launching import FEWER, FOLLOWS, LEADS, Launcher, join_all, start_all
from tilecast.kernels.starting import on_device

#: ((fewest rows, most rows, launcher, launch), ...), with no rows in common.
Kernels = tuple[tuple[int, int, Launcher, Any], ...]


@dataclass(frozen=True)
class _Found:
    """The kernels of a problem, and those for caches that ``refusal`` of one of them gives a reason not to take."""

    kernels: Kernels
    refusal: Callable[[Any, Any], str] | None
    others: Kernels

    def of(self, k: Any, v: Any) -> Kernels:
        """The kernels for a cache."""
        return self.others if self.refusal is not None and self.refusal(k, v) else self.kernels


#: (device index, dtypes of q and k, head_dim_qk, head_dim_v) -> its kernels
_known: dict[Any, _Found] = {}
_counters: dict[Any, Counters] = {}
_empty_like = torch.empty_like


def serve(*arguments: Any) -> tuple[Any, Any]:
    """(out, lse) of the operator's arguments: straight to the kernels, or through the dispatcher where a mode or the profiler watches."""
    return _operator(*arguments) if watched(arguments[0]) else _run(*arguments)


def started(arguments: tuple[Any, ...]) -> Callable[..., tuple[Any, Any]] | None:
    """The call of these arguments, which `_run` has just made, for other tensors like them: (q, k, v, lists) -> (out, lse).

    None where nothing was launched.  The lists are those of `Launcher`; no tensor is kept.
    """
    q, k, v, *lists, seqlen_q, seqlen_k, scale, softcap, left, right, return_lse = arguments
    out, lse = _empty(q, v, return_lse)
    if not out.numel():
        return None
    if scale is None:
        scale = 1.0 / math.sqrt(q.shape[-1])
    tensors = (q, k, v, out, lse if return_lse else None, *lists)
    starts = launches(tensors, scale, softcap, seqlen_q, seqlen_k, (left, right))
    if not starts:
        return None
    out_shape, lse_shape = tuple(out.shape), tuple(lse.shape)
    alike = out.shape == q.shape and out.stride() == q.stride()
    only = starts[0] if len(starts) == 1 else None

    def call(q: Any, k: Any, v: Any, lists: Sequence[Any]) -> tuple[Any, Any]:
        out = _empty_like(q) if alike else q.new_empty(out_shape)
        lse = q.new_empty(lse_shape, dtype=torch.float32) if return_lse else None
        if only is None:
            start_all(starts, q, k, v, out, lse, lists)
        elif (join := only(q, k, v, out, lse, lists)[1]) is not None:
            join()
        return out, lse

    return call


def launches(
    tensors: tuple[Any, ...], scale: float, softcap: float, seqlen_q: int, seqlen_k: int, window: tuple[int, int]
) -> list[Callable[..., Any]]:
    """The launches of tensors like these (q, k, v, out, lse and lists, as `Launcher` takes them), which `into` has just made, each
    for `start_all` with (q, k, v, out, lse, lists)."""
    q, k, v, _, _, *lists = tensors
    found = _known.get((q.get_device(), q.dtype, k.dtype, q.shape[-1], v.shape[-1]))
    rows = _rows(q, k, lists[0], seqlen_q)
    wanted = _wanted(found.of(k, v), rows) if found is not None and rows.most else []
    return [
        launcher.started(tensors, scale, softcap, seqlen_q, seqlen_k, window, beside) for launcher, _, beside in wanted
    ]


def _wanted(kernels: Kernels, rows: _Rows) -> list[tuple[Launcher, Any, int]]:
    """The kernels for sequences of such rows, their launches in order, and how each runs beside the next one (`LEADS`) and the one before
    (`FOLLOWS`); the one for the fewest rows takes fewer as well (`FEWER`) where a kernel is left out that may have a sequence after all.

    Those for the fewest rows come first, which leave SMs to those for the most, as one waits for memory and the other for matrix products.
    What is launched last has rarely a sequence of its own, and sees so on SMs that the others are done with.  Beside the one for
    the most rows those whose rows are half a tile have a launch of their own, which takes less.
    """
    least, most = rows.least, rows.most
    halved = most >= kernels[-1][0]
    beside = itertools.chain(*(one[2].halves if halved and one[2].halves else (one,) for one in kernels))
    wanted = [(launcher, launch) for first, last, launcher, launch in beside if first <= most and least <= last]
    wanted = [*wanted[:1], *wanted[:0:-1]]
    joined = [False, *(a.leads and b.follows for (a, _), (b, _) in itertools.pairwise(wanted)), False]
    fewer = [FEWER * any(rows.surely <= last < least for _, last, _, _ in kernels), *[0] * (len(wanted) - 1)]
    return [
        (*kernel, LEADS * after + FOLLOWS * before + also)
        for kernel, also, (before, after) in zip(wanted, fewer, itertools.pairwise(joined), strict=True)
    ]


def _run(
    q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, used_k: Any, table: Any, slots: Any, sinks: Any,
    k_descale: Any, v_descale: Any, seqlen_q: int, seqlen_k: int, scale: float | None, softcap: float, left: int, right: int,
    return_lse: bool,
) -> tuple[Any, Any]:  # fmt: skip
    """The operator on a device; lse is of size 0 when not asked for."""
    _found(q, k, q.shape[-1], v.shape[-1])  # refused before anything is made
    out, lse = _empty(q, v, return_lse)
    if out.numel() == 0:
        return out, lse
    lists = (cu_q, cu_k, used_k, table, slots, sinks, k_descale, v_descale)
    into(q, k, v, out, lse if return_lse else None, lists, scale, softcap, seqlen_q, seqlen_k, (left, right))
    return out, lse


def into(
    q: Any, k: Any, v: Any, out: Any, lse: Any, lists: tuple[Any, ...], scale: float | None, softcap: float,
    seqlen_q: int, seqlen_k: int, window: tuple[int, int],
) -> None:  # fmt: skip
    """The same into ``out`` and ``lse`` (None: not asked for), whose rows start at 16 bytes; lists as `Launcher` takes them."""
    dims = q.shape[-1], v.shape[-1]
    found = _found(q, k, *dims)
    if scale is None:
        scale = 1.0 / math.sqrt(dims[0])
    elif refused := scale_refusal(scale):
        raise UnsupportedError(refused)
    rows = _rows(q, k, lists[0], seqlen_q)
    if not rows.most:
        out.zero_()
        return
    join_all(
        [
            launch(q, k, v, out, lse, lists, scale, softcap, seqlen_q, seqlen_k, window, beside)
            for _, launch, beside in _wanted(found.of(k, v), rows)
        ]
    )


def parted(q: Any, k: Any, v: Any, left: int) -> bool:
    """Whether the kernel for sequences like these, (batch, seqlen, heads, head_dim), parts their keys so that more SMs have work; left:
    of the window.  UnsupportedError where there is no kernel."""
    group, rows = q.shape[2] // k.shape[2], _rows(q, k, None, q.shape[1]).most
    for first, last, launcher, _ in _found(q, k, q.shape[3], v.shape[3]).of(k, v):
        if first <= rows <= last:
            return launcher.parts is not None and launcher.parts(q.shape[1], k.shape[1], group, k.shape[2], left) > 1
    return False


def tiles(q: Any, k: Any, v: Any) -> tuple[int, int]:
    """How many tiles the kernel for sequences like these, (batch, seqlen, heads, head_dim), makes of one of them, and of how many rows; of
    one that has no tiles, each row.  UnsupportedError where there is no kernel."""
    rows = _rows(q, k, None, q.shape[1]).most
    for first, last, launcher, _ in _found(q, k, q.shape[3], v.shape[3]).of(k, v):
        if first <= rows <= last and launcher.tile_rows:
            return -(-rows // launcher.tile_rows) * int(k.shape[2]), launcher.tile_rows
    return int(q.shape[1] * q.shape[2]), 1


def _found(q: Any, k: Any, dim: int, dim_v: int) -> _Found:
    """The kernels of a problem; UnsupportedError where there is none."""
    return _known.get((q.get_device(), q.dtype, k.dtype, dim, dim_v)) or _find(q, k, dim, dim_v)


class _Rows(NamedTuple):
    """Rows that a sequence has at least, whatever the shape of q, that it has at least where all rows of q are a sequence's, and at most."""

    surely: int
    least: int
    most: int


def _rows(q: Any, k: Any, cu_q: Any, seqlen_q: int) -> _Rows:
    """Rows of a sequence; 0 without sequences.

    Packed sequences may have any number of queries up to the longest.  Where the others cannot hold all rows of q, each has the rest at
    least: with as many rows of q as if all were the longest, none has fewer.  Rows of q that are no sequence's make that wrong, so it
    decides which kernels are launched, and not which sequences are computed (`FEWER`).
    """
    group = q.shape[-2] // k.shape[-2]
    if cu_q is None:
        return _Rows(*(seqlen_q * group,) * 3)
    if (count := cu_q.shape[0] - 1) < 1:
        return _Rows(0, 0, 0)
    longest = min(seqlen_q, q.shape[0])
    return _Rows(group, max(1, q.shape[0] - (count - 1) * longest) * group, longest * group)


def _empty(q: Any, v: Any, return_lse: bool) -> tuple[Any, Any]:
    """(out, lse) as the operator returns them: packed (total, heads, head_dim_v) and (heads, total), or with a batch in front
    (batch, seqlen_q, heads, head_dim_v) and (batch, heads, seqlen_q)."""
    out = torch.empty((*q.shape[:-1], v.shape[-1]), dtype=q.dtype, device=q.device)
    *batch, rows, heads, _ = q.shape
    return out, torch.empty((*batch, heads, rows) if return_lse else (0,), dtype=torch.float32, device=q.device)


def _find(q: Any, k: Any, dim: int, dim_v: int) -> _Found:
    """The kernels of a problem met for the first time, imported and remembered; UnsupportedError where there is none."""
    if refused := refusal(q, k, dim, dim_v):
        raise UnsupportedError(refused)
    device = q.device
    entries = _candidates(q, k, dim, dim_v, _entries(k))
    kernels = _launchers(entries, device)
    choosy, others, rest = _choosy(kernels), kernels, _entries(k)
    while names := _choosy(others):
        # Whichever comes in their place may not take such a cache either.
        rest = tuple(e for e in rest if _module_name(e) not in names)
        others = _launchers(_candidates(q, k, dim, dim_v, rest), device)
    found = _Found(kernels, next(iter(choosy.values())), others) if choosy else _Found(kernels, None, ())
    _known[(q.get_device(), q.dtype, k.dtype, dim, dim_v)] = found
    return found


def _choosy(kernels: Kernels) -> dict[str, Callable[[Any, Any], str]]:
    """The modules of kernels that do not take every cache, by name, and what each says of one."""
    modules = {launcher._module.__name__: launcher._module for _, _, launcher, _ in kernels}
    return {name: module.refusal for name, module in modules.items() if hasattr(module, "refusal")}


def _module_name(entry: registry.Entry) -> str:
    return f"{registry.PACKAGE}.{entry.module}"


def _launchers(entries: tuple[registry.Entry, ...], device: Any) -> Kernels:
    """The kernels of entries, best first: each takes the rows that those before it leave.  In the order of their rows."""
    found: list[tuple[int, int, Launcher, Any]] = []
    for entry in entries:
        first, last = entry.seqlen_q_min, entry.seqlen_q_max
        for low, high, _, _ in found:
            first = high + 1 if low <= first <= high else first
            last = low - 1 if low <= last <= high else last
        if first > last:
            continue
        module = _module(entry)
        place = len(found)
        found.append(_launcher(module, first, last, device, place))
        if first <= (half := getattr(module, "HALF_ROWS", 0)) < last:
            few, rest = (first, half, device, place), (half + 1, last, device, -1 - place)
            found[-1][2].halves = _launcher(module, *few), _launcher(module, *rest)
    return tuple(sorted(found, key=lambda kernel: kernel[0]))


def _launcher(module: Any, first: int, last: int, device: Any, place: int) -> tuple[int, int, Launcher, Any]:
    """A kernel for sequences of ``first`` to ``last`` rows.  Launches that run at the same time need counters of their own, by ``place``."""
    launcher = Launcher(module, (first, last), device, _counters.setdefault((device, place), Counters(device)))
    return first, last, launcher, on_device(launcher, -1 if device.type == "cpu" else device.index)


def _module(entry: registry.Entry) -> Any:
    """The file of an entry as a module."""
    try:
        return importlib.import_module(_module_name(entry))
    except ImportError as error:
        raise UnsupportedError(
            f"attention: the kernels need Triton 3.6 or newer, and importing one gave '{error}'; pip install 'tilecast[gpu]'"
        ) from error


def _candidates(
    q: Any, k: Any, dim: int, dim_v: int, entries: tuple[registry.Entry, ...]
) -> tuple[registry.Entry, ...]:
    capability = capability_of(q.device.type, q.get_device())
    if isinstance(capability, str):
        return ()
    return registry.candidates(capability, DTYPE_NAMES[q.dtype], dim, dim_v, "window", entries)


def _entries(k: Any) -> tuple[registry.Entry, ...]:
    """The serving kernels for such a cache."""
    cache = "e4m3" if k.dtype == torch.uint8 else ""
    return tuple(entry for entry in registry.shipped_serving() if entry.cache == cache)


def refusal(q: Any, k: Any, dim: int, dim_v: int) -> str | None:
    """Why no serving kernel takes tensors like q and k with these head dimensions; None where one does."""
    if q.dtype not in DTYPE_NAMES:
        return f"q: expected dtype torch.bfloat16 or torch.float16, got {q.dtype}; cast it"
    capability = capability_of(q.device.type, q.get_device())
    if isinstance(capability, str):
        return capability.partition("; ")[0]
    if not _candidates(q, k, dim, dim_v, _entries(k)):
        have = registry.head_dims(capability, DTYPE_NAMES[q.dtype], "window", _entries(k))
        names = ", ".join(f"{a}" if a == b else f"{a}/{b}" for a, b in have)
        widest = registry.widest_of_any(capability, DTYPE_NAMES[q.dtype], _entries(k))
        others = f", or a multiple of 8 up to {widest}" if widest else ""
        return f"head_dim: expected one that a serving kernel has ({names}{others}), got {dim}/{dim_v}"
    return None


def _fake(
    q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, used_k: Any, table: Any, slots: Any, sinks: Any,
    k_descale: Any, v_descale: Any, seqlen_q: int, seqlen_k: int, scale: float | None, softcap: float, left: int, right: int,
    return_lse: bool,
) -> tuple[Any, Any]:  # fmt: skip
    """Shapes of the operator, without a device."""
    return _empty(q, v, return_lse)


_library, _operator = register(
    "attention_serving(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_k, "
    "Tensor? block_table, Tensor? cache_batch_idx, Tensor? sinks, Tensor? k_descale, Tensor? v_descale, "
    "SymInt max_seqlen_q, SymInt max_seqlen_k, float? scale, float softcap, SymInt window_left, SymInt window_right, bool return_lse) -> (Tensor, Tensor)",
    _run,
    _fake,
)
