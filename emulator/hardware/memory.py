"""Shared and tensor memory as kernels see it, on the shadow that remembers who wrote and read each cell.

A cell of shared memory is one row of one slot (a half row where a pair of CTAs divides the columns); a cell of tensor
memory is one 32-bit column of one CTA.
"""

from __future__ import annotations

from typing import Any, Protocol, cast

import numpy as np

from tilecast.emulator.errors import (
    BoundsError,
    LayoutError,
    UnsupportedError,
)
from tilecast.emulator.hardware.barriers import Barrier, BarrierArray, Outside
from tilecast.emulator.hardware.context import Context
from tilecast.emulator.hardware.shadow import Access, Shadow
from tilecast.emulator.values import dtypes, legal
from tilecast.emulator.values.layouts import SharedLayout, TmemRegisterLayout, row_per_lane
from tilecast.emulator.values.tensors import Tensor

_BARRIER_BYTES = 8


class Memories(Context, Protocol):
    """A running program that has memories, an allocator for each and a role that accesses them."""

    smem: Shadow
    tmem: Shadow
    tmem_bytes: Any

    def target(self) -> str:
        """Name that the running statement assigns to."""

    def step(self) -> None:
        """A point where other roles may go first."""

    def charge(self, pipe: str, count: float, chain: bool = False) -> None:
        """Account for work of the running role."""

    def accesses(self) -> list[tuple[int, Access]]:
        """(CTA, the running role's access to its memory)."""

    def new_barrier(self, name: str, shared: bool) -> Barrier:
        """A barrier with a number of its own."""

    def reserve_smem(self, size: int, name: str, lasting: bool = False) -> None:
        """Account for the next cells of shared memory; ``lasting``: barriers, which have no cells and live to the end."""

    def take_columns(self, columns: int, name: str) -> int:
        """The first of so many columns of tensor memory; AllocationError when they run out."""

    def own_cells(self, owners: Any) -> None:
        """CTA of new cells of shared memory."""

    def cta_of_cell(self, cells: Any) -> Any:
        """CTA of cells of shared memory."""

    def warps(self) -> int:
        """Warps of the running role."""

    def fits(self, layout: Any) -> Any:
        """A register layout; LayoutError where it is made for another number of warps than the running role has."""

    def meet(self, certain: bool = True) -> None:
        """The warps of the running role wait for one another here, or (``certain=False``) may, as the compiler decides."""


class Shared:
    """A view of shared memory: values, and the numbers of its cells in the same arrangement."""

    def __init__(self, program: Memories, a: Any, cells: Any, name: str, layout: Any = None) -> None:
        self.program, self.a, self.cells, self.name, self.layout = program, a, cells, name, layout

    @property
    def shape(self) -> list[int]:
        """Extents."""
        return list(self.a.shape)

    @property
    def dtype(self) -> dtypes.Dtype:
        """Element type."""
        return dtypes.of(self.a)

    @property
    def type(self) -> Shared:
        """What kernels ask of a type is here."""
        return self

    def _keep_alive(self) -> None:
        """Where the compiler may not reuse the memory before: here it never does."""

    def _view(self, a: Any, cells: Any) -> Shared:
        return Shared(self.program, a, cells, self.name, self.layout)

    def index(self, i: Any) -> Shared:
        """One slot; outside, one that raises BoundsError when it is used."""
        if not 0 <= int(i) < self.a.shape[0]:
            fault = f"{self.program.here()}: {self.name} has {self.a.shape[0]} slots, index {int(i)}"
            return cast(Shared, Outside(fault))
        return self._view(self.a[int(i)], self.cells[int(i)])

    def slice(self, start: Any, length: Any, dim: int = 0) -> Shared:
        """Part of one dimension; BoundsError outside."""
        first, size, extent = int(start), int(length), self.a.shape[dim]
        if first < 0 or first + size > extent:
            raise BoundsError(f"{self.program.here()}: {self.name} slice {first}..{first + size} of {extent}")
        if self.cells.shape[dim] != extent:
            raise UnsupportedError(f"{self.program.here()}: a slice along the columns of {self.name} is not emulated")
        part = (slice(None),) * dim + (slice(first, first + size),)
        return self._view(self.a[part], self.cells[part])

    def reshape(self, shape: Any) -> Shared:
        """Other extents with the same last dimension."""
        new = [int(n) for n in shape]
        if new[-1] != self.a.shape[-1] or int(np.prod(new)) != self.a.size:
            raise UnsupportedError(
                f"{self.program.here()}: {self.name} of {list(self.a.shape)} as {new}: only reshapes that keep the last dimension"
            )
        return self._view(self.a.reshape(new), self.cells.reshape([*new[:-1], self.cells.shape[-1]]))

    def permute(self, order: Any) -> Shared:
        """Dimensions in another order."""
        places = [int(n) for n in order]
        return self._view(self.a.transpose(places), self.cells.transpose(places))

    def cells_of(self, cta: int) -> Any:
        """Cell numbers that lie in one CTA."""
        flat = self.cells.reshape(-1)
        return flat if self.program.ctas == 1 else flat[self.program.cta_of_cell(flat) == cta]

    def halves(self) -> int | None:
        """Dimension of a matrix that the two CTAs of a pair divide; None where they do not."""
        owners = self.program.cta_of_cell(self.cells)
        if owners[0, 0] != owners[-1, 0]:
            return 0
        return 1 if owners[0, 0] != owners[0, -1] else None

    def load(self, layout: Any = None) -> Tensor:
        """Into registers."""
        program = self.program
        program.step()
        program.fits(layout)
        program.meet(certain=False)
        program.charge("smem", self.a.nbytes if self.a.ndim > 1 else 0, True)
        for access in program.accesses():
            program.smem.read(self.cells_of(access[0]), access[1], self.dtype.bits)
        return Tensor(program.session, self.a.copy(), layout)

    def store(self, value: Tensor) -> None:
        """From registers; a store of what is there already is no race."""
        program = self.program
        if list(value.shape) != self.shape or value.dtype is not self.dtype:
            raise LayoutError(
                f"{program.here()}: a store of {value.dtype} {list(value.shape)} to {self.name}, {self.dtype} {self.shape}"
            )
        program.step()
        program.meet(certain=False)
        program.charge("smem", self.a.nbytes if self.a.ndim > 1 else 0, True)
        changes = self.a.tobytes() != value.a.tobytes()
        for access in program.accesses():
            program.smem.write(self.cells_of(access[0]), access[1], self.dtype.bits, changes)
        self.a[...] = value.a


def allocate_shared(program: Memories, dtype: dtypes.Dtype, shape: Any, layout: Any, shared: bool = False) -> Any:
    """Shared memory or, for int64 with one element to a row, barriers; AllocationError beyond the CTA's share."""
    extents, name = [int(n) for n in shape], program.target()
    if dtype is dtypes.INT64:
        barriers = [
            program.new_barrier(f"{name}[{i}]" if len(extents) > 1 else name, shared) for i in range(extents[0])
        ]
        program.reserve_smem(_BARRIER_BYTES * len(barriers), name, lasting=True)
        return BarrierArray(barriers, program, name) if len(extents) > 1 else barriers[0]
    split = layout.split_dim(len(extents)) if isinstance(layout, SharedLayout) and program.ctas == 2 else None
    _refuse(program, name, legal.wrong_swizzle(layout, extents, dtype))
    a = np.empty(extents, dtype.numpy)
    a.view(np.uint8).fill(0xFF)
    last = len(extents) - 1
    # A row is one cell, or one in each CTA; a vector has one to an element, so that roles may share it out.
    cell_shape = [*extents[:-1], 2 if split == last else 1] if last or split is not None else extents
    program.reserve_smem(a.nbytes // (program.ctas if split is not None else 1), name)
    owner = np.zeros(cell_shape, np.int8)
    if split is not None:
        size = cell_shape[split]
        half = np.arange(size) >= size // 2
        owner += half.reshape([-1 if d == split else 1 for d in range(len(cell_shape))]).astype(np.int8)
    elif program.ctas == 2:
        raise UnsupportedError(f"{program.here()}: {name} is not divided between the CTAs of the pair (cga_layout)")
    count = owner.size
    start = program.smem.grow(count)
    program.smem.call(start, start + count, count // extents[0] if len(extents) > 1 else count, name)
    program.own_cells(owner.reshape(-1))
    return Shared(program, a, np.arange(start, start + count).reshape(cell_shape), name, layout)


def _refuse(program: Context, name: str, complaint: str) -> None:
    if complaint:
        raise LayoutError(f"{program.here()}: {name}: {complaint}")


class TmemBuffers:
    """Several pieces of tensor memory side by side, of one shape."""

    def __init__(self, buffers: list[Tmem], name: str) -> None:
        self._buffers, self.name = buffers, name

    @property
    def shape(self) -> list[int]:
        """Extents."""
        return [len(self._buffers), *self._buffers[0].shape]

    @property
    def dtype(self) -> dtypes.Dtype:
        """Element type."""
        return self._buffers[0].dtype

    def index(self, i: Any) -> Tmem:
        """One of them; outside, one that raises BoundsError when it is used."""
        if 0 <= int(i) < len(self._buffers):
            return self._buffers[int(i)]
        program = self._buffers[0].program
        return cast(Tmem, Outside(f"{program.here()}: {self.name} has {len(self._buffers)} buffers, index {int(i)}"))


class Tmem:
    """Columns of tensor memory seen as one type; views may overlap."""

    def __init__(
        self, program: Memories, byte: int, columns: int, dtype: dtypes.Dtype, name: str, rows: int | None = None,
        layout: Any = None,
    ) -> None:  # fmt: skip
        self.program, self.byte, self.columns, self.dtype, self.name = program, byte, columns, dtype, name
        self.layout = layout
        self.rows = program.tmem_bytes.shape[0] if rows is None else rows

    @property
    def shape(self) -> list[int]:
        """Extents: rows of all CTAs, columns of this type."""
        return [self.rows, self.columns]

    @property
    def type(self) -> Tmem:
        """What kernels ask of a type is here."""
        return self

    def get_reg_layout(self, num_warps: Any = None, instr_variant: str = "32x32b") -> TmemRegisterLayout:
        """A layout that holds a row to a lane."""
        if instr_variant != "32x32b":
            raise UnsupportedError(f"{self.program.here()}: tensor memory in registers as {instr_variant}: only 32x32b")
        return TmemRegisterLayout(tuple(self.shape), int(num_warps or self.program.warps()))

    @property
    def view(self) -> Any:
        """The values, in place."""
        size = self.dtype.bits // 8 * self.columns
        return self.program.tmem_bytes[: self.rows, self.byte : self.byte + size].view(self.dtype.numpy)

    def cells_of(self, cta: int) -> Any:
        """Cell numbers in one CTA."""
        size = self.dtype.bits // 8 * self.columns
        return np.arange(self.byte // 4, (self.byte + size + 3) // 4) + cta * self.program.session.tmem_columns

    def slice(self, start: Any, length: Any, dim: int = 1) -> Tmem:
        """Some of the columns; BoundsError outside."""
        if dim != 1:
            raise UnsupportedError(f"{self.program.here()}: a slice of the rows of tensor memory is not emulated")
        first, size = int(start), int(length)
        if first < 0 or first + size > self.columns:
            raise BoundsError(
                f"{self.program.here()}: {self.name} has {self.columns} columns, slice {first}..{first + size}"
            )
        byte = self.byte + first * self.dtype.bits // 8
        return Tmem(self.program, byte, size, self.dtype, self.name, self.rows, self.layout)

    def reinterpret(self, dtype: dtypes.Dtype, shape: Any, layout: Any) -> Tmem:
        """The same columns as another type; BoundsError where that would need more of them."""
        size = int(shape[1]) * dtype.bits // 8
        if size > self.columns * self.dtype.bits // 8 or int(shape[0]) != self.shape[0]:
            raise BoundsError(
                f"{self.program.here()}: {self.name}, {self.shape} of {self.dtype}, is too small for {[int(n) for n in shape]} of {dtype}"
            )
        wrong = legal.wrong_tensor_memory(layout, self.rows, int(shape[1]), dtype, self.program.ctas)
        _refuse(self.program, self.name, wrong)
        return Tmem(self.program, self.byte, int(shape[1]), dtype, self.name, self.rows, layout)

    _reinterpret = reinterpret

    def _check(self, layout: Any, what: str) -> None:
        wrong = row_per_lane(layout, self.shape) or legal.wrong_rows(layout, self.layout, self.rows)
        self.program.fits(layout)
        if wrong:
            raise LayoutError(f"{self.program.here()}: a {what} of tensor memory {wrong}")

    def load(self, layout: Any = None) -> Tensor:
        """Into registers (tcgen05.ld)."""
        program = self.program
        self._check(layout, "load")
        program.step()
        values = self.view.copy()
        program.charge("tmem_read", values.nbytes)
        for cta, access in program.accesses():
            program.tmem.read(self.cells_of(cta), access, self.dtype.bits)
        return Tensor(program.session, values, layout)

    def load_max(self, layout: Any = None, propagate_nan: Any = None) -> tuple[Tensor, Tensor]:
        """The values and the maximum of every row, which the load unit finds (tcgen05.ld.red)."""
        if not self.program.session.load_reduce:
            raise UnsupportedError(
                f"{self.program.here()}: load_max needs tcgen05.ld.red, which this machine does not have"
            )
        loaded = self.load(layout)
        values = loaded.a
        most = values.max(axis=1) if propagate_nan else np.fmax.reduce(values, axis=1)
        return loaded, Tensor(self.program.session, most)

    def store(self, value: Tensor) -> None:
        """From registers (tcgen05.st)."""
        program = self.program
        if list(value.shape) != self.shape or value.dtype is not self.dtype:
            raise LayoutError(
                f"{program.here()}: a store of {value.dtype} {list(value.shape)} to {self.name}, {self.dtype} {self.shape}"
            )
        self._check(value.layout, "store")
        program.step()
        program.charge("tmem_write", value.a.nbytes)
        for cta, access in program.accesses():
            program.tmem.write(self.cells_of(cta), access, self.dtype.bits)
        self.view[...] = value.a
        # The wait for the store is followed by a barrier of the role, in Triton 3.6 always.
        program.meet(certain=False)


def allocate_tensor(program: Memories, dtype: dtypes.Dtype, shape: Any, layout: Any, value: Any = None) -> Any:
    """Columns for ``shape``, [rows, columns] or [buffers, rows, columns]; AllocationError beyond what the chip has."""
    extents = [int(n) for n in shape]
    if len(extents) == 3:
        if value is not None:
            raise UnsupportedError(f"{program.here()}: several buffers of tensor memory: allocate, then store")
        buffers = [allocate_tensor(program, dtype, extents[1:], layout) for _ in range(extents[0])]
        return TmemBuffers(buffers, program.target())
    rows, columns = extents
    name = program.target()
    if rows != program.tmem_bytes.shape[0] and (rows, program.ctas) != (64, 1):
        raise UnsupportedError(
            f"{program.here()}: tensor memory of {rows} rows: 128 to a CTA are emulated, {program.ctas} CTA(s) here"
        )
    _refuse(program, name, legal.wrong_tensor_memory(layout, rows, columns, dtype, program.ctas))
    needed = -(-columns * dtype.bits // 32)
    first = program.take_columns(needed, name)
    made = Tmem(program, 4 * first, columns, dtype, name, rows, layout)
    if value is not None:
        made.store(value)
    return made
