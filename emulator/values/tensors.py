"""What a kernel computes with: register tensors and pointers."""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tilecast.emulator.errors import IntegerError, LayoutError, UninitializedError, UnsupportedError
from tilecast.emulator.far import Far, combined, far_of, near, summed
from tilecast.emulator.session import NO_STEP, Session
from tilecast.emulator.values import dtypes
from tilecast.emulator.values.layouts import SliceLayout, expanded, halved, permuted, reshaped
from tilecast.emulator.values.repeated import Columns, of_values, together
from tilecast.emulator.values.scalars import Float, Int, Int64


def raw(value: Any) -> Any:
    """The numpy array of a tensor, the plain number of a scalar."""
    if isinstance(value, Tensor):
        return value.a
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    return float(value) if isinstance(value, float) else value


class Tensor:
    """A tensor in registers: numpy values, a layout (None: not known), and whether a wgmma still writes it."""

    __slots__ = ("_a", "both", "columns", "far", "layout", "made", "pending", "product", "session")
    __array_ufunc__ = None

    def __init__(self, session: Session, a: Any, layout: Any = None) -> None:
        self.session, self._a, self.layout = session, a, layout
        #: The wgmma that will deliver the values (None: they are here).
        self.pending: Any = None
        #: (x, y) when this is their product and the compiler may fuse it into a sum.
        self.product: tuple[Any, Any] | None = None
        #: What its elements would be in far larger problems; None where not asked for.
        self.far: Far | None = None
        #: Which of its columns a thread computes once; None where it is not known.
        self.columns: Columns | None = None
        #: Whether it is bits of one value that are in another one: an instruction that also compares with zero.
        self.both = False
        #: The step (`trace.Step`) that computed it.
        self.made = NO_STEP

    @property
    def a(self) -> Any:
        """The values; UninitializedError while a wgmma writes them."""
        if self.pending is not None:
            quote = self.session.source.quote
            if not self.pending.known_done:
                weak = self.pending.left_by
                raise UninitializedError(
                    f"registers of a wgmma in flight are touched at {self.session.here()}: "
                    f"it was issued at {quote(self.pending.line)}; "
                    + (
                        f"the wait at {quote(weak)} leaves it in flight"
                        if weak
                        else "wait for it first (warpgroup_mma_wait)"
                    )
                )
            raise UninitializedError(
                f"{self.session.here()}: the result of the wgmma issued at {quote(self.pending.line)} did not pass through the "
                f"wait at {quote(self.pending.waited_at)}: give it among deps and use what warpgroup_mma_wait returns"
            )
        return self._a

    def sampled(self, far: Far | None) -> Tensor:
        """This tensor, which no other value shares yet, with intervals, if it is of truth values or of integers of 32 or 64 bits."""
        if far is not None and (self.bits or self._a.dtype.kind == "b"):
            self.far = far.widened() if self.bits == 64 else far
        return self

    @property
    def bits(self) -> int:
        """Of signed integers of 32 or 64 bits; 0 of all else."""
        kind = self._a.dtype
        return 8 * kind.itemsize if kind.kind == "i" and kind.itemsize >= 4 else 0

    def near(self) -> Tensor:
        """The tensor without its intervals."""
        return self.like(self._a, self.layout)

    def arrived(self) -> Tensor:
        """What a wait returns of this: the values, where they are complete; the same tensor otherwise."""
        if self.pending is None or not self.pending.known_done:
            return self
        return Tensor(self.session, self.pending.result, self.layout)

    @property
    def shape(self) -> list[Int]:
        """Extents."""
        return [Int(n) for n in self._a.shape]

    @property
    def type(self) -> Any:
        """What kernels ask of a type."""
        return types.SimpleNamespace(layout=self.layout, shape=self.shape, element_ty=self.dtype, scalar=self.dtype)

    @property
    def dtype(self) -> dtypes.Dtype:
        """Element type."""
        return dtypes.of(self._a)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        function = self.session.methods.get(name)
        if function is None:
            raise UnsupportedError(f"{self.session.here()}: the emulator does not know tensor.{name}")
        return functools.partial(function, self)

    def like(self, a: Any, layout: Any = None) -> Tensor:
        """A tensor of the same session, which the same step has made."""
        out = Tensor(self.session, a, layout)
        out.made = self.made
        return out

    def charge(self, pipe: str, count: float, *operands: Any) -> None:
        """Account for ``count`` instructions of single threads that make this tensor of the ``operands`` (without any: of what made it)."""
        needs = tuple([one.made for one in operands if isinstance(one, Tensor)]) or (self.made,)
        self.made = self.session.charge(pipe, count, self._a.shape, self.layout, needs)

    def computed(self, pipe: str, *operands: Any, moved: bool = False) -> Tensor:
        """This tensor, which no other value shares yet, charged as one operation of the ``operands`` for each of its columns that a thread
        computes; ``moved``: by a number that the launch knows, which is part of an address."""
        self.columns = joint_columns(self, operands, moved)
        if self.columns is None:
            self.charge(pipe, self._a.size, *operands)
        elif not self.columns.known:
            self.charge(pipe, self._a.size * self.columns.share, *operands)
        return self

    def to(self, dtype: dtypes.Dtype, bitcast: bool = False) -> Tensor:
        """The values as another type, rounded to nearest even."""
        if bitcast:
            return self.like(self.a.view(dtype.numpy), self.layout)
        out = self.like(dtypes.cast(self.a, dtype), self.layout)
        if dtype.bits < 32 and self._a.dtype == np.float32:
            out.charge("cvt", out._a.size / 2)
        elif out._a.dtype != self._a.dtype and "f" in (out._a.dtype.kind, self._a.dtype.kind):
            out.charge("alu", out._a.size)
        return out if self.far is None else out.sampled(self.far.narrowed() if out.bits == 32 else self.far)

    def reshape(self, *shape: Any) -> Tensor:
        """Other extents, elements in row-major order."""
        extents = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        new = tuple(int(n) for n in extents)
        return self.like(self.a.reshape(new), reshaped(self.layout, self._a.shape, new)).sampled(self.far)

    def flip(self, dim: Any = None) -> Tensor:
        """Elements in the opposite order, by default along the last dimension."""
        return self.like(np.ascontiguousarray(np.flip(self.a, -1 if dim is None else int(dim))), self.layout)

    def item(self) -> Any:
        """The one element, as a scalar."""
        if self._a.size != 1:
            raise LayoutError(f"item needs one element, got {list(self._a.shape)}")
        value = self.a.reshape(-1)[0]
        return Int(int(value)).sampled(self.far) if self._a.dtype.kind in "iub" else Float(value)

    @property
    def T(self) -> Tensor:  # noqa: N802
        """A matrix with its dimensions exchanged."""
        return self.permute((1, 0))

    def logical_and(self, other: Any) -> Tensor:
        """Whether both hold."""
        return self.like((self.a != 0) & (np.asarray(raw(other)) != 0), joint_layout(self.session, self, other))

    def logical_or(self, other: Any) -> Tensor:
        """Whether one of them holds."""
        return self.like((self.a != 0) | (np.asarray(raw(other)) != 0), joint_layout(self.session, self, other))

    def permute(self, *order: Any) -> Tensor:
        """Dimensions in another order."""
        places = order[0] if len(order) == 1 and isinstance(order[0], (tuple, list)) else order
        numbers = tuple(int(n) for n in places)
        return self.like(self.a.transpose(numbers), permuted(self.layout, numbers)).sampled(self.far)

    def broadcast_to(self, *shape: Any) -> Tensor:
        """The values with larger extents."""
        extents = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        return self.like(np.broadcast_to(self.a, tuple(int(n) for n in extents)), self.layout).sampled(self.far)

    def trans(self, *order: Any) -> Tensor:
        """Dimensions in another order, by default the last two exchanged."""
        rank = self._a.ndim
        return self.permute(*(order or (*range(rank - 2), rank - 1, rank - 2)))

    def split(self) -> tuple[Tensor, Tensor]:
        """The two elements of the last dimension."""
        if self._a.shape[-1] != 2:
            raise LayoutError(f"split needs a last dimension of 2, got {list(self._a.shape)}")
        layout = halved(self.layout)
        return self.like(self.a[..., 0], layout), self.like(self.a[..., 1], layout)

    def __getitem__(self, key: Any) -> Tensor:
        keys = key if isinstance(key, tuple) else (key,)
        layout = self.layout
        for place, item in enumerate(keys):
            if item is None:
                layout = expanded(layout, place)
            elif item != slice(None):
                raise LayoutError(
                    f"{self.session.here()}: a register tensor takes None and : as an index, got {item!r}"
                )
        out = self.like(self.a[keys], layout).sampled(self.far)
        out.columns = self.columns if keys[-1] is not None else None
        return out

    def __invert__(self) -> Tensor:
        out = self.like(~self.a, self.layout)
        out.charge("alu", out._a.size)
        return out

    def __neg__(self) -> Tensor:
        out = self.like(-self.a, self.layout)
        out.columns = self.columns
        return out

    def __bool__(self) -> bool:
        raise UnsupportedError("a branch on a tensor: reduce it to a scalar first")


def joint_layout(session: Session, *values: Any) -> Any:
    """The layout operands share; LayoutError when two differ."""
    layout = None
    for value in values:
        other = value.layout if isinstance(value, Tensor) else None
        if other is None or other is layout:
            continue
        if layout is not None and layout != other:
            raise LayoutError(f"{session.here()}: operands have different layouts, {layout!r} and {other!r}")
        layout = other
    return layout


def joint_columns(out: Tensor, operands: Sequence[Any], moved: bool = False) -> Columns | None:
    """Which columns of an operation's result a thread computes once, by its operands; ``moved``: numbers of the launch leave what is
    known to be known."""
    known = [one.columns for one in operands if isinstance(one, Tensor) and one.columns is not None]
    if not known or not out._a.ndim:
        return None
    width = out._a.shape[-1]
    alike = Columns((0,) * width, False)
    found = []
    for one in operands:
        if not isinstance(one, Tensor):
            found.append(Columns(alike.kinds, moved or not isinstance(one, Int)))
        elif one.columns is not None and len(one.columns.kinds) == width:
            found.append(one.columns)
        elif one._a.ndim == out._a.ndim > 1 and one._a.shape[-1] == 1:
            found.append(alike)
        else:
            return None
    if all(one.known for one in found):
        return of_values(out._a) if out._a.size == width else None
    return functools.reduce(together, found)


def _arithmetic(tensor: Tensor, other: Any, name: str, reflected: bool) -> Any:
    """One elementwise operation, in float32 or in integers with their width checked."""
    x, y = tensor.a, raw(other)
    x, y = (y, x) if reflected else (x, y)
    compute = getattr(operator, {"and": "and_", "or": "or_"}.get(name, name))
    with np.errstate(all="ignore"):
        if tensor._a.dtype == np.int32 and name in ("add", "sub", "mul", "lshift"):
            left, right = np.asarray(x, np.int64), np.asarray(y, np.int64)
            wide = compute(left, np.minimum(right, 32) if name == "lshift" else right)
            if name == "lshift":
                # A negative number is a mask: bits that are shifted out are lost (PTX ISA, "shl").
                wide = np.where(left < 0, wide.astype(np.int32), wide)
            if isinstance(other, Int64) or (isinstance(other, Tensor) and other._a.dtype == np.int64):
                return wide
            if wide.size and (wide.max() > 2**31 - 1 or wide.min() < -(2**31)):
                raise IntegerError(f"{tensor.session.here()}: a 32-bit integer overflows; convert to int64 first")
            return wide.astype(np.int32)
        if tensor._a.dtype == np.int32 and name in ("floordiv", "mod"):
            quotient = np.trunc(np.asarray(x, np.float64) / y).astype(np.int32)
            return quotient if name == "floordiv" else np.asarray(x - y * quotient, np.int32)
        if tensor._a.dtype == np.float32 and not isinstance(other, Tensor):
            x, y = (np.float32(x), y) if reflected else (x, np.float32(y))
        return compute(x, y)


def _fused(total: Tensor, other: Any, name: str, reflected: bool) -> Any:
    """x * y + c with one rounding, where one side is a product the compiler contracts; None where none is."""
    if total.session.fusion is False:
        return None
    for side, rest, negated, rest_sign in (
        (total, other, name == "sub" and reflected, -1.0 if name == "sub" and not reflected else 1.0),
        (other, total, name == "sub" and not reflected, -1.0 if name == "sub" and reflected else 1.0),
    ):
        if isinstance(side, Tensor) and side.product is not None:
            x, y = (np.asarray(raw(v), np.float64) for v in side.product)
            exact = (-x if negated else x) * y + rest_sign * np.asarray(raw(rest), np.float64)
            return exact.astype(np.float32)
    return None


_PIPE = {"add": "fma", "sub": "fma", "mul": "fma", "truediv": "div"}


def _operator(name: str, reflected: bool) -> Callable[[Tensor, Any], Any]:
    def forward(self: Tensor, other: Any) -> Any:
        if isinstance(other, Pointer):
            return NotImplemented
        layout = joint_layout(self.session, self, other)
        floating = self._a.dtype == np.float32
        if floating and name in ("add", "sub"):
            with np.errstate(all="ignore"):
                fused = _fused(self, other, name, reflected)
            if fused is not None:
                return self.like(fused, layout)
        out = self.like(_arithmetic(self, other, name, reflected), layout)
        if floating:
            out.charge(_PIPE.get(name, "alu"), out._a.size, self, other)
        elif not (self.both and name in ("ne", "eq") and type(other) is int and other == 0):
            out.computed("alu", self, other, moved=name in ("add", "sub"))
            out.both = name == "and"
        if (self.far is not None or far_of(other) is not None) and (out.bits or out._a.dtype.kind == "b"):
            wide = out.bits != 32
            out.far = combined(name, other, self, wide) if reflected else combined(name, self, other, wide)
        if floating and name == "mul" and self.session.fusion:
            out.product = (self, other)
        return out

    return forward


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift"):
    setattr(Tensor, f"__{_name}__", _operator(_name, False))
    setattr(Tensor, f"__r{_name}__", _operator(_name, True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Tensor, f"__{_name}__", _operator(_name, False))


class Pointer:
    """Addresses of elements of a tensor in global memory."""

    def __init__(self, memory: Any, offset: Any) -> None:
        self.memory, self.offset = memory, offset
        self.dtype = types.SimpleNamespace(element_ty=dtypes.of(memory.flat))

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.memory, self.offset + near(other))

    __radd__ = __add__

    def __getitem__(self, key: Any) -> Pointer:
        return Pointer(self.memory, self.offset[key])

    def __getattr__(self, name: str) -> Any:
        """pointers.store(value) and pointers.atomic_add(value): functions of the language, where the pointers know whose."""
        if name.startswith("__") or not isinstance(self.offset, Tensor):
            raise AttributeError(name)
        function = self.offset.session.methods.get(f"pointer.{name}")
        if function is None:
            raise UnsupportedError(f"{self.offset.session.here()}: the emulator does not know pointer.{name}")
        return functools.partial(function, self)


def reduced(session: Session, x: Tensor, axis: int | None, compute: Any, pipe: str) -> Any:
    """A reduction over one axis; a scalar when no other is left."""
    axis = 0 if axis is None and x._a.ndim == 1 else axis
    if axis is None:
        raise UnsupportedError("a reduction needs an axis here")
    with np.errstate(all="ignore"):
        values = compute(x.a, axis=int(axis))
    made = session.charge(pipe, x._a.size, x._a.shape, x.layout, (x.made,), int(axis))
    # A sum has as many elements as the axis; what else is reduced is one of them.
    far = summed(x, x._a.shape[int(axis)], x.bits == 64) if compute is np.sum else x.far
    if x._a.ndim == 1:
        return Int(values).sampled(far) if x._a.dtype.kind in "iub" else Float(values)
    layout = SliceLayout(int(axis), x.layout) if x.layout else None
    out = Tensor(session, values.astype(x._a.dtype), layout).sampled(far)
    out.made = made
    return out
