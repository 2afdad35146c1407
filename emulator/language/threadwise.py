"""inline_asm and to_linear_layout: what a thread holds in its registers, by the layout's bases."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilecast.emulator.errors import LayoutError, UnsupportedError
from tilecast.emulator.language import hostside, ptx
from tilecast.emulator.session import Session
from tilecast.emulator.values.dtypes import Dtype
from tilecast.emulator.values.layouts import DistributedLinearLayout
from tilecast.emulator.values.registers import linear_of, places_of
from tilecast.emulator.values.scalars import Float, Int
from tilecast.emulator.values.tensors import Tensor, raw

_BITS = 32


@dataclass(frozen=True)
class DistributedType:
    """gl.distributed_type: elements, extents and threads of a register tensor."""

    element_ty: Any
    shape: Any
    layout: Any


def to_linear_layout(session: Session, layout: Any, shape: Any) -> DistributedLinearLayout:
    """A register layout by the bases of its registers, lanes and warps; UnsupportedError for those that are not followed."""
    extents = tuple(int(n) for n in shape)
    found = linear_of(layout, extents)
    if found is None:
        raise UnsupportedError(f"{session.here()}: to_linear_layout of {layout!r} is not emulated")
    return found


def inline_asm(
    session: Session, asm: Any, constraints: Any = "", args: Sequence[Any] = (), result_types: Any = (), is_pure: Any = False
) -> Any:  # fmt: skip
    """One block of PTX in each thread, on all its registers of every tensor; ``asm``: a text, or what makes one of the names of
    the operands, results first.

    Takes 32-bit numbers.  LayoutError where threads that hold the same element, or the same scalar, leave different results.
    """
    program, here = hostside.running(session), session.here()
    several = isinstance(result_types, (tuple, list))
    kinds = list(result_types) if several else [result_types]
    threads = 32 * program.warps()
    # (places, extents) of results and of what is given; None of scalars.
    given = [_given(session, one, threads) for one in args]
    results = [_result(session, kind, threads) for kind in kinds]
    groups, number = [], 0
    for count in (*(1 if places is None else len(places) for places in results), *(len(rows) for rows in given)):
        groups.append(tuple(f"${number + i}" for i in range(count)))
        number += count
    made = asm(tuple(groups[: len(kinds)]), tuple(groups[len(kinds) :])) if callable(asm) else asm
    if isinstance(constraints, (tuple, list)) and len(constraints) != len(groups):
        raise LayoutError(
            f"{here}: inline_asm needs a constraint for each of {len(groups)} operands, got {len(constraints)}"
        )
    outputs = sum(map(len, groups[: len(kinds)]))
    # A block without operands has threads all the same.
    inputs = [row for rows in given for row in rows] or [np.arange(threads, dtype=np.uint32)]
    try:
        left = ptx.run(str(made), inputs, outputs, program.number, program.role().registers)
    except ptx.UnknownError as error:
        raise UnsupportedError(f"{here}: {error}") from None
    out, at = [], 0
    for kind, places in zip(kinds, results, strict=True):
        count = 1 if places is None else len(places)
        out.append(_put_together(session, kind, places, np.stack(left[at : at + count])))
        at += count
    for pipe, instructions in ptx.instructions(str(made)).items():
        session.charge(pipe, instructions * threads)
    return tuple(out) if several else out[0]


def _given(session: Session, one: Any, threads: int) -> list[Any]:
    """32-bit registers of all threads, one after the other."""
    if isinstance(one, Tensor):
        if one.a.dtype.itemsize != _BITS // 8:
            raise UnsupportedError(f"{session.here()}: inline_asm takes 32-bit numbers here, got {one.dtype}")
        places = _places(session, one.layout, one.a.shape, threads)
        flat = np.ascontiguousarray(one.a).reshape(-1)
        return [flat[row].view(np.uint32) for row in places]
    value = raw(one)
    if not isinstance(value, (int, float, np.integer, np.floating)):
        raise UnsupportedError(
            f"{session.here()}: inline_asm of memory is not emulated: its address would have to be followed"
        )
    floating = isinstance(value, (float, np.floating))
    word = np.array([value], np.float32).view(np.uint32) if floating else np.array([int(value) % 2**_BITS], np.uint32)
    return [np.repeat(word, threads)]


def _places(session: Session, layout: Any, shape: Any, threads: int) -> Any:
    found = linear_of(layout, tuple(int(n) for n in shape))
    if found is None:
        raise UnsupportedError(
            f"{session.here()}: inline_asm needs a layout whose registers are followed, got {layout!r}"
        )
    places = places_of(found)
    if places.shape[1] != threads:
        raise LayoutError(f"{session.here()}: a layout for {places.shape[1] // 32} warps in a role of {threads // 32}")
    return places


def _result(session: Session, kind: Any, threads: int) -> Any:
    element = getattr(kind, "element_ty", kind)
    if not isinstance(element, Dtype) or element.bits != _BITS:
        raise UnsupportedError(f"{session.here()}: inline_asm gives 32-bit numbers here, got {element}")
    return None if element is kind else _places(session, kind.layout, kind.shape, threads)


def _put_together(session: Session, kind: Any, places: Any, words: Any) -> Any:
    if places is None:
        if (words != words.flat[0]).any():
            raise LayoutError(f"{session.here()}: a scalar result of inline_asm differs between threads")
        value = words.reshape(-1)[:1].view(kind.numpy)[0]
        return Int(int(value)) if isinstance(value, np.integer) else Float(value)
    extents = [int(n) for n in kind.shape]
    flat = np.zeros(int(np.prod(extents)), np.uint32)
    flat[places] = words
    if (flat[places] != words).any():
        raise LayoutError(f"{session.here()}: threads that hold the same element leave different results of inline_asm")
    return Tensor(session, flat.view(kind.element_ty.numpy).reshape(extents), kind.layout)


def names(session: Session) -> dict[str, Any]:
    """By name in gluon.language."""
    return {
        **{fn.__name__: functools.partial(fn, session) for fn in (to_linear_layout, inline_asm)},
        "distributed_type": DistributedType,
    }
