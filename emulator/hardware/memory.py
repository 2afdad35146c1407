"""Shared memory as kernels see it, on the shadow that remembers who wrote and read each cell.

A cell of shared memory is one row of one slot (a half row where a pair of CTAs divides the columns, a quarter where a file takes
columns apart); a cell of tensor
memory is one 32-bit column of one CTA.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
from tilecast.emulator.values.memory_layouts import (
    Divided,
    MBarrierLayout,
    PaddedSharedLayout,
    SharedLayout,
    panels_abreast,
    rearranged,
    same_places,
)
from tilecast.emulator.values.scalars import Int
from tilecast.emulator.values.tensors import Tensor, raw
from tilecast.emulator.values.wellformed import has_slots, wrong_shared

#: Read-modify-write operations by name (None: exchange).
ATOMICS = {
    "add": np.add, "max": np.maximum, "min": np.minimum, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor, "xchg": None,
}  # fmt: skip

_BARRIER_BYTES = 8
#: Cells of a row in files that take columns apart.
_COLUMN_CELLS = 4


class Memories(Context, Protocol):
    """A running program that has memories, an allocator for each and a role that accesses them."""

    smem: Shadow
    tmem: Shadow
    tmem_bytes: Any
    tmem_room: int
    paired: bool
    scales: dict[tuple[int, int, int], Any]

    def target(self) -> str:
        """Name that the running statement assigns to."""

    def step(self) -> None:
        """A point where other roles may go first."""

    def charge(
        self, pipe: str, count: float, shape: tuple[int, ...] = (), layout: Any = None, operands: tuple[int, ...] = (),
        axis: int | None = None,
    ) -> int:  # fmt: skip
        """Account for a step of the running role; its number."""

    def touch_shared(self, memory: int, stores: bool) -> None:
        """The running role loads or stores of an allocation of shared memory, with the barrier that the compiler puts before it."""

    def accesses(self) -> list[tuple[int, Access]]:
        """(CTA, the running role's access to its memory)."""

    def new_barrier(self, name: str, homes: Sequence[int]) -> Barrier:
        """A barrier with a number of its own; ``homes``: of each CTA, the one in whose memory its barrier is."""

    def reserve_smem(self, size: int, name: str, lasting: bool = False) -> None:
        """Account for the next cells of shared memory; ``lasting``: barriers, which have no cells and live to the end."""

    def take_columns(self, columns: int, name: str, buffer: int = 0) -> int:
        """The first of so many columns of tensor memory; AllocationError where the emulator has no room for them."""

    def own_cells(self, owners: Any) -> None:
        """CTA of new cells of shared memory."""

    def cta_of_cell(self, cells: Any) -> Any:
        """CTA of cells of shared memory."""

    def warps(self) -> int:
        """Warps of the running role."""

    def fits(self, layout: Any, shape: Sequence[int] | None = None) -> Any:
        """A register layout; LayoutError where it is made for another number of warps than the running role has."""

    def meet(self, certain: bool = True) -> None:
        """The warps of the running role wait for one another here, or (``certain=False``) may, as the compiler decides."""


class Shared:
    """A view of shared memory: values, and the numbers of its cells in the same arrangement."""

    def __init__(
        self, program: Memories, a: Any, cells: Any, name: str, layout: Any = None, division: Divided | None = None,
        copy_cells: int = 0,
    ) -> None:  # fmt: skip
        self.program, self.a, self.cells, self.name, self.layout = program, a, cells, name, layout
        #: How the CTAs of the cluster divide the allocation that this is a view of; cells of one copy of it.
        self._division, self._copy_cells = division, copy_cells
        #: Whether it is seen as another type than it was allocated as: loads and products take the bits of any.
        self.any_type = False
        #: Whether its first dimension is one that the layout leaves out.
        self.has_slots = False
        #: The allocation that it is a view of, by its first cell.
        self.memory = 0

    @property
    def shape(self) -> list[int]:
        """Extents."""
        return list(self.a.shape)

    @property
    def dtype(self) -> dtypes.Dtype:
        """Element type."""
        return dtypes.of(self.a)

    @property
    def element_ty(self) -> dtypes.Dtype:
        """Element type, as kernels ask for it of a type."""
        return self.dtype

    @property
    def type(self) -> Shared:
        """What kernels ask of a type is here."""
        return self

    def _keep_alive(self) -> None:
        """Where the compiler may not reuse the memory before: here it never does."""

    def view(self, a: Any, cells: Any, layout: Any = None) -> Shared:
        """Some of the memory, seen otherwise."""
        layout = self.layout if layout is None else layout
        made = Shared(self.program, a, cells, self.name, layout, self._division, self._copy_cells)
        made.any_type, made.memory = self.any_type, self.memory
        return made

    def index(self, i: Any) -> Shared:
        """One slot; outside, one that raises BoundsError when it is used."""
        if not 0 <= int(i) < self.a.shape[0]:
            fault = f"{self.program.here()}: {self.name} has {self.a.shape[0]} slots, index {int(i)}"
            return cast(Shared, Outside(fault))
        return self.view(self.a[int(i)], self.cells[int(i)])

    def slice(self, start: Any, length: Any, dim: int = 0) -> Shared:
        """Part of one dimension; BoundsError outside."""
        first, size, extent = int(start), int(length), self.a.shape[dim]
        if first < 0 or first + size > extent:
            raise BoundsError(f"{self.program.here()}: {self.name} slice {first}..{first + size} of {extent}")
        before = (slice(None),) * dim
        cells, width = self.cells, extent // self.cells.shape[dim]
        # Part of a cell is the cell.
        if not first % width and not size % width:
            cells = cells[(*before, slice(first // width, (first + size) // width))]
        return self.view(self.a[(*before, slice(first, first + size))], cells)

    def reshape(self, shape: Any) -> Shared:
        """Other extents, elements in row-major order."""
        new = [int(n) for n in shape]
        if int(np.prod(new)) != self.a.size:
            raise LayoutError(
                f"{self.program.here()}: {self.name} of {list(self.a.shape)} as {new}: another number of elements"
            )
        if new[-1] == self.a.shape[-1]:
            return self.view(self.a.reshape(new), self.cells.reshape([*new[:-1], self.cells.shape[-1]]))
        # Rows come apart: each element tells its cell.
        return self._in_place(self.a.reshape(new), self.by_element().reshape(new), new)

    def by_element(self) -> Any:
        """The cell of each element."""
        columns = self.a.shape[-1] // self.cells.shape[-1]
        return self.cells if columns == 1 else np.repeat(self.cells, columns, axis=-1)

    def _in_place(self, a: Any, cells: Any, shape: Sequence[int], layout: Any = None) -> Shared:
        if not np.shares_memory(a, self.a):
            return Turned(self, shape, cells)
        return self.view(a, cells, layout)

    def reinterpret(self, dtype: Any = None, shape: Any = None, layout: Any = None) -> Shared:
        """The same memory as another type, with other extents or another layout; what that would move is refused."""
        kind = self.dtype if dtype is None else dtype
        new = self.shape if shape is None else [int(n) for n in shape]
        to = self.layout if layout is None else layout
        here, size = self.program.here(), int(np.prod(new)) * kind.bits // 8
        if size > self.a.nbytes:
            raise BoundsError(f"{here}: {self.name}, {self.shape} of {self.dtype}, is too small for {new} of {kind}")
        abreast = panels_abreast(self.layout, to, self.shape, new, self.dtype.bits, kind.bits)
        if abreast > 1 and self.a.flags.c_contiguous:
            return self._abreast(abreast, new, to)
        if new == self.shape and kind is self.dtype and (moved := self._moved(to)) is not None:
            return moved
        if (
            not same_places(self.layout, to, self.shape, new, self.dtype.bits, kind.bits)
            or not self.a.flags.c_contiguous
        ):
            raise UnsupportedError(
                f"{here}: {self.name} with {self.layout!r} as {new} of {kind} with {to!r}: only where each byte keeps its place "
                "among the rows"
            )
        flat = self.a.reshape(-1).view(np.uint8)[:size].view(kind.numpy).reshape(new)
        octets = np.repeat(self.by_element().reshape(-1), self.dtype.bits // 8)[:size]
        made = self._in_place(flat, octets[:: kind.bits // 8].reshape(new), new, to)
        made.any_type = True
        return made

    _reinterpret = reinterpret

    def _abreast(self, count: int, shape: Sequence[int], layout: Any) -> Shared:
        """Each ``count`` tiles side by side."""

        def turned(x: Any) -> Any:
            return x[: shape[0] * count].reshape(shape[0], count, *x.shape[1:]).transpose(0, 2, 1, 3)

        cells = turned(self.by_element())
        return Turned(self.view(turned(self.a), cells, layout), shape, cells.reshape(shape))

    def _moved(self, to: Any) -> Shared | None:
        """The same bytes by a layout that has them elsewhere in a tile; None where it has not, or it is not known where."""
        if self.a.ndim < 2 or (list(getattr(to, "cga", ())) == list(getattr(self.layout, "cga", ()))):
            return None
        moved = rearranged(self.layout, to, self.shape[-2:], self.dtype.bits)
        return None if moved is None else Rearranged(self, moved, to)

    def put(self, values: Any, part: Any = ...) -> None:
        """Write values, of a part."""
        self.a[part] = values

    def gather(self, indices: Tensor, axis: Any) -> Tensor:
        """Elements along an axis by number, into registers with the layout of the numbers."""
        where = self._numbers(indices, int(axis))
        made = self.charged_access(False)
        out = Tensor(self.program.session, np.take_along_axis(self.a, where, int(axis)), indices.layout)
        out.made = made
        return out

    def scatter(self, values: Tensor, indices: Tensor, axis: Any) -> None:
        """Registers to elements along an axis by number; of several for one element, one stays."""
        where = self._numbers(indices, int(axis))
        self.charged_access(True)
        np.put_along_axis(self.a, where, values.a.astype(self.a.dtype), int(axis))

    def atomic_scatter(self, compute: Any, values: Any, indices: Tensor, axis: Any, mask: Any = None) -> Tensor:
        """Combine with elements along an axis by number, one after the other; what was there before each.

        ``compute``: a numpy ufunc; None: exchange.
        """
        where = self._numbers(indices, int(axis))
        self.charged_access(False, together=True)
        self.charged_access(True)
        where, given, asked = np.broadcast_arrays(where, np.asarray(raw(values)), True if mask is None else raw(mask))
        given, before = given.astype(self.a.dtype), np.zeros(where.shape, self.a.dtype)
        for place in zip(*np.nonzero(asked), strict=True):
            target = list(place)
            target[int(axis)] = where[place]
            at = tuple(target)
            before[place] = self.a[at]
            self.a[at] = given[place] if compute is None else compute(self.a[at], given[place])
        return Tensor(self.program.session, before, indices.layout)

    def _numbers(self, indices: Tensor, axis: int) -> Any:
        extent = self.a.shape[axis]
        if indices.a.size and (indices.a.min() < 0 or indices.a.max() >= extent):
            worst = int(indices.a.max() if indices.a.max() >= extent else indices.a.min())
            raise BoundsError(
                f"{self.program.here()}: element {worst} of {self.name} along axis {axis}, which has {extent}"
            )
        return indices.a.astype(np.int64)

    def charged_access(self, writes: bool, together: bool = False) -> int:
        """Note that the running role reads or writes all of it by ordinary instructions; ``together``: reads what it writes.

        The number of the step.
        """
        program = self.program
        program.step()
        program.meet(certain=False)
        program.touch_shared(self.memory, writes)
        made = program.charge("smem_store" if writes else "smem_load", self.a.nbytes, self.a.shape)
        for access, cells in self._reached(writes or together):
            if writes:
                program.smem.write(cells, access, self.dtype.bits)
            else:
                program.smem.read(cells, access, self.dtype.bits)
        return made

    def permute(self, order: Any) -> Shared:
        """Dimensions in another order."""
        places = [int(n) for n in order]
        return self.view(self.a.transpose(places), self.cells.transpose(places))

    def cells_of(self, cta: int) -> Any:
        """Cell numbers that lie in one CTA."""
        flat = self.cells.reshape(-1)
        if self.cells.shape == self.a.shape and self.a.ndim > 1:
            flat = _distinct(flat)
        if self._division is None:
            return flat
        flat = flat + self._division.replica(cta) * self._copy_cells
        return flat[self.program.cta_of_cell(flat) == cta]

    def cells_for(self, layout: Any, cta: int) -> Any:
        """Cell numbers of the part that one CTA has by ``layout``, of this view, in whichever CTA they lie."""
        part = self.by_element()[layout.part(cta, self.shape)].reshape(-1)
        return np.unique(part) + (self._division.replica(cta) * self._copy_cells if self._division is not None else 0)

    def divided_by(self, bit: int) -> int | None:
        """Dimension of a matrix that CTAs divide whose numbers differ in ``bit``; None where they do not."""
        owners = self.program.cta_of_cell(self.cells)
        others = np.argwhere(owners == owners.flat[0] ^ 1 << bit)
        return None if not len(others) else int(np.flatnonzero(others[0])[0])

    @property
    def nbytes_per_cta(self) -> Int:
        """Bytes of the part that one CTA has."""
        return Int(self.a.nbytes // (self._division.parts() if self._division is not None else 1))

    @property
    def rank(self) -> int:
        """Dimensions."""
        return int(self.a.ndim)

    @property
    def numel(self) -> int:
        """Elements."""
        return int(self.a.size)

    def load(self, layout: Any = None) -> Tensor:
        """Into registers."""
        program = self.program
        self._one_slot()
        program.step()
        program.fits(layout, self.a.shape)
        program.meet(certain=False)
        program.touch_shared(self.memory, stores=False)
        made = program.charge("smem_load", self.a.nbytes, self.a.shape, layout)
        for access, cells in self._reached(writes=False):
            program.smem.read(cells, access, self.dtype.bits, self.any_type)
        out = Tensor(program.session, self.a.copy(), layout)
        out.made = made
        return out

    def store(self, value: Tensor) -> None:
        """From registers; a store of what is there already is no race."""
        program = self.program
        self._one_slot()
        if list(value.shape) != self.shape or value.dtype is not self.dtype:
            raise LayoutError(
                f"{program.here()}: a store of {value.dtype} {list(value.shape)} to {self.name}, {self.dtype} {self.shape}"
            )
        program.step()
        program.meet(certain=False)
        program.touch_shared(self.memory, stores=True)
        program.charge("smem_store", self.a.nbytes, self.a.shape, value.layout, (value.made,))
        changes = self.a.tobytes() != value.a.tobytes()
        if program.session.watcher is not None:
            program.session.watcher.stored(self.name, program.session.calls())
        for access, cells in self._reached(writes=True):
            program.smem.write(cells, access, self.dtype.bits, changes)
        self.put(value.a)

    def _one_slot(self) -> None:
        """LayoutError where it is all slots of a ring: the compiler loads and stores what has the dimensions of its layout."""
        if self.has_slots:
            said = f"{self.shape}, its layout {len(self.shape) - 1} dimensions: one slot of it can be loaded or stored"
            raise LayoutError(f"{self.program.here()}: {self.name} is {said}")

    def _reached(self, writes: bool) -> list[tuple[Access, Any]]:
        """Accesses of the running role, one a CTA, and their cells: of a view that lies in some CTAs only, all that there are.

        Of such a view each CTA loads whatever it holds; what CTAs store there together, one of them is taken to store.
        """
        every = [(access, self.cells_of(cta)) for cta, access in self.program.accesses()]
        if all(cells.size for _, cells in every):
            return every
        whole = np.concatenate([cells for _, cells in every])
        return [(access, whole) for access, _ in every[: 1 if writes else None]]


class Turned(Shared):
    """Shared memory with its dimensions in another order, seen with other extents: to be read only."""

    def __init__(self, parent: Shared, shape: Sequence[int], cells: Any) -> None:
        self._parent, self._extents = parent, list(shape)
        super().__init__(parent.program, None, cells, parent.name, parent.layout, parent._division, parent._copy_cells)
        self.memory = parent.memory

    def index(self, i: Any) -> Shared:
        """One slot, as it is when it is used; outside, one that raises BoundsError then."""
        if self._parent.a.shape[0] != self._extents[0]:
            return super().index(i)
        made = self._parent.index(i)
        return made if isinstance(made, Outside) else Turned(made, self._extents[1:], self.cells[int(i)])

    @property
    def a(self) -> Any:
        """The values as they are now; nothing can be written there."""
        values = self._parent.a.reshape(self._extents)
        values.flags.writeable = False
        return values

    @a.setter
    def a(self, values: Any) -> None:
        pass


class Rearranged(Shared):
    """Shared memory by a layout that has each element of a tile elsewhere: ``moved``, its number by the layout that it was allocated with."""

    def __init__(self, parent: Shared, moved: Any, layout: Any) -> None:
        self._parent, self._places = parent, moved
        cells = parent.by_element().reshape(*parent.shape[:-2], -1)[..., moved]
        super().__init__(parent.program, None, cells, parent.name, layout, parent._division, parent._copy_cells)
        self.memory, self.has_slots = parent.memory, parent.has_slots

    def index(self, i: Any) -> Shared:
        """One slot, as it is when it is used; outside, one that raises BoundsError then."""
        if len(self.shape) < 3:
            return super().index(i)
        made = self._parent.index(i)
        return made if isinstance(made, Outside) else Rearranged(made, self._places, self.layout)

    def view(self, a: Any, cells: Any, layout: Any = None) -> Shared:
        """Not followed: UnsupportedError."""
        raise UnsupportedError(f"{self.program.here()}: part of {self.name}, whose bytes another layout has elsewhere")

    def put(self, values: Any, part: Any = ...) -> None:
        """Write values, of a part."""
        mine = self.a
        mine[part] = values
        self._parent.a.reshape(*self._parent.shape[:-2], -1)[..., self._places] = mine

    @property
    def a(self) -> Any:
        """The values as they are now."""
        return self._parent.a.reshape(*self._parent.shape[:-2], -1)[..., self._places]

    @a.setter
    def a(self, values: Any) -> None:
        pass


def _distinct(numbers: Any) -> Any:
    """Sorted, each once: without sorting where they are in order already, as rows mostly are."""
    if not numbers.size:
        return numbers
    steps = np.diff(numbers)
    if steps.size and steps.min() < 0:
        return np.unique(numbers)
    return numbers[np.concatenate([[True], steps > 0])]


def _combining(compute: Any) -> Any:
    def combine(self: Shared, values: Any, indices: Tensor, axis: Any, mask: Any = None) -> Tensor:
        return self.atomic_scatter(compute, values, indices, axis, mask)

    return combine


for _name, _compute in ATOMICS.items():
    setattr(Shared, f"atomic_scatter_{_name}", _combining(_compute))


def allocate_shared(program: Memories, dtype: dtypes.Dtype, shape: Any, layout: Any, shared: bool = False) -> Any:
    """Shared memory or, for int64 with one element to a row, barriers; AllocationError beyond the CTA's share."""
    extents, name = [int(n) for n in shape], program.target()
    if dtype is dtypes.INT64 and (layout is None or isinstance(layout, MBarrierLayout)):
        homes = _homes(layout, shared, program.ctas)
        many = len(extents) > 1
        # Triton's verifier: "barrier allocation must be a descriptor of Nxi64 type with N <= number of CTAs".
        refuse(
            program,
            name,
            f"{extents[-1]} numbers to a barrier, of at most {program.ctas}, one for each CTA"
            if extents[-1] > program.ctas
            else "",
        )
        program.reserve_smem(_BARRIER_BYTES * (extents[0] if many else 1), name, lasting=True)
        if not many:
            return program.new_barrier(name, homes)
        return BarrierArray(extents[0], lambda i: program.new_barrier(f"{name}[{i}]", homes), program, name)
    division = layout if isinstance(layout, SharedLayout) and program.ctas > 1 else None
    if program.ctas > 1 and (division is None or 1 << len(division.cga) != program.ctas):
        raise UnsupportedError(f"{program.here()}: {name} is not divided between the CTAs of the cluster (cga_layout)")
    refuse(program, name, wrong_shared(layout, extents) or legal.wrong_swizzle(layout, extents, dtype))
    a = np.empty(extents, dtype.numpy)
    a.view(np.uint8).fill(0xFF)
    last = len(extents) - 1
    parts = division.parts_of(len(extents)) if division is not None else [1] * len(extents)
    # A row is one cell (some, where columns are taken apart), or one in each CTA; a vector has one to an element, so that roles may
    # share it out.
    columns = parts[last]
    if program.ctas == 1 and program.session.source.slices_columns and not extents[last] % _COLUMN_CELLS:
        columns = _COLUMN_CELLS
    cell_shape = [*extents[:-1], columns] if last or parts[last] > 1 else extents
    own = a.size // math.prod(parts)
    size = layout.padded_bytes(own, a.itemsize) if isinstance(layout, PaddedSharedLayout) else own * a.itemsize
    program.reserve_smem(size, name)
    copies = division.replicas() if division is not None else 1
    owners = np.zeros([copies, *cell_shape], np.int8)
    if division is not None:
        for cta in range(program.ctas):
            owners[division.replica(cta)][division.part(cta, cell_shape)] = cta
    count = owners[0].size
    start = program.smem.grow(count * copies)
    for copy in range(copies):
        first = start + copy * count
        program.smem.call(first, first + count, count // extents[0] if len(extents) > 1 else count, name)
    program.own_cells(owners.reshape(-1))
    made = Shared(program, a, np.arange(start, start + count).reshape(cell_shape), name, layout, division, count)
    made.has_slots, made.memory = has_slots(layout, extents), start
    return made


def _homes(layout: Any, shared: bool, ctas: int) -> list[int]:
    """Of each CTA, the CTA in whose memory its barrier is: its own, or the first of those that share one."""
    if isinstance(layout, MBarrierLayout) and layout.cga:
        return [layout.leader(cta) for cta in range(ctas)]
    return [cta & ~1 if shared else cta for cta in range(ctas)]


def refuse(program: Context, name: str, complaint: str) -> None:
    """LayoutError with a complaint about an allocation, where there is one."""
    if complaint:
        raise LayoutError(f"{program.here()}: {name}: {complaint}")
