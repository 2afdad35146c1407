"""Tensors in global memory as a launch and its kernel see them: torch-like over numpy, torch's own, tensor descriptors."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from tilecast.emulator.errors import BoundsError, LayoutError, RaceError, UnsupportedError
from tilecast.emulator.hardware.clocks import LAUNCH_BEFORE, Knowledge
from tilecast.emulator.language import changes
from tilecast.emulator.session import Session
from tilecast.emulator.values import dtypes
from tilecast.emulator.values.outside import numpy_of
from tilecast.emulator.values.scalars import Int, Int64

_TORCH = {
    dtypes.FP16: "torch.float16", dtypes.BF16: "torch.bfloat16", dtypes.FP32: "torch.float32", dtypes.INT32: "torch.int32", dtypes.INT64: "torch.int64",
    dtypes.FP8E4: "torch.float8_e4m3fn", dtypes.FP8E5: "torch.float8_e5m2", dtypes.FP64: "torch.float64",
    dtypes.UINT8: "torch.uint8",
}  # fmt: skip


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
        self.flat = _flat(data, last + 1) if data.size else data.reshape(-1)
        #: Program (from 1), event code and line of the last store to each element.
        self.program = np.zeros(self.flat.size, np.int32)
        self.code = np.zeros(self.flat.size, np.int64)
        self.line = np.zeros(self.flat.size, np.int32)
        #: The same of the last reduction; None where there is none.
        self.adds: changes.Adds | None = None
        self._launch = 0
        #: Whether programs of this launch have stored to it.
        self.changed = False
        #: What the launch before stored, where this one may overlap it; None where it may not.
        self._before: changes.Before | None = None

    def beginning_at(self, first: int) -> Array:
        """The same memory from an element on; BoundsError outside."""
        if not 0 <= first < self.flat.size:
            raise BoundsError(f"a pointer to element {first} of {self.name}, which has {self.flat.size}")
        part = Array.__new__(Array)
        part.data = part.flat = self.flat[first:]
        part.name = f"{self.name} from element {first} on"
        part.program, part.code, part.line = self.program[first:], self.code[first:], self.line[first:]
        part._launch, part.changed = self._launch, self.changed
        part.adds = None if self.adds is None else self.adds.beginning_at(first)
        part._before = None if self._before is None else self._before.beginning_at(first)
        return part

    def enter(self, launch: int, overlaps: bool = False) -> None:
        """What an earlier launch stored is ordered before this one's accesses, unless this one ``overlaps`` the last."""
        if launch != self._launch:
            overlaps = overlaps and launch == self._launch + 1
            stored = self.program if self.adds is None else self.program | self.adds.program
            self._before = changes.Before(stored, self.adds, self.code) if overlaps else None
            self._launch = launch
            self.program[:] = 0
            self.adds, self.changed = None, False

    def by_launch_before(
        self, session: Session, places: Any, known: Knowledge, line: int, what: str, engine: bool = False
    ) -> None:
        """RaceError where the launch before, which may still run, has stored to a place, and neither a wait nor an atomic tells of it."""
        self.enter(session.launches, session.overlaps)
        if self._before is None or LAUNCH_BEFORE in known.others:
            return
        stored = np.asarray(places).reshape(-1)
        stored = stored[self._before.program[stored] != 0]
        if not stored.size:
            return
        early = stored[~changes.told(self._before, stored, known)]
        if not early.size and engine:
            early, missing = (
                changes.unfenced(self._before, stored, known),
                "fence.proxy.async is missing behind the acquire that tells of it",
            )
        else:
            missing = "gdc_wait() is missing between"
        if early.size:
            raise RaceError(
                f"race on element {int(early[0])} of {self.name}: {what} at {session.source.quote(line)}; the launch before, which may "
                f"still run (launch_pdl), stores to it at {session.source.quote(int(self.line[early[0]]))}: {missing}"
            )

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

    #: What host code asks before it asks for the device's properties.
    is_cuda = True

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

    def element_size(self) -> int:
        """Bytes of an element."""
        return int(self.data.itemsize)

    def t(self) -> Array:
        """A matrix with its dimensions exchanged, in the same memory."""
        turned = copy.copy(self)
        turned.data = self.data.T
        return turned

    def new_empty(self, shape: Sequence[int], dtype: Any = None) -> Array:
        """Memory without values."""
        wanted = self.dtype if dtype is None else str(dtype)
        found = next((d for d, name in _TORCH.items() if name == wanted), None)
        if found is None:
            raise UnsupportedError(f"new_empty of {dtype}: use {', '.join(_TORCH.values())}")
        fill = 0x7FFFFFFF if found is dtypes.INT32 else np.nan
        return Array(np.full(shape, fill, found.numpy), "new_empty")

    def __neg__(self) -> Array:
        return Array(-self.data, self.name)


_DEVICE = Device()


def _flat(data: Any, size: int) -> Any:
    """The memory from the first element of ``data`` on; as integers, for numpy cannot stride over types that are not its own."""
    bits = data.view(changes.bits_of(data))
    return np.lib.stride_tricks.as_strided(bits, (size,), (data.itemsize,)).view(data.dtype)


def array_of(session: Session, value: Any) -> Array:
    """The Array over a numpy or torch tensor's own memory, one for each tensor of a session."""
    if isinstance(value, Array):
        return value
    data = numpy_of(value)
    key = (data.__array_interface__["data"][0], data.dtype.str, data.shape, data.strides)
    if key not in session.arrays:
        dtypes.of(data)
        session.arrays[key] = Array(data, session.names.get(id(value), f"a tensor of {list(data.shape)}"))
    found: Array = session.arrays[key]
    return found


@dataclass(frozen=True)
class BlockType:
    """What a kernel asks of a descriptor's box."""

    shape: list[Int]
    nbytes: int
    element_ty: dtypes.Dtype


@dataclass(init=False, eq=False, repr=False)
class Box:
    """What tensor maps have in common: ``base``, its extents, and boxes of ``block_shape``."""

    base: Any
    shape: list[Any]
    strides: list[Any]
    block_shape: list[int]
    layout: Any
    padding: str
    #: Whether the copy engine rounds float32 to the 10 bits of fraction that tf32 has.
    round_f32_to_tf32: bool

    #: Whose arrays hold the tensors; set for each session.
    session: ClassVar[Session | None] = None

    def __init__(
        self, base: Any, shape: Sequence[int], strides: Sequence[int], block_shape: Sequence[Any], layout: Any = None,
        padding: str = "zero", round_f32_to_tf32: bool = False,
    ) -> None:  # fmt: skip
        self.base = base
        self.shape, self.strides = [Int(n) for n in shape], [Int64(n) for n in strides]
        self.block_shape, self.layout = [int(n) for n in block_shape], layout
        self.padding, self.round_f32_to_tf32 = padding, bool(round_f32_to_tf32)
        size = self.memory.data.itemsize
        if any(s * size % 16 for s in self.strides[:-1]) or self.strides[-1] != 1:
            raise LayoutError(f"the copy engine needs a unit last stride and strides of 16 bytes, got {self.strides}")

    @property
    def memory(self) -> Array:
        """The tensor in global memory."""
        if isinstance(self.base, Array) or self.session is None:
            found: Array = self.base
            return found
        return array_of(self.session, self.base)

    @property
    def fill(self) -> float:
        """What a box has outside the tensor."""
        return float("nan") if self.padding == "nan" else 0

    @staticmethod
    def strides_of(tensor: Any) -> Any:
        """Strides of a torch or numpy tensor in elements."""
        return tensor.stride() if hasattr(tensor, "stride") else [s // tensor.itemsize for s in tensor.strides]

    @property
    def rank(self) -> int:
        """Dimensions."""
        return len(self.shape)

    @property
    def dtype(self) -> dtypes.Dtype:
        """Element type."""
        return dtypes.of(self.memory.data)

    @property
    def block_type(self) -> BlockType:
        """Extents and size of a box."""
        shape = [Int(n) for n in self.block_shape]
        return BlockType(shape, Int(math.prod(self.block_shape) * self.memory.data.itemsize), self.dtype)

    @property
    def type(self) -> Any:
        """What kernels ask of a type is here."""
        return self

    @property
    def nbytes_per_cta(self) -> int:
        """Bytes of the part of a box that lands in one CTA."""
        return Int(self.block_type.nbytes // self.layout.parts())

    def _elements(self, places: Any) -> Any:
        """Values at places of the memory, as the copy engine delivers them."""
        found = self.memory.flat[places]
        if not self.round_f32_to_tf32:
            return found
        # Round to nearest, ties away, as cvt.rna.tf32.
        return ((found.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)


class TensorDescriptor(Box):
    """A tensor map: boxes of ``block_shape`` out of ``base``."""

    @classmethod
    def from_tensor(
        cls, tensor: Any, block_shape: Sequence[Any], layout: Any = None, padding: str = "zero",
        round_f32_to_tf32: bool = False,
    ) -> TensorDescriptor:  # fmt: skip
        """The tensor map of a whole tensor."""
        return cls(tensor, tensor.shape, cls.strides_of(tensor), block_shape, layout, padding, round_f32_to_tf32)

    def _inside(self, corner: Sequence[int], extents: Sequence[int]) -> tuple[Any, Any] | None:
        """(index of the part of a box that lies in the tensor, places of its elements in memory); None without any."""
        low = [max(int(c), 0) for c in corner]
        high = [min(int(c) + n, int(s)) for c, n, s in zip(corner, extents, self.shape, strict=True)]
        if not all(a < b for a, b in zip(low, high, strict=True)):
            return None
        inside = tuple(slice(a - c, b - c) for a, b, c in zip(low, high, corner, strict=True))
        places: Any = np.zeros((1,) * len(low), np.int64)
        for dim, (a, b, stride) in enumerate(zip(low, high, self.strides, strict=True)):
            steps = np.arange(a, b, dtype=np.int64) * int(stride)
            places = places + steps.reshape([-1 if d == dim else 1 for d in range(len(low))])
        if places.max() >= self.memory.flat.size:
            raise BoundsError(
                f"a tensor descriptor of {list(self.shape)} with strides {list(self.strides)} reaches element "
                f"{int(places.max())} of {self.memory.name}, which has {self.memory.flat.size}"
            )
        return inside, places

    def tile(self, corner: Sequence[int]) -> Any:
        """The box at ``corner``; zeros (or what padding says) outside the tensor."""
        block = np.full(self.block_shape, self.fill, self.memory.data.dtype)
        found = self._inside(corner, self.block_shape)
        if found is not None:
            block[found[0]] = self._elements(found[1])
        return block

    def loaded(self, corner: Sequence[int], program: changes.Storing, known: Knowledge, line: int) -> None:
        """RaceError where a copy reads a box that another role or program stores to, and nothing orders the two."""
        changed = program.session.overlaps or self.memory.changed
        found = self._inside(corner, self.block_shape) if changed and len(corner) == len(self.block_shape) else None
        if found is not None:
            places = np.asarray(found[1]).reshape(-1)
            changes.ordered(
                program, self.memory, places, known, line, "a copy", np.ones(places.shape, bool), engine=True
            )

    def rows(self, numbers: Sequence[int], column: int) -> Any:
        """[numbers, columns of a box]: one box of one row for each number; zeros outside the tensor."""
        return np.concatenate([self.tile([int(number), int(column)]) for number in numbers])

    def reduce(
        self, corner: Sequence[int], block: Any, compute: Any, program: changes.Storing, code: int, known: Knowledge, line: int
    ) -> None:  # fmt: skip
        """Combine a box with what is there by the ufunc ``compute``; what lies outside the tensor is dropped."""
        found = self._inside(corner, block.shape)
        if found is not None:
            changes.reduce(
                program, self.memory, found[1].reshape(-1), block[found[0]].reshape(-1), compute, code, known, line
            )

    def put(
        self, corner: Sequence[int], block: Any, program: changes.Storing, code: int, known: Knowledge, line: int
    ) -> None:
        """Store a box; what lies outside the tensor is dropped."""
        found = self._inside(corner, block.shape)
        if found is not None:
            changes.put(
                program, self.memory, found[1].reshape(-1), block[found[0]].reshape(-1), code, known, line, engine=True
            )
