"""Functions of gluon.language that few kernels need: element by element, scans, histograms, gathers, products of registers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from tilecast.emulator.errors import BoundsError, LayoutError, UnsupportedError
from tilecast.emulator.far import summed
from tilecast.emulator.session import Session
from tilecast.emulator.values import dtypes
from tilecast.emulator.values.layouts import DotOperandLayout
from tilecast.emulator.values.products import matrix_product
from tilecast.emulator.values.scalars import Float, Int, Int64
from tilecast.emulator.values.tensors import Tensor, joint_layout, raw


def _scalar(value: Any) -> Any:
    """An element as a scalar function sees it."""
    number = value.item() if hasattr(value, "item") else value
    if isinstance(number, bool):
        return number
    if isinstance(number, int):
        return Int(number) if value.dtype.itemsize < 8 else Int64(number)
    return Float(number)


def map_elementwise(session: Session, fn: Callable[..., Any], *args: Any, pack: Any = 1) -> Any:
    """``fn`` of scalars for each element (``pack`` neighbours in row-major order at a time); a tensor, or a tuple of them.

    Numbers of type float are computed in float64 and rounded once at the end.
    """
    layout = joint_layout(session, *args)
    size = int(pack)
    arrays = np.broadcast_arrays(*(np.asarray(raw(a)) for a in args))
    shape = arrays[0].shape
    flat = [np.ascontiguousarray(a).reshape(-1) for a in arrays]
    columns: list[list[Any]] = []
    single = True
    for low in range(0, flat[0].size, size):
        found = fn(*(_scalar(a[low + j]) for a in flat for j in range(size)))
        single = not isinstance(found, tuple)
        found = (found,) if single else tuple(found)
        if len(found) % size:
            raise LayoutError(
                f"{session.here()}: map_elementwise with pack={size} needs {size} results for each output"
            )
        columns = columns or [[] for _ in range(len(found) // size)]
        for output, column in enumerate(columns):
            column += found[output * size : (output + 1) * size]
    floating = next((a.dtype for a in flat if a.dtype.kind not in "iub"), np.dtype(np.float32))
    made = []
    for column in columns:
        first = column[0]
        kind = np.dtype(bool) if isinstance(first, bool) else np.dtype(np.int32) if isinstance(first, int) else floating
        kind = np.dtype(np.int64) if isinstance(first, Int64) else kind
        out = Tensor(session, np.asarray([raw(v) for v in column]).astype(kind).reshape(shape), layout)
        out.charge("alu", out.a.size, *args)
        made.append(out)
    return made[0] if len(made) == 1 else tuple(made)


def gather(session: Session, src: Tensor, index: Tensor, axis: Any) -> Tensor:
    """Elements of ``src`` along ``axis`` by number."""
    where = int(axis)
    extent = src.a.shape[where]
    if index.a.size and (index.a.min() < 0 or index.a.max() >= extent):
        raise BoundsError(
            f"{session.here()}: a gather of element {int(index.a.max())} or {int(index.a.min())} of {extent}"
        )
    return Tensor(session, np.take_along_axis(src.a, index.a, where), index.layout)


def histogram(session: Session, x: Tensor, num_bins: Any, mask: Any = None, layout: Any = None, **_more: Any) -> Tensor:
    """How often each of the numbers 0 to ``num_bins`` - 1 occurs; BoundsError for others."""
    counted = x.a if mask is None else x.a[np.broadcast_to(raw(mask), x.a.shape)]
    if counted.size and (counted.min() < 0 or counted.max() >= int(num_bins)):
        raise BoundsError(
            f"{session.here()}: a histogram of {int(num_bins)} bins of {int(counted.min())} to {int(counted.max())}"
        )
    return Tensor(session, np.bincount(counted.reshape(-1), minlength=int(num_bins)).astype(np.int32), layout)


def associative_scan(session: Session, x: Any, axis: Any, combine_fn: Any, reverse: Any = False) -> Any:
    """What ``combine_fn`` makes of the elements up to each, along ``axis``; of a tensor or of a tuple of them."""
    several = isinstance(x, tuple)
    parts = list(x) if several else [x]
    where = int(axis)
    numbers = list(range(parts[0].a.shape[where]))
    numbers = numbers[::-1] if reverse else numbers
    carried: Any = None
    out = [np.empty_like(part.a) for part in parts]
    for number in numbers:
        here = [part.like(part.a.take([number], where), part.layout) for part in parts]
        combined = here if carried is None else combine_fn(*carried, *here)
        carried = list(combined) if isinstance(combined, (tuple, list)) else [combined]
        for array, value in zip(out, carried, strict=True):
            array[(slice(None),) * where + (slice(number, number + 1),)] = raw(value)
    # Taken for sums: what combines otherwise stays within them.
    made = tuple(
        Tensor(session, array, part.layout).sampled(summed(part, len(numbers), part.bits == 64))
        for array, part in zip(out, parts, strict=True)
    )
    return made if several else made[0]


def _operand(x: Tensor, truncated: bool) -> Any:
    """Values for a product, with tf32's 10 bits of fraction where asked."""
    values = np.asarray(x.a, np.float32)
    return (values.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32) if truncated else values


def dot_fma(session: Session, a: Tensor, b: Tensor, acc: Tensor) -> Tensor:
    """acc + a b on the arithmetic units."""
    return _product(session, a, b, acc, False)


def mma_v2(session: Session, a: Tensor, b: Tensor, acc: Tensor, input_precision: Any = None) -> Tensor:
    """acc + a b by mma.sync; float32 operands are cut to tf32 unless "ieee" is asked for."""
    return _product(session, a, b, acc, input_precision != "ieee")


def _product(session: Session, a: Tensor, b: Tensor, acc: Tensor, tensor_core: bool) -> Tensor:
    shapes = [list(t.a.shape) for t in (a, b, acc)]
    left, right = shapes[0], shapes[1]
    if (
        left[-1] != right[-2]
        or shapes[2] != [*left[:-1], right[-1]]
        or left[:-2] != right[:-2]
        or a.dtype is not b.dtype
    ):
        raise LayoutError(f"{session.here()}: {a.dtype} {shapes[0]} times {b.dtype} {shapes[1]} into {shapes[2]}")
    for number, operand in enumerate((a, b)):
        layout = operand.layout
        if layout is not None and (not isinstance(layout, DotOperandLayout) or layout.parent != acc.layout):
            raise LayoutError(f"{session.here()}: operand {number} needs a DotOperandLayout of {acc.layout!r}")
    truncated = tensor_core and a.a.dtype == np.float32
    with np.errstate(all="ignore"):
        product = matrix_product(_operand(a, truncated), _operand(b, truncated))
        out = acc.like((product + acc.a).astype(acc.a.dtype), acc.layout)
    # On a tensor core 16 x 8 x 16 of a warp in one instruction, otherwise one product of a thread.
    kinds = ("mma", out.a.size * left[-1]) if tensor_core else ("fma", out.a.size * left[-1])
    out.charge(*kinds, a, b, acc)
    return out


def _packed(compute: Callable[..., Any]) -> Callable[..., Tensor]:
    """Arithmetic of two neighbours at a time: add2 and the like, rounded once to the result's type."""

    def call(session: Session, *operands: Any, dtype: Any = None) -> Tensor:
        tensors = [x for x in operands if isinstance(x, Tensor)]
        if not tensors or any(x.a.dtype.kind in "iub" for x in tensors):
            raise UnsupportedError(f"{session.here()}: packed arithmetic of integers (FP4) is not emulated")
        layout, kind = joint_layout(session, *operands), dtype or tensors[0].dtype
        with np.errstate(all="ignore"):
            exact = compute(*(np.asarray(raw(x), np.float64) for x in operands))
        out = Tensor(session, dtypes.cast(np.asarray(exact, np.float32), kind), layout)
        out.charge("fma2" if kind.bits == 32 else "fma", out.a.size / 2, *tensors)
        return out

    return call


def packed_arithmetic(session: Session) -> dict[str, Callable[..., Tensor]]:
    """By name in nvidia.blackwell."""
    functions: dict[str, Callable[..., Any]] = {
        "add2": np.add, "sub2": np.subtract, "mul2": np.multiply, "fma2": lambda x, y, z: x * y + z, "min2": np.fmin,
        "max2": np.fmax,
    }  # fmt: skip
    return {name: functools.partial(_packed(compute), session) for name, compute in functions.items()}


def unplaced(*_given: Any) -> None:
    """AutoLayout and CoalescedLayout: threads that the compiler chooses, which fit everything here."""


def names(session: Session) -> dict[str, Any]:
    """By name in gluon.language."""
    functions = (map_elementwise, gather, histogram, associative_scan, dot_fma)
    return {
        **{fn.__name__: functools.partial(fn, session) for fn in functions},
        "AutoLayout": unplaced,
        "CoalescedLayout": unplaced,
    }
