"""Pairs of float32 in a 64-bit register: nvidia.blackwell.float2."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilecast.emulator.errors import LayoutError
from tilecast.emulator.language.everyday import Everyday
from tilecast.emulator.values.tensors import Tensor, joint_layout


def _halves(x: Tensor) -> Any:
    """[..., 2] float32 of 64-bit registers."""
    return np.ascontiguousarray(x.a).view(np.float32).reshape(*x.a.shape, 2)


class Float2Tensor:
    """A tensor of pairs; ``value`` holds them as int64, the first of a pair in the lower half."""

    def __init__(self, value: Tensor) -> None:
        self.value = value

    def _combined(self, other: Any, compute: Any, what: str) -> Float2Tensor:
        mine = self.value
        if not isinstance(other, Float2Tensor):
            raise LayoutError(f"{mine.session.here()}: float2 {what} needs two Float2Tensors, got {other!r}")
        layout = joint_layout(mine.session, mine, other.value)
        with np.errstate(all="ignore"):
            return _made(mine, compute(_halves(mine), _halves(other.value)), layout)

    def __add__(self, other: Any) -> Float2Tensor:
        return self._combined(other, np.add, "addition")

    def __sub__(self, other: Any) -> Float2Tensor:
        return self._combined(other, np.subtract, "subtraction")

    def __mul__(self, other: Any) -> Float2Tensor:
        return self._combined(other, np.multiply, "multiplication")

    def sum(self, axis: Any) -> Float2Tensor:
        """Sums along an axis, one for each half, in the order of gl.reduce."""
        add = lambda a, b: (Float2Tensor(a) + Float2Tensor(b)).value  # noqa: E731
        return Float2Tensor(Everyday(self.value.session).reduce(self.value, axis, add))


def _made(like: Tensor, halves: Any, layout: Any) -> Float2Tensor:
    bits = np.ascontiguousarray(halves, np.float32).view(np.int64)[..., 0]
    out = like.like(bits, layout)
    out.charge("fma2", bits.size)
    return Float2Tensor(out)


def pack2(x0: Tensor, x1: Tensor) -> Float2Tensor:
    """Two float32 tensors of one shape as the halves."""
    layout = joint_layout(x0.session, x0, x1)
    if x0.a.dtype != np.float32 or x1.a.dtype != np.float32 or x0.a.shape != x1.a.shape:
        raise LayoutError(
            f"{x0.session.here()}: float2 packs two float32 tensors of one shape, got {x0.dtype} {list(x0.shape)} and "
            f"{x1.dtype} {list(x1.shape)}"
        )
    return Float2Tensor(x0.like(np.stack([x0.a, x1.a], axis=-1).view(np.int64)[..., 0], layout))


def unpack2(x: Float2Tensor) -> tuple[Tensor, Tensor]:
    """The halves."""
    halves = _halves(x.value)
    first, second = (x.value.like(np.ascontiguousarray(halves[..., i]), x.value.layout) for i in (0, 1))
    return first, second


def pack(x: Tensor, axis: Any) -> Float2Tensor:
    """Neighbours along ``axis`` as pairs; half as many elements there."""
    where, shape = int(axis) % x.a.ndim, list(x.a.shape)
    if shape[where] % 2:
        raise LayoutError(f"{x.session.here()}: float2.pack along an extent of {shape[where]}")
    order = list(range(len(shape) + 1))
    order[where + 1], order[-1] = order[-1], order[where + 1]
    return pack2(*x.reshape([*shape[:where], shape[where] // 2, 2, *shape[where + 1 :]]).permute(order).split())


def unpack(x: Float2Tensor, axis: Any) -> Tensor:
    """The inverse of pack; in which threads the elements lie is not followed."""
    first, second = unpack2(x)
    where = int(axis) % first.a.ndim
    shape = list(first.a.shape)
    shape[where] *= 2
    return first.like(np.stack([first.a, second.a], axis=where + 1).reshape(shape))


def full_like(x: Float2Tensor, fill_value: Any) -> Float2Tensor:
    """One number in both halves everywhere."""
    halves = np.full((*x.value.a.shape, 2), float(fill_value), np.float32)
    return Float2Tensor(x.value.like(halves.view(np.int64)[..., 0], x.value.layout))


def fma(a: Float2Tensor, b: Float2Tensor, c: Float2Tensor) -> Float2Tensor:
    """a b + c, rounded once."""
    layout = joint_layout(a.value.session, a.value, b.value, c.value)
    x, y, z = (np.asarray(_halves(v.value), np.float64) for v in (a, b, c))
    with np.errstate(all="ignore"):
        return _made(a.value, (x * y + z).astype(np.float32), layout)


NAMES = {
    "Float2Tensor": Float2Tensor, "pack2": pack2, "unpack2": unpack2, "pack": pack, "unpack": unpack,
    "full_like": full_like, "fma": fma,
}  # fmt: skip
