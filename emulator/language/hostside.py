"""What a kernel's ``launch`` sees: torch-like tensors over numpy memory, tensor descriptors, and the launch itself."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilecast.emulator.errors import BoundsError, LayoutError, RaceError, UnsupportedError
from tilecast.emulator.hardware.program import Program
from tilecast.emulator.session import Session
from tilecast.emulator.values import dtypes
from tilecast.emulator.values.tensors import Float, Int, Pointer, Tensor

_TORCH = {dtypes.FP16: "torch.float16", dtypes.BF16: "torch.bfloat16", dtypes.FP32: "torch.float32"}


class Device:
    """Where tensors say they are."""

    index, type = 0, "cuda"

    def __repr__(self) -> str:
        return "emulated"


class Array:
    """A torch-like tensor over numpy data; ``flat`` is its memory, which stores go to."""

    def __init__(self, data: Any, name: str) -> None:
        self.data, self.name = data, name
        last = sum((n - 1) * s for n, s in zip(data.shape, data.strides, strict=True)) // data.itemsize
        self.flat = (
            np.lib.stride_tricks.as_strided(data, (last + 1,), (data.itemsize,)) if data.size else data.reshape(-1)
        )
        #: Program (from 1), event code and line of the last store to each element.
        self.program = np.zeros(self.flat.size, np.int32)
        self.code = np.zeros(self.flat.size, np.int64)
        self.line = np.zeros(self.flat.size, np.int32)

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents."""
        return tuple(self.data.shape)

    @property
    def dtype(self) -> str:
        """As torch prints it."""
        return _TORCH[dtypes.of(self.data)]

    @property
    def device(self) -> Device:
        """One device for all."""
        return _DEVICE

    def data_ptr(self) -> int:
        """An address, aligned as a CUDA allocation is."""
        return 4096

    def stride(self, axis: int | None = None) -> Any:
        """Strides in elements; of an empty tensor torch's, where numpy has zeros."""
        strides = tuple(s // self.data.itemsize for s in self.data.strides)
        if not self.data.size:
            strides = tuple(math.prod(max(n, 1) for n in self.shape[i + 1 :]) for i in range(self.data.ndim))
        return strides if axis is None else strides[axis]

    def size(self, axis: int | None = None) -> Any:
        """Extents."""
        return self.shape if axis is None else self.shape[axis]

    def is_contiguous(self) -> bool:
        """Whether the strides are those of a dense tensor."""
        return bool(self.data.flags.c_contiguous)

    def numel(self) -> int:
        """Elements."""
        return int(self.data.size)

    def zero_(self) -> None:
        """Fill with zeros."""
        self.data[...] = 0

    def fill_(self, value: float) -> None:
        """Fill with a value."""
        self.data[...] = value

    def new_empty(self, shape: Sequence[int], dtype: Any) -> Array:
        """Memory without values."""
        found = next((d for d, name in _TORCH.items() if name == str(dtype)), None)
        if found is None:
            raise UnsupportedError(f"new_empty of {dtype}: use float16, bfloat16 or float32")
        return Array(np.full(shape, np.nan, found.numpy), "new_empty")

    def __neg__(self) -> Array:
        return Array(-self.data, self.name)


_DEVICE = Device()


@dataclass(frozen=True)
class BlockType:
    """What a kernel asks of a descriptor's box."""

    shape: list[Int]
    nbytes: int


class TensorDescriptor:
    """A tensor map: boxes of ``block_shape`` out of ``base``."""

    def __init__(
        self, base: Array, shape: Sequence[int], strides: Sequence[int], block_shape: Sequence[Any], layout: Any
    ) -> None:
        self.base, self.shape, self.strides = base, list(shape), list(strides)
        self.block_shape, self.layout = [int(n) for n in block_shape], layout
        if any(n > 256 for n in self.block_shape):
            raise BoundsError(f"a tensor descriptor's box has at most 256 elements a side, got {self.block_shape}")
        if any(s * base.data.itemsize % 16 for s in self.strides[:-1]) or self.strides[-1] != 1:
            raise LayoutError(f"the copy engine needs a unit last stride and strides of 16 bytes, got {self.strides}")

    @staticmethod
    def from_tensor(base: Array, block_shape: Sequence[Any], layout: Any) -> TensorDescriptor:
        """The tensor map of a whole tensor."""
        return TensorDescriptor(base, base.shape, base.stride(), block_shape, layout)

    @property
    def dtype(self) -> dtypes.Dtype:
        """Element type."""
        return dtypes.of(self.base.data)

    @property
    def block_type(self) -> BlockType:
        """Extents and size of a box."""
        return BlockType([Int(n) for n in self.block_shape], math.prod(self.block_shape) * self.base.data.itemsize)

    @property
    def nbytes_per_cta(self) -> int:
        """Bytes of the part of a box that lands in one CTA."""
        return self.block_type.nbytes // (2 if self.layout.cga else 1)

    def tile(self, corner: Sequence[int]) -> Any:
        """The box at ``corner``; zeros outside the tensor."""
        block = np.zeros(self.block_shape, self.base.data.dtype)
        low = [max(c, 0) for c in corner]
        high = [min(c + n, s) for c, n, s in zip(corner, self.block_shape, self.shape, strict=True)]
        if all(a < b for a, b in zip(low, high, strict=True)):
            inside = tuple(slice(a - c, b - c) for a, b, c in zip(low, high, corner, strict=True))
            block[inside] = self.base.data[tuple(slice(a, b) for a, b in zip(low, high, strict=True))]
        return block


def _wanted(program: Program, pointer: Pointer, mask: Any, what: str) -> tuple[Any, Any]:
    """(offsets, which of them): broadcast and inside the tensor; BoundsError otherwise."""
    offsets = np.asarray(pointer.offset.a if isinstance(pointer.offset, Tensor) else int(pointer.offset))
    asked = np.asarray(True if mask is None else mask.a if isinstance(mask, Tensor) else mask)
    asked = np.broadcast_to(asked, offsets.shape)
    picked = offsets[asked]
    if picked.size and (picked.min() < 0 or picked.max() >= pointer.memory.flat.size):
        raise BoundsError(
            f"{program.here()}: a {what} outside {pointer.memory.name}: element {int(picked.max() if picked.max() >= pointer.memory.flat.size else picked.min())} "
            f"of {pointer.memory.flat.size}"
        )
    return offsets, asked


def _halves(program: Program, shape: Sequence[int]) -> list[tuple[int, Any]]:
    """Rows of each CTA of a pair, as masks of ``shape``."""
    if program.ctas == 1 or not shape:
        return [(0, np.ones(shape, bool))]
    first = np.arange(shape[0]) < shape[0] // 2
    out = []
    for cta, rows in ((0, first), (1, ~first)):
        out.append((cta, np.broadcast_to(rows.reshape([-1] + [1] * (len(shape) - 1)), shape)))
    return out


def _ordered(program: Program, memory: Array, places: Any, known: Any, line: int, what: str, differs: Any) -> None:
    """RaceError when an earlier store by somebody else is not known."""
    stored = memory.program[places] > 0
    for place in np.flatnonzero(stored & differs):
        at = places[place]
        same = memory.program[at] == program.number + 1
        if same and known.has(int(memory.code[at])):
            continue
        who = "this program" if same else f"program {int(memory.program[at]) - 1}"
        raise RaceError(
            f"race on element {int(at)} of {memory.name}: {what} at {program.session.source.quote(line)}; "
            f"{who} has stored to it at {program.session.source.quote(int(memory.line[at]))}, and nothing orders the two"
        )


def store(session: Session, pointer: Pointer, value: Any, mask: Any = None) -> None:
    """gl.store: checks bounds and that no other unordered store goes to the same element."""
    program = running(session)
    offsets, asked = _wanted(program, pointer, mask, "store")
    memory, line = pointer.memory, program.line()
    program.charge("global", int(asked.sum()) * memory.flat.itemsize)
    values = np.broadcast_to(value.a if isinstance(value, Tensor) else value, offsets.shape)
    if isinstance(value, Tensor) and value.dtype is not dtypes.of(memory.flat):
        raise UnsupportedError(f"{program.here()}: a store of {value.dtype} to {memory.name}: convert it first")
    for cta, half in _halves(program, offsets.shape):
        wanted = asked & half
        places, new = offsets[wanted], values[wanted]
        agent = program.role().agents[cta]
        differs = memory.flat[places].view(_bits_of(new)) != np.ascontiguousarray(new).view(_bits_of(new))
        _ordered(program, memory, places, agent.knowledge, line, "a store", differs)
        memory.flat[places] = new
        memory.program[places], memory.code[places], memory.line[places] = program.number + 1, agent.code, line


def _bits_of(values: Any) -> Any:
    return {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[values.dtype.itemsize]


def load(session: Session, pointer: Pointer, mask: Any = None, other: Any = 0) -> Tensor:
    """gl.load: checks bounds and that stores of this program are ordered before."""
    program = running(session)
    offsets, asked = _wanted(program, pointer, mask, "load")
    memory = pointer.memory
    program.charge("global", int(asked.sum()) * memory.flat.itemsize, True)
    for cta, half in _halves(program, offsets.shape):
        places = offsets[asked & half]
        known = program.role().agents[cta].knowledge
        _ordered(program, memory, places, known, program.line(), "a load", np.ones(places.shape, bool))
    out = np.full(offsets.shape, other, memory.flat.dtype)
    out[asked] = memory.flat[offsets[asked]]
    return Tensor(session, out, pointer.offset.layout if isinstance(pointer.offset, Tensor) else None)


def running(session: Session) -> Program:
    """The running program; UnsupportedError outside a kernel."""
    program = session.program
    if not isinstance(program, Program):
        raise UnsupportedError("a Gluon operation outside a kernel")
    return program


class Jitted:
    """A function of the kernel: called inside it, or launched on a grid."""

    def __init__(self, fn: Callable[..., Any], session: Session) -> None:
        self.fn, self.session, self.name = fn, session, fn.__name__
        self.__doc__ = fn.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """A function in an aggregate is a method of its values."""
        return self if instance is None else functools.partial(self, instance)

    def warmup(self, *_args: Any, grid: tuple[Any, ...], **options: Any) -> Compiled:
        """The kernel with its options, to be launched on any grid."""
        return Compiled(self, options)

    def __getitem__(self, grid: tuple[Any, ...]) -> Callable[..., None]:
        def launch(*args: Any, num_ctas: int = 1, enable_fp_fusion: bool = True, **_options: Any) -> None:
            if num_ctas not in (1, 2):
                raise UnsupportedError(f"{num_ctas} CTAs to a program: 1 or 2 are emulated")
            session = self.session
            session.fusion = bool(enable_fp_fusion)
            given = [_argument(a) for a in args]
            for number in range(int(grid[0])):
                program = session.program = Program(session, number, int(grid[0]), num_ctas)
                session.traces.append(program.run(lambda: self.fn(*given), self.name))
                session.program = None

        return launch


@dataclass(frozen=True)
class Compiled:
    """A kernel and the options that it was compiled with."""

    kernel: Jitted
    options: dict[str, Any]

    def __getitem__(self, grid: tuple[Any, ...]) -> Callable[..., None]:
        return functools.partial(self.kernel[grid], **self.options)


def _argument(value: Any) -> Any:
    if isinstance(value, Array):
        return Pointer(value, Int(0))
    if type(value) is int:
        return Int(value)
    return Float(value) if type(value) is float else value
