"""How A and B of a product lie: what the copy engine reads, at which bytes rows start, and copies of what is not read or read slowly."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

from tilecast.kernels import registry
from tilecast.kernels.gemm.launching import copier
from tilecast.kernels.starting import on_device

#: The kernel that copies A and B, bytes of a line of L2, and of rows from which on those of a copy start at whole ones.
_COPY, _LINE, _LONG_ROW = "gemm_copy", 128, 512
#: Elements of a matrix up to which few rows load it element by element for less than a copy.
_MOST_SINGLE = 1_000_000
_empty_strided = torch.empty_strided


def in_vectors(a: Any, b: Any, device: int) -> tuple[Any, Any]:
    """A of few rows and B, or where B is large copies along k, of what is not loaded in vectors of 16 bytes."""
    single = tuple(not (boxes(x) and (along_k or not x.shape[1] % 8)) for x, along_k in (
        (a if a.stride(1) == 1 else a.t(), a.stride(1) == 1), (b.t() if b.stride(0) == 1 else b, b.stride(0) == 1),
    ))  # fmt: skip
    return copied((a, b), single if b.numel() >= _MOST_SINGLE else (False, False), (False, True), device)


def copied(given: tuple[Any, Any], copies: tuple[bool, ...], turned: tuple[bool, ...], device: int) -> tuple[Any, Any]:
    """The matrices, those of ``copies`` as copies by rows, or, ``turned``, by columns, made in one launch."""
    made, pairs = list(given), []
    for i, (x, asked, over) in enumerate(zip(given, copies, turned, strict=True)):
        if asked:
            x = x.t() if over else x
            room = _room(x)
            pairs += [x, room]
            made[i] = room.t() if over else room
    if pairs:
        _copier(device)(*pairs)
    return made[0], made[1]


def starts(x: Any) -> tuple[int, int]:
    """The largest power of two bytes, up to a line of L2, at which all rows of A or B start, or columns where it lies by those, 0 where the copy
    engine does not read it; and of a copy's."""
    length, step = (x.shape[0], x.stride(1)) if 0 < x.stride(0) < x.stride(1) else (x.shape[1], x.stride(0))
    size = x.element_size()
    return (
        _whole(step * size) if boxes(x) or boxes(x.t()) else 0,
        _whole(_step_of_copy(length, size) * size),
    )


def _whole(step: int) -> int:
    return min(_LINE, step & -step)


def _step_of_copy(length: int, size: int) -> int:
    """Elements from row to row of a copy: to whole lines of L2, or of short rows to whole 16 bytes."""
    unit = (_LINE if length * size >= _LONG_ROW else 16) // size
    return -(-length // unit) * unit


def _room(x: Any) -> Any:
    """Room for a copy of a matrix."""
    step = _step_of_copy(x.shape[1], x.element_size())
    return _empty_strided((x.shape[0], step), (step, 1), dtype=x.dtype, device=x.device)[:, : x.shape[1]]


def boxes(x: Any) -> bool:
    """Whether the copy engine reads the matrix by rows: without gaps, from 16 bytes on."""
    return x.stride(1) == 1 and x.stride(0) > 0 and not (x.stride(0) * x.element_size() & 15 or x.data_ptr() & 15)


@functools.cache
def _copier(device: int) -> Any:
    """The launch of copies on a device."""
    return on_device(copier(importlib.import_module(f"{registry.PACKAGE}.{_COPY}")), device)
