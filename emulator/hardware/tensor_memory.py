"""Tensor memory as kernels see it: columns of 32 bits, a row to a lane, in blocks; and scale factors in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np

from tilecast.emulator.errors import BoundsError, LayoutError, UnsupportedError
from tilecast.emulator.hardware.barriers import Outside
from tilecast.emulator.hardware.memory import Memories, refuse
from tilecast.emulator.session import Session
from tilecast.emulator.values import dtypes, legal
from tilecast.emulator.values.layouts import DistributedLinearLayout, row_per_lane, tmem_registers
from tilecast.emulator.values.memory_layouts import TensorMemoryLayout, TensorMemoryScalesLayout
from tilecast.emulator.values.tensors import Tensor

#: Rows of tensor memory in a CTA; how an access of it hands rows and columns to threads.
_LANES, _WARPGROUP = 128, 4
_VARIANTS = ("32x32b", "32x32b_splitn", "16x64b", "16x128b", "16x256b", "16x32bx2")

#: (CTA, rows and columns of a tensor, first row of the CTA's memory, first byte) of a block of rows.
_Piece = tuple[int, tuple[slice, ...], int, int]


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

    @property
    def layout(self) -> Any:
        """How each of them is laid out."""
        return self._buffers[0].layout

    def slice(self, start: Any, length: Any, dim: Any = 1) -> TmemBuffers:
        """Some of them (``dim=0``), or some rows or columns of each; BoundsError outside."""
        if int(dim):
            return TmemBuffers([one.slice(start, length, int(dim) - 1) for one in self._buffers], self.name)
        first, size = int(start), int(length)
        if first < 0 or first + size > len(self._buffers):
            here = self._buffers[0].program.here()
            raise BoundsError(f"{here}: {self.name} has {len(self._buffers)} buffers, slice {first}..{first + size}")
        return TmemBuffers(self._buffers[first : first + size], self.name)

    def reinterpret(self, dtype: Any = None, shape: Any = None, layout: Any = None) -> TmemBuffers:
        """Each as another type, with other extents or another layout."""
        if shape is not None and int(shape[0]) != len(self._buffers):
            here = self._buffers[0].program.here()
            raise UnsupportedError(f"{here}: {self.name}, {self.shape}, as another number of buffers")
        inner = None if shape is None else shape[1:]
        return TmemBuffers([one.reinterpret(dtype, inner, layout) for one in self._buffers], self.name)

    _reinterpret = reinterpret


class Tmem:
    """Columns of tensor memory seen as one type; views may overlap."""

    def __init__(
        self, program: Memories, byte: int, columns: int, dtype: dtypes.Dtype, name: str, rows: int | None = None,
        layout: Any = None, row_step: int = 0,
    ) -> None:  # fmt: skip
        self.program, self.byte, self.columns, self.dtype, self.name = program, byte, columns, dtype, name
        self.layout = layout
        self.rows = program.tmem_bytes.shape[0] if rows is None else rows
        #: Columns between neighbouring elements, in elements; bytes from a block of rows to the next one beside it.
        self.stride = layout.col_stride if isinstance(layout, TensorMemoryLayout) else 1
        self.row_step = row_step
        self._cells: Any = None
        self._kept: tuple[_Piece, ...] | None = None

    @property
    def shape(self) -> list[int]:
        """Extents: rows of all CTAs, columns of this type."""
        return [self.rows, self.columns]

    @property
    def element_ty(self) -> dtypes.Dtype:
        """Element type, as kernels ask for it of a type."""
        return self.dtype

    @property
    def type(self) -> Tmem:
        """What kernels ask of a type is here."""
        return self

    def get_reg_layout(self, num_warps: Any = None, instr_variant: str = "32x32b") -> Any:
        """A layout that holds a row to a lane."""
        return register_layout(self.program, self.shape, self.layout, num_warps or self.program.warps(), instr_variant)

    def _pieces(self) -> Sequence[_Piece]:
        """What `_found_pieces` finds, which stays as it is."""
        if self._kept is None:
            self._kept = tuple(self._found_pieces())
        return self._kept

    def _found_pieces(self) -> Iterator[_Piece]:
        """(CTA, rows and columns of the tensor, first row of the CTA's memory, first byte) of every block of rows."""
        program, layout = self.program, self.layout
        divided = layout if isinstance(layout, TensorMemoryLayout) and layout.cga and program.ctas > 1 else None
        for cta in range(program.ctas if divided is not None else 1):
            part = (
                divided.part(cta, self.shape) if divided is not None else (slice(0, self.rows), slice(0, self.columns))
            )
            own = part[0].stop - part[0].start
            high = layout.block[0] if isinstance(layout, TensorMemoryLayout) else _LANES
            # Blocks of 64 rows lie in pairs over one another, what is more beside.
            beside = max(_LANES // high, 1)
            for number in range(max(own // high, 1)):
                rows = slice(part[0].start + number * high, part[0].start + min((number + 1) * high, own))
                below, right = number % beside * high, number // beside * self.row_step
                yield cta, (rows, part[1]), cta * _LANES + below, self.byte + right

    def _in_place(self, row: int, rows: int, byte: int, columns: int) -> Any:
        size = self.dtype.bits // 8
        stride = self.stride * size
        memory = self.program.tmem_bytes[row : row + rows, byte : byte + columns * stride]
        return memory.view(self.dtype.numpy)[:, :: self.stride]

    def values(self) -> Any:
        """The values as they are now."""
        out = np.empty(self.shape, self.dtype.numpy)
        for _cta, (rows, columns), row, byte in self._pieces():
            size = columns.stop - columns.start
            out[rows, columns] = self._in_place(row, rows.stop - rows.start, byte, size)
        return out

    def assign(self, values: Any) -> None:
        """Put values there."""
        for _cta, (rows, columns), row, byte in self._pieces():
            size = columns.stop - columns.start
            self._in_place(row, rows.stop - rows.start, byte, size)[...] = values[rows, columns]

    def cells_of(self, cta: int) -> Any:
        """Cell numbers in one CTA."""
        if self._cells is None:
            size = self.dtype.bits // 8 * self.stride
            columns = {(byte, part[1].stop - part[1].start) for owner, part, _, byte in self._pieces() if owner == 0}
            pieces = [np.arange(byte // 4, (byte + size * count + 3) // 4) for byte, count in sorted(columns)]
            self._cells = pieces[0] if len(pieces) == 1 else np.unique(np.concatenate(pieces))
        return self._cells + cta * self.program.tmem_room

    def slice(self, start: Any, length: Any, dim: int = 1) -> Tmem:
        """Some of the columns; BoundsError outside."""
        if dim != 1:
            return self._rows(int(start), int(length))
        first, size = int(start), int(length)
        if first < 0 or first + size > self.columns:
            raise BoundsError(
                f"{self.program.here()}: {self.name} has {self.columns} columns, slice {first}..{first + size}"
            )
        byte = self.byte + first * self.stride * self.dtype.bits // 8
        return Tmem(self.program, byte, size, self.dtype, self.name, self.rows, self.layout, self.row_step)

    def _rows(self, first: int, size: int) -> Tmem:
        layout = self.layout
        high = layout.block[0] if isinstance(layout, TensorMemoryLayout) else _LANES
        if (
            high != _LANES
            or first % high
            or size % high
            or self.program.ctas > 1
            or not 0 <= first < first + size <= self.rows
        ):
            raise UnsupportedError(
                f"{self.program.here()}: rows {first}..{first + size} of {self.name}, {self.shape}: whole blocks of {_LANES} rows "
                "of one CTA are emulated"
            )
        byte = self.byte + first // high * self.row_step
        return Tmem(self.program, byte, self.columns, self.dtype, self.name, size, layout, self.row_step)

    def reinterpret(self, dtype: Any = None, shape: Any = None, layout: Any = None) -> Tmem:
        """The same columns as another type, with other extents or another layout; BoundsError where that needs more of them."""
        dtype, shape = (self.dtype if dtype is None else dtype), (self.shape if shape is None else shape)
        layout = self.layout if layout is None else layout
        if len(shape) == 3:
            size = int(shape[2]) * dtype.bits // 8
            whole = [self._part(number * size, dtype, shape[1:], layout) for number in range(int(shape[0]))]
            return cast(Tmem, TmemBuffers(whole, self.name))
        if isinstance(layout, TensorMemoryScalesLayout):
            return self._as_scales(dtype, shape, layout)
        size = int(shape[1]) * dtype.bits // 8
        if size > self.columns * self.dtype.bits // 8 or int(shape[0]) != self.shape[0]:
            raise BoundsError(
                f"{self.program.here()}: {self.name}, {self.shape} of {self.dtype}, is too small for {[int(n) for n in shape]} of {dtype}"
            )
        wrong = legal.wrong_tensor_memory(layout, self.rows, int(shape[1]), dtype, self.program.ctas)
        refuse(self.program, self.name, wrong)
        return Tmem(self.program, self.byte, int(shape[1]), dtype, self.name, self.rows, layout, self.row_step)

    _reinterpret = reinterpret

    def _part(self, byte: int, dtype: dtypes.Dtype, shape: Any, layout: Any) -> Tmem:
        """Columns from a byte on."""
        left = self.columns - byte * 8 // self.dtype.bits
        rest = Tmem(self.program, self.byte + byte, left, self.dtype, self.name, self.rows, self.layout, self.row_step)
        return rest.reinterpret(dtype, shape, layout)

    def _as_scales(self, dtype: dtypes.Dtype, shape: Any, layout: TensorMemoryScalesLayout) -> Scales:
        rows, columns = (int(n) for n in shape)
        parts = layout.parts_of(2) if self.program.ctas > 1 else [1, 1]
        taken = columns_of_scales(rows // parts[0], columns // parts[1])
        if taken * 4 > self.columns * self.stride * self.dtype.bits // 8:
            raise BoundsError(
                f"{self.program.here()}: {self.name}, {self.shape} of {self.dtype}, is too small for {rows} x {columns} scale factors"
            )
        return Scales(self.program, self.byte, columns, dtype, self.name, rows, layout, taken)

    def _check(self, layout: Any, what: str) -> None:
        wrong = row_per_lane(layout, self.shape) or legal.wrong_rows(layout, self.layout, self.shape)
        self.program.fits(layout)
        if wrong:
            raise LayoutError(f"{self.program.here()}: a {what} of tensor memory {wrong}")

    def load(self, layout: Any = None) -> Tensor:
        """Into registers (tcgen05.ld)."""
        program = self.program
        if layout is None and program.warps() >= _WARPGROUP:
            found = self.get_reg_layout()
            layout = found if isinstance(found, DistributedLinearLayout) else None
        self._check(layout, "load")
        program.step()
        values = self.values()
        made = program.charge("tmem_load", values.nbytes, values.shape, layout)
        for cta, access in program.accesses():
            # Memory that is seen as several types may be read as any of them: what is there are bits.
            program.tmem.read(self.cells_of(cta), access, self.dtype.bits, program.session.adds_fences != "")
        out = Tensor(program.session, values, layout)
        out.made = made
        return out

    def load_max(self, layout: Any = None, propagate_nan: Any = None) -> tuple[Tensor, Tensor]:
        """The values and the maximum of every row, which the load unit finds (tcgen05.ld.red)."""
        if not self.program.session.load_reduce:
            raise UnsupportedError(
                f"{self.program.here()}: load_max needs tcgen05.ld.red, which this machine does not have"
            )
        loaded = self.load(layout)
        values = loaded.a
        most = values.max(axis=1) if propagate_nan else np.fmax.reduce(values, axis=1)
        maxima = Tensor(self.program.session, most)
        maxima.made = loaded.made
        return loaded, maxima

    def store(self, value: Tensor) -> None:
        """From registers (tcgen05.st)."""
        program = self.program
        if list(value.shape) != self.shape or value.dtype is not self.dtype:
            raise LayoutError(
                f"{program.here()}: a store of {value.dtype} {list(value.shape)} to {self.name}, {self.dtype} {self.shape}"
            )
        self._check(value.layout, "store")
        program.step()
        program.charge("tmem_store", value.a.nbytes, value.a.shape, value.layout, (value.made,))
        for cta, access in program.accesses():
            program.tmem.write(self.cells_of(cta), access, self.dtype.bits)
        self.assign(value.a)
        # The wait for the store is followed by a barrier of the role, in Triton 3.6 always.
        program.meet(certain=False)


def allocate_tensor(
    program: Memories, dtype: dtypes.Dtype, shape: Any, layout: Any, value: Any = None, buffer: int = 0
) -> Any:  # fmt: skip
    """Columns for ``shape``, [rows, columns] or [buffers, rows, columns]; AllocationError beyond what the chip has."""
    extents = [int(n) for n in shape]
    if len(extents) == 3:
        if value is not None:
            raise UnsupportedError(f"{program.here()}: several buffers of tensor memory: allocate, then store")
        buffers = [allocate_tensor(program, dtype, extents[1:], layout, None, i) for i in range(extents[0])]
        return TmemBuffers(buffers, program.target())
    rows, columns = extents
    name = program.target()
    if isinstance(layout, TensorMemoryScalesLayout):
        return allocate_scales(program, dtype, rows, columns, layout, name, buffer)
    parts = layout.parts_of(2) if isinstance(layout, TensorMemoryLayout) and program.ctas > 1 else [program.ctas, 1]
    if program.ctas > 1 and isinstance(layout, TensorMemoryLayout) and 1 << len(layout.cga) != program.ctas:
        raise UnsupportedError(f"{program.here()}: {name} is not divided between the CTAs of the cluster (cga_layout)")
    refuse(program, name, legal.wrong_tensor_memory(layout, rows, columns, dtype, program.ctas))
    own_rows, own_columns = rows // parts[0], columns // parts[1]
    if own_rows not in (64, 128) and own_rows % 128:
        raise UnsupportedError(
            f"{program.here()}: tensor memory of {own_rows} rows to a CTA: 64, or multiples of 128, are emulated"
        )
    stride = layout.col_stride if isinstance(layout, TensorMemoryLayout) else 1
    program.paired = program.paired or (isinstance(layout, TensorMemoryLayout) and layout.two_ctas)
    one = -(-own_columns * stride * dtype.bits // 32)
    first = program.take_columns(one * max(own_rows // _LANES, 1), name, buffer)
    made = Tmem(program, 4 * first, columns, dtype, name, rows, layout, 4 * one)
    if value is not None:
        made.store(value)
    return made


def register_layout(program: Memories | Session, shape: Any, layout: Any, num_warps: Any, variant: Any) -> Any:
    """The layout in registers that an access of tensor memory has; LayoutError for a variant that there is not."""
    if str(variant) not in _VARIANTS:
        raise LayoutError(f"{program.here()}: tensor memory in registers as {variant}: one of {', '.join(_VARIANTS)}")
    return tmem_registers(shape, layout, int(num_warps), str(variant))


class DescribedTmem:
    """tensor_memory_descriptor_type: tensor memory that need not be there, to be asked for register layouts."""

    def __init__(
        self, session: Session, element_ty: dtypes.Dtype, shape: Any, layout: Any, alloc_shape: Any = None
    ) -> None:
        self._session, self.element_ty, self.layout = session, element_ty, layout
        self.shape = [int(n) for n in shape]

    def get_reg_layout(self, num_warps: Any, instr_variant: Any = "32x32b") -> Any:
        """The layout in registers that an access has."""
        return register_layout(self._session, self.shape, self.layout, num_warps, instr_variant)


class Scales(Tmem):
    """Scale factors in tensor memory: [rows, factors along K], which every warp finds in its own lanes."""

    def __init__(
        self, program: Memories, byte: int, columns: int, dtype: dtypes.Dtype, name: str, rows: int, layout: Any, taken: int
    ) -> None:  # fmt: skip
        super().__init__(program, byte, columns, dtype, name, rows, layout)
        self._taken = taken
        # A load that sees the same columns as the same factors sees the same values.
        place = (byte, rows, columns)
        octets = program.scales.setdefault(place, np.zeros((rows, columns), np.uint8))
        self._a = octets.view(dtype.numpy)

    def values(self) -> Any:
        """The factors as they are now."""
        return self._a.copy()

    def assign(self, values: Any) -> None:
        """Put factors there."""
        self._a[...] = values
        if self._whole():
            # Bytes of a column: four factors of a row; columns: blocks of 32 rows, then the next four factors; each warp has all.
            octets = self._a.view(np.uint8).reshape(self.rows // 32, 32, self.columns // 4, 4).transpose(1, 2, 0, 3)
            size = 4 * self._taken
            self.program.tmem_bytes[:_LANES, self.byte : self.byte + size] = np.tile(octets.reshape(32, size), (4, 1))

    def _whole(self) -> bool:
        """Whether the factors fill columns of one CTA."""
        return self.program.ctas == 1 and self.rows % 32 == 0 and self.columns % 4 == 0

    def cells_of(self, cta: int) -> Any:
        """Cell numbers in one CTA."""
        return np.arange(self.byte // 4, self.byte // 4 + self._taken) + cta * self.program.tmem_room

    def slice(self, start: Any, length: Any, dim: int = 1) -> Tmem:
        """Refused: in which columns some of the factors lie is not followed."""
        raise UnsupportedError(f"{self.program.here()}: a slice of scale factors in tensor memory is not emulated")

    def reinterpret(self, dtype: Any = None, shape: Any = None, layout: Any = None) -> Tmem:
        """The columns of one CTA as bytes of 128 rows; refused otherwise."""
        wanted = () if shape is None else tuple(int(n) for n in shape)
        kind = self.dtype if dtype is None else dtype
        if (
            self._whole()
            and isinstance(layout, TensorMemoryLayout)
            and wanted == (_LANES, 4 * self._taken)
            and kind.bits == 8
        ):
            return Tmem(self.program, self.byte, wanted[1], kind, self.name, _LANES, layout)
        raise UnsupportedError(
            f"{self.program.here()}: scale factors in tensor memory, seen otherwise than as bytes of {_LANES} rows, are not emulated"
        )

    _reinterpret = reinterpret

    def _check(self, layout: Any, what: str) -> None:
        self.program.fits(layout)


def columns_of_scales(rows: int, factors: int) -> int:
    """Columns that scale factors of a CTA take: four bytes of each 32 rows to a column."""
    return -(-rows // 32) * -(-factors // 4)


def allocate_scales(
    program: Memories, dtype: dtypes.Dtype, rows: int, columns: int, layout: TensorMemoryScalesLayout, name: str,
    buffer: int,
) -> Scales:  # fmt: skip
    """Columns for scale factors; LayoutError for factors that are no bytes."""
    if dtype.bits != 8:
        raise LayoutError(f"{program.here()}: {name}: scale factors have 8 bits, {dtype} has {dtype.bits}")
    parts = layout.parts_of(2) if program.ctas > 1 else [1, 1]
    taken = columns_of_scales(rows // parts[0], columns // parts[1])
    first = program.take_columns(taken, name, buffer)
    return Scales(program, 4 * first, columns, dtype, name, rows, layout, taken)
