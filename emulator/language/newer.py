"""Functions of gluon.language that Triton has since 3.7 or that few kernels call: sums along, bits, FP4, dependent launches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilecast.emulator.errors import LayoutError, WrongResultError
from tilecast.emulator.hardware.clocks import LAUNCH_BEFORE, Knowledge
from tilecast.emulator.language import hostside
from tilecast.emulator.session import Session
from tilecast.emulator.values import dtypes
from tilecast.emulator.values.scalars import Int
from tilecast.emulator.values.tensors import Tensor, raw, reduced

#: e2m1, by its four bits.
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


@dataclass(frozen=True)
class FractionalEvictionPolicy:
    """What stays in L2: for the compiler and the caches, which are not emulated."""

    primary: Any = None
    fraction: Any = 1.0
    secondary: Any = None


@dataclass(frozen=True)
class CachePolicy:
    """How a load or a store is cached: nothing here."""

    cache_modifier: Any = None
    l1: Any = None
    l2: Any = None
    l2_prefetch_size: Any = None


def _along(compute: Any) -> Callable[..., Tensor]:
    """cumsum and cumprod."""

    def call(session: Session, x: Tensor, axis: Any = 0, reverse: Any = False, dtype: Any = None) -> Tensor:
        values = x.a if dtype is None else dtypes.cast(x.a, dtype)
        where = int(axis)
        values = np.flip(values, where) if reverse else values
        with np.errstate(all="ignore"):
            out = compute.accumulate(values, axis=where, dtype=values.dtype)
        made = Tensor(session, np.ascontiguousarray(np.flip(out, where) if reverse else out), x.layout)
        made.charge("fma", made.a.size, x)
        return made

    return call


def xor_sum(session: Session, x: Tensor, axis: Any = None, **_more: Any) -> Any:
    """Bits that are set an odd number of times, along an axis."""
    return reduced(session, x, axis, np.bitwise_xor.reduce, "combine")


def reduce_or(session: Session, x: Tensor, axis: Any, **_more: Any) -> Any:
    """Bits that are set somewhere along an axis."""
    return reduced(session, x, axis, np.bitwise_or.reduce, "alu")


def umulhi(session: Session, a: Any, b: Any) -> Any:
    """The upper half of the product of two unsigned numbers of 32 bits."""
    wide = np.asarray(raw(a)).astype(np.uint32).astype(np.uint64) * np.asarray(raw(b)).astype(np.uint32).astype(
        np.uint64
    )
    high = (wide >> np.uint64(32)).astype(np.uint32).view(np.int32)
    tensor = next((x for x in (a, b) if isinstance(x, Tensor)), None)
    return Int(int(high)) if tensor is None else Tensor(session, high.astype(tensor.a.dtype), tensor.layout)


def fp4_to_fp(session: Session, src: Tensor, elem_type: Any, axis: Any) -> Tensor:
    """Two e2m1 of each byte, the lower four bits first, side by side along an axis."""
    if src.a.dtype.itemsize != 1 or src.a.dtype.kind not in "iu":
        raise LayoutError(f"{session.here()}: fp4_to_fp takes bytes, got {src.dtype}")
    where, bits = int(axis), src.a.view(np.uint8)
    pair = np.stack([_E2M1[bits & 15], _E2M1[bits >> 4]], where + 1 if where >= 0 else src.a.ndim + where + 1)
    shape = list(src.a.shape)
    shape[where] *= 2
    # In which threads the pairs lie is not followed.
    out = Tensor(session, dtypes.cast(pair.reshape(shape), elem_type))
    out.charge("alu", out.a.size, src)
    return out


def aggregate_replace(instance: Any, **changes: Any) -> Any:
    """A copy of an aggregate with other values in some fields."""
    names = list(type(instance).__annotations__)
    unknown = [name for name in changes if name not in names]
    if unknown:
        raise TypeError(f"{type(instance).__name__} has no field '{unknown[0]}'")
    made = object.__new__(type(instance))
    made.__dict__.update({name: changes.get(name, getattr(instance, name)) for name in names})
    return made


def expect_zero(session: Session, x: Tensor, mask: Any) -> Tensor:
    """The values; WrongResultError where one is not 0 that should have underflowed."""
    if np.any((x.a != 0) & np.asarray(raw(mask))):
        raise WrongResultError(f"{session.here()}: expect_zero, and a value under the mask is not 0")
    return x


def gdc_wait(session: Session) -> None:
    """Until the launch before has ended: what it has stored may be read, and overwritten."""
    for agent in hostside.running(session).role().agents:
        agent.knowledge.learn({LAUNCH_BEFORE: Knowledge()})


def gdc_launch_dependents(session: Session) -> None:
    """The next launch may begin: each one is checked as if it had begun at once."""
    hostside.running(session).step()


def dependent_launches(session: Session) -> dict[str, Any]:
    """By name in triton.language.extra.cuda."""
    return {fn.__name__: functools.partial(fn, session) for fn in (gdc_wait, gdc_launch_dependents)}


def names(session: Session) -> dict[str, Any]:
    """By name in gluon.language."""
    functions = (expect_zero, xor_sum, reduce_or, umulhi, fp4_to_fp)
    return {
        **{fn.__name__: functools.partial(fn, session) for fn in functions},
        "cumsum": functools.partial(_along(np.add), session),
        "cumprod": functools.partial(_along(np.multiply), session),
        "aggregate_replace": aggregate_replace,
        "CachePolicy": CachePolicy,
    }


#: Beside them in gluon.language.nvidia's modules.
CACHING = {"CachePolicy": CachePolicy, "FractionalEvictionPolicy": FractionalEvictionPolicy}
