"""What kernels ask of the copy engine, and cp.async: tiles, rows by number, columns of convolutions, reductions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tilecast.emulator.errors import BoundsError, LayoutError
from tilecast.emulator.hardware.barriers import Barrier
from tilecast.emulator.hardware.engines import issue_copy
from tilecast.emulator.hardware.memory import Shared
from tilecast.emulator.hardware.transfers import ArriveAfterCopies, RegistersToCluster, gather, scatter_rows, store_tile
from tilecast.emulator.language import hostside
from tilecast.emulator.language.arrays import TensorDescriptor
from tilecast.emulator.language.everyday import Everyday
from tilecast.emulator.values import dtypes
from tilecast.emulator.values.tensors import Pointer, Tensor

#: Reductions of the copy engine, by name.
_REDUCTIONS = {
    "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}  # fmt: skip


class Copies(Everyday):
    """Copies between global and shared memory."""

    def async_load(
        self, tensor_desc: Any, coord: Any, barrier: Barrier, result: Shared, pred: Any = True, multicast: Any = False,
        cache_policy: Any = None,
    ) -> None:  # fmt: skip
        """A tile by the copy engine."""
        self.program.step()
        if pred:
            issue_copy(
                self.program.role(), tensor_desc, coord, self.barrier_at(barrier), result, multicast=bool(multicast)
            )

    def async_load_im2col(
        self, tensor_desc: Any, coord: Any, offsets: Any, barrier: Barrier, result: Shared, pred: Any = True,
        multicast: Any = False,
    ) -> None:  # fmt: skip
        """Pixels of a convolution's window by the copy engine."""
        self.program.step()
        if pred:
            moved = [int(n) for n in offsets]
            issue_copy(
                self.program.role(), tensor_desc, coord, self.barrier_at(barrier), result, multicast=bool(multicast),
                fetch=lambda corner: tensor_desc.columns(corner, moved),
            )  # fmt: skip

    def async_gather(
        self, tensor_desc: Any, x_offsets: Tensor, y_offset: Any, barrier: Barrier, result: Shared, pred: Any = True,
        multicast: Any = False,
    ) -> None:  # fmt: skip
        """Rows by number, by the copy engine."""
        self.program.step()
        if not pred:
            return
        numbers = self._rows(tensor_desc, x_offsets)
        issue_copy(
            self.program.role(), tensor_desc, [y_offset], self.barrier_at(barrier), result, multicast=bool(multicast),
            fetch=lambda corner: tensor_desc.rows(numbers, corner[0]), shape=[len(numbers), tensor_desc.block_shape[-1]],
        )  # fmt: skip

    def async_scatter(self, tensor_desc: Any, x_offsets: Tensor, y_offset: Any, src: Shared) -> None:
        """To rows by number, by the copy engine; a group of its own."""
        self.program.step()
        numbers, column = self._rows(tensor_desc, x_offsets), int(y_offset)
        if column < 0 or any(n < 0 for n in numbers):
            raise BoundsError(
                f"{self.session.here()}: a scatter to row {min(numbers)}, column {column}: none may be negative"
            )
        role = self.program.role()
        role.stores.add(scatter_rows(role, tensor_desc, numbers, column, src))
        role.stores.commit()

    def _rows(self, desc: Any, numbers: Any) -> list[int]:
        if not isinstance(numbers, Tensor) or numbers.a.ndim != 1 or numbers.a.dtype.kind not in "iu":
            raise LayoutError(f"{self.session.here()}: rows are given by a vector of integers, got {numbers!r}")
        if list(desc.block_shape[:-1]) != [1]:
            raise LayoutError(
                f"{self.session.here()}: rows by number need a tensor map with boxes of one row, got {desc.block_shape}"
            )
        return [int(n) for n in numbers.a]

    def async_store(self, tensor_desc: Any, coord: Any, src: Shared, cache_policy: Any = None) -> None:
        """A tile to global memory by the copy engine; a group of its own."""
        self._stored(tensor_desc, coord, src, None)

    def reductions(self) -> dict[str, Callable[..., None]]:
        """async_atomic_add and the like, by name: a tile combined with what is in global memory."""

        def of(compute: Any) -> Callable[..., None]:
            return lambda tensor_desc, coord, src: self._stored(tensor_desc, coord, src, compute)

        return {f"async_atomic_{name}": of(compute) for name, compute in _REDUCTIONS.items()}

    def _stored(self, desc: Any, coord: Any, src: Shared, reduce: Any) -> None:
        self.program.step()
        role, watcher = self.program.role(), self.session.watcher
        if watcher is not None:
            watcher.stored(desc.memory.name, self.session.calls())
        role.stores.add(store_tile(role, desc, coord, src, reduce))
        role.stores.commit()

    def store_wait(self, pendings: Any, read_only: Any = True) -> None:
        """Wait until at most so many stores of this role are in flight."""
        self.program.step()
        role = self.program.role()
        role.stores.wait(int(pendings), role.agents)

    def make_tensor_descriptor(
        self, base: Pointer, shape: Sequence[Any], strides: Sequence[Any], block_shape: Sequence[Any], layout: Any,
        padding_option: str = "zero",
    ) -> TensorDescriptor:  # fmt: skip
        """A tensor map that the kernel makes itself, of the memory that a pointer points to."""
        if isinstance(base.offset, Tensor) or len(shape) != len(strides) or len(shape) != len(block_shape):
            raise LayoutError(
                f"{self.session.here()}: a tensor map needs one pointer, and as many strides and box extents as dimensions"
            )
        first = int(base.offset)
        memory = base.memory if not first else base.memory.beginning_at(first)
        sizes, steps = [int(n) for n in shape], [int(n) for n in strides]
        return TensorDescriptor(memory, sizes, steps, block_shape, layout, str(padding_option))

    def shared_store(self, dst: Shared, value: Tensor, mbarrier: Barrier) -> None:
        """Registers to shared memory of a cluster, asynchronously; LayoutError where they do not match."""
        program = self.program
        program.step()
        if program.ctas < 2 or dst.shape != list(value.shape) or dst.dtype is not value.dtype:
            raise LayoutError(
                f"{program.here()}: an asynchronous store of {value.dtype} {list(value.shape)} to {dst.name}, {dst.dtype} "
                f"{dst.shape}, in a program of {program.ctas} CTAs (at least 2)"
            )
        program.meet(certain=False)
        bar, role = self.barrier_at(mbarrier), program.role()
        for cta in range(program.ctas):
            program.copies.append(RegistersToCluster(role, cta, bar.of_cta(cta), dst, value.a))

    # -- cp.async --------------------------------------------------------------------------------------------------------

    def cp_async(self, smem: Shared, pointer: Pointer, mask: Any = None, **_hints: Any) -> None:
        """cp.async: elements of global memory to shared memory, zeros where the mask is not set."""
        session, program = self.session, self.program
        program.step()
        shape = list(pointer.offset.shape) if isinstance(pointer.offset, Tensor) else []
        if smem.shape != shape or dtypes.of(pointer.memory.flat) is not smem.dtype:
            raise LayoutError(
                f"{session.here()}: a copy of {dtypes.of(pointer.memory.flat)} {shape} into {smem.name}, {smem.dtype} {smem.shape}"
            )
        # What the compiler does not see to be wrong shows when the copy is issued: bounds, and stores before it.
        values = hostside.load(session, pointer, mask)
        role = program.role()
        if session.watcher is not None:
            session.watcher.stored(smem.name, session.calls())
        role.gathers.add(gather(role, smem, lambda: values.a))

    def commit_group(self) -> None:
        """Close the group of cp.async."""
        self.program.step()
        self.program.role().gathers.commit()

    def wait_group(self, num_outstanding: Any = 0) -> None:
        """Wait until at most so many groups of cp.async are in flight."""
        self.program.step()
        role = self.program.role()
        role.gathers.wait(int(num_outstanding), role.agents)

    def mbarrier_arrive(self, mbarrier: Barrier, increment_count: Any = True) -> None:
        """Arrive when the cp.async that this role has issued so far have landed.

        Every thread arrives, on an arrival that it adds itself, or (``increment_count=False``) on one of those of init.
        """
        program = self.program
        program.step()
        role = program.role()
        count = 0 if increment_count else 32 * role.warps
        for agent in role.agents:
            instance = self.barrier_at(mbarrier).of_cta(agent.cta)
            program.copies.append(ArriveAfterCopies(role, agent.cta, instance, role.gathers.issued(), count))

    def fence_async_shared(self, cluster: bool = False) -> None:
        """Make ordinary stores visible to the copy engine and the tensor core."""
        self.program.charge("fence", 1.0)
        for agent in self.program.role().agents:
            agent.fence()
