"""The functions of gluon.language that any kernel may call and that touch no memory of the chip: shapes, mathematics,
reductions, assertions, atomics of global memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tilecast.emulator.errors import BarrierError, LayoutError, WrongResultError
from tilecast.emulator.far import summed
from tilecast.emulator.hardware.barriers import Barrier
from tilecast.emulator.hardware.memory import Shared
from tilecast.emulator.hardware.program import Program
from tilecast.emulator.hardware.tensor_memory import register_layout
from tilecast.emulator.language import hostside
from tilecast.emulator.session import Session
from tilecast.emulator.values import dtypes
from tilecast.emulator.values.layouts import SliceLayout, TmemRegisterLayout
from tilecast.emulator.values.scalars import Int
from tilecast.emulator.values.tensors import Pointer, Tensor, joint_layout, raw, reduced


class Everyday:
    """Half of `language.Language`."""

    def __init__(self, session: Session) -> None:
        self.session = session

    @property
    def program(self) -> Program:
        """The running program; UnsupportedError outside a kernel."""
        return hostside.running(self.session)

    def barrier_at(self, place: Any, made: bool = False) -> Barrier:
        """The barrier at a place of shared memory; ``made``: one is made where none was (64-bit integers only)."""
        if not isinstance(place, Shared):
            found: Barrier = place
            return found
        program = self.program
        if place.a.size != 1 or place.dtype is not dtypes.INT64:
            raise LayoutError(
                f"{program.here()}: a barrier is one int64, got {place.name}, {place.dtype} {place.shape}"
            )
        cell = int(place.cells.flat[0])
        if made and cell not in program.barriers_at:
            homes = [place.layout.leader(cta) if program.ctas > 1 else 0 for cta in range(program.ctas)]
            # Every CTA that has a copy of the memory has a barrier of its own there.
            alike = program.ctas > 1 and not any(any(step) for step in place.layout.cga)
            number = int(place.cells.flat[0])
            name = f"{place.name} at {number}"
            program.barriers_at[cell] = program.new_barrier(name, list(range(program.ctas)) if alike else homes)
        if cell not in program.barriers_at:
            raise BarrierError(f"{program.here()}: {place.name} is used as a barrier before mbarrier.init")
        program.live.use(cell)
        return program.barriers_at[cell]

    # -- reductions ------------------------------------------------------------------------------------------------------

    def max(self, x: Tensor, axis: Any = None) -> Any:
        """Largest along an axis; NaN does not count, as in Triton."""
        return reduced(
            self.session, x, axis, *((np.fmax.reduce, "max") if x.a.dtype.kind == "f" else (np.max, "combine"))
        )

    def min(self, x: Tensor, axis: Any = None) -> Any:
        """Smallest along an axis."""
        return reduced(
            self.session, x, axis, *((np.fmin.reduce, "max") if x.a.dtype.kind == "f" else (np.min, "combine"))
        )

    def sum(self, x: Tensor, axis: Any = None) -> Any:
        """Sum along an axis."""
        return reduced(self.session, x, axis, np.sum, "combine" if x._a.dtype.kind in "iub" else "sum")

    def reduce(self, x: Any, axis: Any, combine_fn: Any, keep_dims: Any = False) -> Any:
        """Any reduction of a tensor, or of several together, pair by pair in halves along the axis."""
        several = isinstance(x, tuple)
        values, where = (list(x) if several else [x]), int(axis)
        while values[0].a.shape[where] > 1:
            half = values[0].a.shape[where] // 2
            parts = [
                one.like(one.a.take(range(low, low + half), where), one.layout) for low in (0, half) for one in values
            ]
            found = self._combined(combine_fn, parts)
            values = list(found) if several else [found]
        made = tuple(self._reduced(first, one, where) for first, one in zip(x if several else [x], values, strict=True))
        return made if several else made[0]

    def _combined(self, combine_fn: Any, parts: list[Tensor]) -> Any:
        """``combine_fn`` of all elements at once; where it makes vectors of its scalars, along a dimension of their own."""
        try:
            return combine_fn(*parts)
        except LayoutError:
            found = combine_fn(*(part.like(part.a[..., None]) for part in parts))
        shape = parts[0].a.shape
        made = [
            one.like(one.a.reshape(shape), parts[0].layout) for one in (found if isinstance(found, tuple) else (found,))
        ]
        return tuple(made) if isinstance(found, tuple) else made[0]

    def _reduced(self, x: Tensor, last: Tensor, axis: int) -> Any:
        out, far = last.a.take(0, axis), summed(x, x._a.shape[axis], x.bits == 64)
        if not out.ndim:
            return Int(int(out)).sampled(far) if out.dtype.kind in "iu" else float(out)
        return x.like(out, SliceLayout(axis, x.layout) if x.layout else None).sampled(far)

    # -- shapes ----------------------------------------------------------------------------------------------------------

    def expand_dims(self, x: Tensor, axis: Any) -> Tensor:
        """A new dimension of one element."""
        place = int(axis) if int(axis) >= 0 else int(axis) + len(x.shape) + 1
        return x[(slice(None),) * place + (None,)]

    def permute(self, x: Any, order: Any) -> Any:
        """Dimensions in another order."""
        return x.permute(order)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The two elements of the last dimension."""
        return x.split()

    def join(self, a: Tensor, b: Tensor) -> Tensor:
        """Two tensors as the two elements of a new last dimension."""
        layout = joint_layout(self.session, a, b)
        if list(a.shape) != list(b.shape):
            raise LayoutError(f"{self.session.here()}: join of {list(a.shape)} and {list(b.shape)}")
        # In which threads the pairs lie is not followed: it fits everything.
        del layout
        out = a.like(np.stack([a.a, b.a], axis=-1))
        out.made = max(a.made, b.made)
        return out

    def broadcast(self, a: Any, b: Any) -> Any:
        """Both with the extents of both."""
        shape = np.broadcast_shapes(a.a.shape, b.a.shape)
        return tuple(x.like(np.broadcast_to(x.a, shape), x.layout) for x in (a, b))

    def ravel(self, x: Tensor) -> Tensor:
        """One dimension, in row-major order."""
        return x.reshape([x.a.size])

    def full_like(self, x: Tensor, value: Any, **_more: Any) -> Tensor:
        """One value everywhere, otherwise as ``x``."""
        return x.like(np.full(x.a.shape, raw(value), x.a.dtype), x.layout)

    def zeros_like(self, x: Tensor, **_more: Any) -> Tensor:
        """Zeros, otherwise as ``x``."""
        return self.full_like(x, 0)

    def cast(self, x: Any, dtype: dtypes.Dtype, bitcast: bool = False) -> Any:
        """Another type."""
        return x.to(dtype, bitcast) if isinstance(x, Tensor) else x.to(dtype)

    def hint(self, x: Any, *_values: Any) -> Any:
        """multiple_of, max_contiguous, max_constancy: for the compiler only."""
        return x

    def set_auto_layout(self, x: Any, layout: Any) -> Any:
        """The values, or addresses, in threads that are known now."""
        if isinstance(x, Pointer):
            return Pointer(x.memory, self.set_auto_layout(x.offset, layout))
        return x.like(x.a, layout) if isinstance(x, Tensor) else x

    # -- mathematics -----------------------------------------------------------------------------------------------------

    def function(self, pipe: str, of_arrays: Callable[..., Any], own_type: bool = False) -> Callable[..., Any]:
        """An elementwise function of float32, by ``of_arrays`` of numpy; ``pipe`` is charged.  ``own_type``: its results have the
        type that numpy gives them."""

        def call(*args: Any) -> Any:
            if not any(isinstance(a, Tensor) for a in args):
                if own_type:
                    kinds = [np.int32 if isinstance(raw(a), int) else np.float32 for a in args]
                    found = of_arrays(*(np.asarray(raw(a), kind) for a, kind in zip(args, kinds, strict=True)))
                    return Int(int(found)) if found.dtype.kind in "iu" else float(found)
                return float(np.float32(of_arrays(*(np.float32(raw(a)) for a in args))))
            layout = joint_layout(self.session, *args)
            kind = next(a.a.dtype for a in args if isinstance(a, Tensor))
            with np.errstate(all="ignore"):
                values = of_arrays(*(a.a if isinstance(a, Tensor) else np.asarray(raw(a), kind) for a in args))
            made = np.asarray(values)
            out = Tensor(self.session, made if own_type else made.astype(kind, copy=False), layout)
            out.charge(pipe, out.a.size, *args)
            return out

        return call

    def mathematics(self) -> dict[str, Callable[..., Any]]:
        """Elementwise functions by name."""
        erf = np.vectorize(math.erf, otypes=[np.float64])
        special: dict[str, Callable[..., Any]] = {
            "exp": np.exp, "log": np.log, "sqrt": np.sqrt, "sqrt_rn": np.sqrt, "sin": np.sin, "cos": np.cos, "erf": erf,
            "rsqrt": lambda x: 1 / np.sqrt(x),
        }  # fmt: skip
        plain: dict[str, Callable[..., Any]] = {
            "abs": np.abs, "floor": np.floor, "ceil": np.ceil, "add": np.add, "sub": np.subtract, "mul": np.multiply,
            "fma": lambda x, y, z: np.float64(x) * np.float64(y) + np.float64(z),
            "clamp": lambda x, low, high: np.fmin(np.fmax(x, low), high),
        }  # fmt: skip
        return {
            **{name: self.function("mufu", fn) for name, fn in special.items()},
            **{name: self.function("fma", fn) for name, fn in plain.items()},
            **{name: self.function("div", np.divide) for name in ("fdiv", "div_rn")},
            "sigmoid": self.function("mufu", lambda x: 1 / (1 + np.exp(-np.float64(x)))),
        }

    # -- assertions and prints -------------------------------------------------------------------------------------------

    def static_assert(self, condition: Any, message: Any = "") -> None:
        """What the compiler checks; LayoutError where it does not hold."""
        if not condition:
            raise LayoutError(f"{self.session.here()}: a static assertion fails{f': {message}' if message else ''}")

    def device_assert(self, condition: Any, message: Any = "", mask: Any = None) -> None:
        """What the kernel checks of its values; WrongResultError where it does not hold."""
        if not np.all(raw(condition) if mask is None else raw(condition) | ~np.asarray(raw(mask))):
            raise WrongResultError(f"{self.session.here()}: an assertion fails{f': {message}' if message else ''}")

    def no_print(self, *_values: Any, **_options: Any) -> None:
        """static_print and device_print: nothing is shown."""

    # -- program ---------------------------------------------------------------------------------------------------------

    def num_warps(self) -> Int:
        """Warps of the role that asks."""
        return Int(self.program.warps())

    def num_ctas(self) -> Int:
        """CTAs of a program."""
        return Int(self.program.ctas)

    def get_tmem_reg_layout(
        self, element_ty: Any, shape: Any, layout: Any, num_warps: Any, instr_variant: str = "32x32b", cga_layout: Any = None
    ) -> Any:  # fmt: skip
        """Layout to load tensor memory with."""
        return register_layout(self.session, shape, layout, num_warps, instr_variant)

    def get_tmem_32x32b_reg_layout(
        self, *rest: Any, shape: Any = None, num_warps: Any = None, **_blocks: Any
    ) -> TmemRegisterLayout:
        """The same, as earlier releases call it: (M, N, shape, num_warps)."""
        if shape is None:
            shape = rest[2]
        warps = rest[3] if num_warps is None else num_warps
        return TmemRegisterLayout(tuple(int(n) for n in shape), int(warps))
