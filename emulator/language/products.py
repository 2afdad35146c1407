"""What kernels ask of Blackwell's tensor cores: products, products of scaled blocks, copies to tensor memory, commits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tilecast.emulator.errors import LayoutError
from tilecast.emulator.hardware.barriers import Barrier
from tilecast.emulator.hardware.engines import Commit, CopyToTensorMemory, Product
from tilecast.emulator.hardware.memory import Shared
from tilecast.emulator.hardware.operands import check_memories, check_product
from tilecast.emulator.hardware.scaled import ScaledProduct, check_scaled
from tilecast.emulator.hardware.tensor_memory import Scales, Tmem
from tilecast.emulator.language.copies import Copies
from tilecast.emulator.trace import Commit as CommitEvent
from tilecast.emulator.trace import MatrixIssue
from tilecast.emulator.values.memory_layouts import Divided


class Products(Copies):
    """tcgen05."""

    def tcgen05_mma(
        self, a: Any, b: Shared, acc: Tmem, use_acc: Any = True, pred: Any = True, multicast: bool = False,
        mbarriers: Any = None, mbarrier_preds: Any = None,
    ) -> None:  # fmt: skip
        """A product on the tensor core, with the result in tensor memory."""
        program = self.program
        program.step()
        if not pred:
            return
        program.all_come()
        check_product(program, a, b, acc.shape)
        check_memories(program, a, b, acc)
        self._issued(a, b, acc, a.shape[1], a.dtype.name)
        program.engine.append(Product(program.role(), a, b, acc, bool(use_acc), program.products))
        self._commits(mbarriers, mbarrier_preds, (a, b) if multicast else ())

    def tcgen05_mma_scaled(
        self, a: Any, b: Any, acc: Tmem, a_scale: Scales, b_scale: Scales, a_type: Any, b_type: Any, use_acc: Any = True,
        pred: Any = True, multicast: bool = False, mbarriers: Any = None, mbarrier_preds: Any = None,
    ) -> None:  # fmt: skip
        """A product of blocks, each with its scale factor; e2m1 operands hold two elements in a byte, along K."""
        program = self.program
        program.step()
        if not pred:
            return
        program.all_come()
        formats = str(a_type), str(b_type)
        inner = check_scaled(program, a, b, acc, (a_scale, b_scale), formats)
        check_memories(program, a, b, acc)
        self._issued(a, b, acc, inner, formats[0])
        scaled = ScaledProduct(program.role(), a, b, acc, bool(use_acc), program.products, (a_scale, b_scale), formats)
        program.engine.append(scaled)
        self._commits(mbarriers, mbarrier_preds, (a, b) if multicast else ())

    def _issued(self, a: Any, b: Any, acc: Tmem, inner: int, kind: str) -> None:
        program = self.program
        program.products += 1
        program.last_product_line = program.line()
        home = "tmem" if isinstance(a, Tmem) else "smem"
        program.record(
            MatrixIssue(
                program.line(), acc.shape[0] // program.ctas, acc.shape[1], inner, kind, home, program.ctas, program.products,
                f"{acc.name} = {a.name} x {b.name}",
            )
        )  # fmt: skip

    def _commits(self, barriers: Any, wanted: Any, descs: Sequence[Any]) -> None:
        bars = list(barriers or ())
        for bar, one in zip(bars, wanted or [True] * len(bars), strict=True):
            self.tcgen05_commit(bar, one, descs)

    def tcgen05_copy(self, src: Shared, dst: Tmem) -> None:
        """Shared memory to tensor memory, in order with the products; LayoutError where the two differ."""
        program = self.program
        program.step()
        program.all_come()
        same = list(src.shape) == list(dst.shape)
        if src.dtype.bits != dst.dtype.bits or not (
            same or (isinstance(dst, Scales) and src.a.size == dst.values().size)
        ):
            raise LayoutError(
                f"{program.here()}: a copy of {src.name}, {src.dtype} {src.shape}, into {dst.name}, {dst.dtype} {dst.shape}"
            )
        program.products += 1
        program.last_product_line = program.line()
        program.engine.append(CopyToTensorMemory(program.role(), src, dst, program.products))

    def tcgen05_commit(self, bar: Barrier, pred: Any = True, descs: Sequence[Any] = ()) -> None:
        """Arrive when the products and copies so far are done; ``descs``: operands whose copies several CTAs share."""
        program = self.program
        program.step()
        if not pred:
            return
        program.meet(certain=False)
        bar = self.barrier_at(bar)
        event = CommitEvent(program.line(), [], program.products, bar.name)
        program.record(event)
        for instance in bar.instances:
            instance.require(program.agents()[instance.cta].knowledge, instance.cta, program.line())
        shared = [desc for desc in descs if isinstance(desc, Shared) and isinstance(desc.layout, Divided)]
        program.engine.append(Commit(program.role(), bar, program.products, event, shared))


def barrier_count(smems: Sequence[Any], multicast: Any, two_ctas: Any) -> int:
    """tcgen05_mma_barrier_count: how many CTAs arrive at a barrier that a product with these operands commits to."""
    if not smems or not multicast:
        return 1
    divisions = [desc.layout.cga for desc in smems]
    found = 0
    for cta in range(1 << len(divisions[0])):
        if two_ctas and cta & 1:
            continue
        found += any(all(not any(step) for bit, step in enumerate(steps) if cta >> bit & 1) for steps in divisions)
    return found
