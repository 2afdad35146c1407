"""A compiled kernel on its grid as launch.c starts it: where each argument stands among its parameters, and as which bytes.

The order and the types are those of Triton's launchers: a tensor descriptor becomes a CUtensorMap, its extents (int32) and
strides (int64), and two scratch pointers follow all arguments.  What none of our kernels has is left to Triton.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tilecast.kernels.native.library import library, triton_release

#: Kinds of launch.c.
_POINTER, _MAP, _F32, _F64, _I32, _I64 = range(6)
_CHANGING = {"fp32": _F32, "f32": _F32, "fp64": _F64, "i32": _I32, "i64": _I64}
#: How Triton's types look in memory.
_FORMATS = {
    "i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "B", "u8": "B", "u16": "H", "u32": "I", "u64": "Q",
    "fp32": "f", "f32": "f", "fp64": "d",
}  # fmt: skip
_MAP_BYTES, _MAP_ALIGNMENT = 128, 128
#: More clusters of programs and more shared memory need attributes that Triton sets for them.
_MOST_CLUSTER, _MOST_SHARED = 8, 228 * 1024
_TMA_TF32 = 11
_MENDS_SMALL_MAPS = (3, 7)


class _UnknownError(Exception):
    """An argument that is left to Triton."""


@dataclass
class _Parameters:
    """Parameters of a kernel, one behind the other."""

    block: bytearray = field(default_factory=bytearray)
    offsets: list[int] = field(default_factory=list)
    slots: list[tuple[Any, ...]] = field(default_factory=list)

    def add(self, value: bytes, alignment: int) -> int:
        """The next parameter; returns where it stands."""
        self.block.extend(bytes(-len(self.block) % alignment))
        self.offsets.append(len(self.block))
        self.block.extend(value)
        return self.offsets[-1]

    def number(self, kind: str, value: Any) -> int:
        """A number that no call changes."""
        try:
            packed = struct.pack("<" + _FORMATS[kind], value)
        except (KeyError, OverflowError, struct.error):
            raise _UnknownError from None
        return self.add(packed, len(packed))


def prepared(
    kernel: Any, grid: tuple[int, int, int], arguments: Sequence[Any], takes: Mapping[int, int], given: int, slow: Any
) -> Callable[..., None] | None:
    """The launch of a compiled kernel, called with ``given`` values; None where Triton must launch it.

    arguments: all of the kernel, numbers as they stay; ``takes``: place among them -> which value of a call replaces it, a
    tensor for a pointer or a descriptor.  ``slow``: Triton's launch with the same values, for what only it can do or judge.
    """
    native = library()
    if native is None or not _is_plain(kernel, grid):
        return None
    try:
        parameters = _parameters(kernel, arguments, takes)
    except _UnknownError:
        return None
    from triton import knobs
    from triton.runtime import driver

    run, device = kernel.run, driver.active.get_current_device()
    try:
        return native.Launch(  # type: ignore[no-any-return]
            kernel.function, device, device, tuple(grid), *kernel.packed_metadata, run.launch_cooperative_grid,
            run.launch_pdl, bytes(parameters.block), tuple(parameters.offsets), tuple(parameters.slots), given, slow,
            knobs.runtime, "launch_enter_hook", "launch_exit_hook", driver.active.get_current_stream,
        )  # fmt: skip
    except (OSError, TypeError, ValueError):
        return None


def _is_plain(kernel: Any, grid: tuple[int, int, int]) -> bool:
    """Whether a kernel is one that Triton compiled for CUDA, and needs nothing but its parameters."""
    from triton.backends.nvidia.driver import CudaLauncher
    from triton.compiler.compiler import CompiledKernel

    if type(kernel) is not CompiledKernel:
        return False
    run = kernel.run
    if type(run) is not CudaLauncher or run.global_scratch_size or run.profile_scratch_size:
        return False
    _, clusters, shared = kernel.packed_metadata
    # A sanitizer has arguments of its own.
    return (
        not getattr(run, "gsan_enabled", False)
        and clusters <= _MOST_CLUSTER
        and shared <= _MOST_SHARED
        and len(grid) == 3
        and math.prod(grid) > 0
    )


def _parameters(kernel: Any, arguments: Sequence[Any], takes: Mapping[int, int]) -> _Parameters:
    kinds = list(kernel.src.signature.values())
    maps = iter(getattr(kernel.metadata, "tensordesc_meta", None) or ())
    if len(kinds) != len(arguments):
        raise _UnknownError
    made = _Parameters()
    for at, (kind, argument) in enumerate(zip(kinds, arguments, strict=True)):
        if not isinstance(kind, str):
            raise _UnknownError
        if kind == "constexpr":
            continue
        if kind.startswith("tensordesc"):
            _describe(made, argument, next(maps, None), takes.get(at))
        elif kind.startswith("*"):
            if at not in takes:
                raise _UnknownError
            made.slots.append((_POINTER, takes[at], made.add(bytes(8), 8)))
        elif at in takes:
            if kind not in _CHANGING:
                raise _UnknownError
            made.slots.append((_CHANGING[kind], takes[at], made.number(kind, 0)))
        else:
            made.number(kind, argument)
    for _ in ("global scratch", "scratch of a profiler"):
        made.add(bytes(8), 8)
    return made


def _describe(made: _Parameters, descriptor: Any, meta: Any, given: int | None) -> None:
    """A tensor map of a given tensor, its extents and strides."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    if given is None or not meta or meta["fp4_padded"] or meta.get("is_im2col", False):
        raise _UnknownError
    shape, strides, box = descriptor.shape, descriptor.strides, meta["block_size"]
    if not len(shape) == len(strides) == len(box) <= 5 or strides[-1] != 1:
        raise _UnknownError
    element = meta["elem_size"]
    host_type = (
        _TMA_TF32 if getattr(descriptor, "round_f32_to_tf32", False) else TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]]
    )
    made.slots.append((
        _MAP, given, made.add(bytes(_MAP_BYTES), _MAP_ALIGNMENT), host_type, meta["swizzle"],
        int(descriptor.padding == "nan"), triton_release() >= _MENDS_SMALL_MAPS, tuple(shape[::-1]),
        tuple(element * n for n in strides[::-1]), tuple(box[::-1]),
    ))  # fmt: skip
    for extent in shape:
        made.number("i32", extent)
    for stride in strides:
        made.number("i64", stride)
