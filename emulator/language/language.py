"""The functions of gluon.language that our kernels call, over numpy."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from tilecast.emulator.errors import LayoutError, UnsupportedError
from tilecast.emulator.far import Far, combined, far_of, frames
from tilecast.emulator.hardware.barriers import Barrier
from tilecast.emulator.hardware.engines import Wgmma
from tilecast.emulator.hardware.memory import Shared, allocate_shared
from tilecast.emulator.hardware.operands import check_memories, check_product
from tilecast.emulator.hardware.tensor_memory import allocate_tensor
from tilecast.emulator.language import hostside, launch_control, ptx, ptx_memory
from tilecast.emulator.language.parting import OneWarps
from tilecast.emulator.language.products import Products
from tilecast.emulator.language.ptx_elementwise import elementwise_or_none
from tilecast.emulator.trace import Arrive, MatrixIssue, MatrixWait
from tilecast.emulator.values import dtypes
from tilecast.emulator.values.layouts import DotOperandLayout, same_threads
from tilecast.emulator.values.registers import stays_in_threads
from tilecast.emulator.values.repeated import of_range
from tilecast.emulator.values.scalars import Int, Int64
from tilecast.emulator.values.tensors import Pointer, Tensor, joint_layout, raw

#: PTX that copies its operand, or the number of the program.
_COPY = re.compile(r"mov\.[bu]32 \$0, (\$1|%(?:ctaid|clusterid)\.x);")
#: Lines that a message about PTX quotes.
_PTX = 8


class Language(Products):
    """gluon.language for one session: plain functions of tensors."""

    # -- making tensors ------------------------------------------------------------------------------------------------

    def arange(self, start: Any, end: Any, layout: Any = None) -> Tensor:
        """Consecutive int32."""
        self.program.fits(layout, (int(end) - int(start),))
        out = Tensor(self.session, np.arange(int(start), int(end), dtype=np.int32), layout)
        out.columns = of_range(layout, out.a)
        return out

    def full(self, shape: Any, value: Any, dtype: dtypes.Dtype, layout: Any = None) -> Tensor:
        """One value everywhere."""
        self.program.fits(layout, shape)
        return Tensor(self.session, np.full([int(n) for n in shape], raw(value), dtype.numpy), layout)

    def zeros(self, shape: Any, dtype: dtypes.Dtype, layout: Any = None) -> Tensor:
        """Zero everywhere."""
        return self.full(shape, 0, dtype, layout)

    def assume(self, condition: Any) -> None:
        """What the compiler may rely on; UnsupportedError where it does not hold."""
        if not condition:
            raise UnsupportedError(f"{self.session.here()}: assumed, but it does not hold")

    def to_tensor(self, value: Any) -> Any:
        """A scalar that is not a compile-time constant any more."""
        if isinstance(value, Int):
            return value
        return Int(value) if isinstance(value, int) and not isinstance(value, bool) else value

    # -- elementwise ---------------------------------------------------------------------------------------------------

    def where(self, condition: Any, a: Any, b: Any) -> Any:
        """Selection."""
        if not any(isinstance(x, Tensor) for x in (condition, a, b)):
            return a if condition else b
        layout = joint_layout(self.session, condition, a, b)
        if any(
            isinstance(x, float) and x == float("-inf") and isinstance(y, Tensor) and y.a.ndim == 2
            for x, y in ((a, b), (b, a))
        ):
            self.session.mask_calls.add(tuple(self.session.source.calls()))
        kinds = [x.a.dtype for x in (a, b) if isinstance(x, Tensor)]
        if not kinds:
            kinds = [np.dtype(np.float32 if any(isinstance(x, float) for x in (a, b)) else np.int32)]
        values = (np.asarray(raw(x), kinds[0]) if not isinstance(x, Tensor) else x.a for x in (a, b))
        out = Tensor(self.session, np.where(raw(condition), *values), layout).computed("alu", condition, a, b)
        return out.sampled(combined("union", a, b, out.bits == 64) if out.bits else None)

    def _extreme(self, a: Any, b: Any, scalar: Any, compute: Any) -> Any:
        if not isinstance(a, Tensor) and not isinstance(b, Tensor):
            best = scalar(raw(a), raw(b))
            if isinstance(best, int):
                wide = isinstance(a, Int64) or isinstance(b, Int64)
                return (Int64(best) if wide else Int(best)).sampled(combined(scalar.__name__, a, b, wide))
            return best
        layout = joint_layout(self.session, a, b)
        out = Tensor(self.session, compute(raw(a), raw(b)), layout).computed("alu", a, b)
        return out.sampled(combined(scalar.__name__, a, b, out.bits == 64) if out.bits else None)

    def minimum(self, a: Any, b: Any) -> Any:
        """The smaller; the number where one is NaN."""
        return self._extreme(a, b, min, np.fmin)

    def maximum(self, a: Any, b: Any) -> Any:
        """The larger; the number where one is NaN."""
        return self._extreme(a, b, max, np.fmax)

    def exp2(self, x: Tensor) -> Tensor:
        """2^x, on the special function unit."""
        with np.errstate(all="ignore"):
            out = Tensor(self.session, np.exp2(x.a), x.layout)
        out.charge("mufu", out.a.size, x)
        return out

    def log2(self, x: Tensor) -> Tensor:
        """Logarithm, on the special function unit."""
        with np.errstate(all="ignore"):
            out = Tensor(self.session, np.log2(x.a), x.layout)
        out.charge("mufu", out.a.size, x)
        return out

    def cdiv(self, a: Any, b: Any) -> Any:
        """Division rounded up."""
        return (a + b - 1) // b

    def reshape(self, x: Tensor, shape: Any) -> Tensor:
        """Other extents."""
        return x.reshape(shape)

    def convert_layout(self, x: Tensor, layout: Any, assert_trivial: bool = False) -> Tensor:
        """The values in other threads; LayoutError when the compiler was told that nothing moves and something would."""
        if assert_trivial and not same_threads(x.layout, layout, x._a.shape):
            raise LayoutError(f"{self.session.here()}: {x.layout!r} to {layout!r} moves values between threads")
        self.program.fits(layout, x._a.shape)
        out = x.like(x.a, layout).sampled(x.far)
        if not stays_in_threads(x.layout, layout, x._a.shape):
            # The compiler takes the values through shared memory.
            for pipe in ("smem_store", "barrier", "smem_load"):
                out.charge(pipe, 1.0 if pipe == "barrier" else out._a.nbytes)
        return out

    def inline_asm_elementwise(
        self,
        asm: Any,
        constraints: Any,
        args: Sequence[Any],
        dtype: Any = dtypes.FP32,
        is_pure: bool = True,
        pack: Any = 1,
    ) -> Any:
        """Inline PTX on ``pack`` neighbouring elements at a time; UnsupportedError says where its text comes from."""
        try:
            return self._inline(asm, constraints, args, dtype, pack)
        except ptx.UnknownError as error:
            behind = self.session.source.values(self.session.source.calls(), _PTX, 0)
            quoted = "".join(f"\n               {self.session.source.quote(line)[:100]}" for line in behind)
            raise UnsupportedError(f"{self.session.here()}: {error}; it comes from{quoted}") from None

    def _inline(self, asm: Any, constraints: Any, args: Sequence[Any], dtype: Any, pack: Any) -> Any:
        text, outputs, size = str(asm), str(constraints).count("="), int(pack)
        number, lasting = self.program.number, self.program.role().registers
        if ptx_memory.touches_memory(text):
            self.program.step()
            return Int(ptx_memory.run(self.program, text, outputs, args))
        if not any(isinstance(a, Tensor) for a in args):
            if self.program.ctas > 1 and "%ctaid" in text:
                raise UnsupportedError(
                    f"{self.session.here()}: %ctaid differs between the CTAs of a cluster: use %clusterid"
                )
            registers = [np.array([raw(a)], dtype.numpy) for a in args]
            own = bool(lasting) and ptx.reads_lasting(text, lasting)
            out = ptx.run(text, registers, outputs, number, lasting)[0].view(dtype.numpy)[0]
            if own and isinstance(dtype.numpy(0), np.integer):
                return OneWarps(out).found_by(self.program)
            return Int(out).sampled(self._copied(text, args)) if isinstance(dtype.numpy(0), np.integer) else float(out)
        if (text, outputs, size) not in self.session.ptx:
            self.session.ptx[text, outputs, size] = self.session.source.line()
        layout = joint_layout(self.session, *args)
        # A number keeps its own type, whatever the result's.
        numbers = [raw(a) if not isinstance(a, Tensor) else None for a in args]
        given = [a.a if isinstance(a, Tensor) else np.asarray(x, np.float32 if isinstance(x, float) else dtype.numpy)
                 for a, x in zip(args, numbers, strict=True)]  # fmt: skip
        made = elementwise_or_none(text, outputs, size, given, dtype)
        if made is None:
            arrays = np.broadcast_arrays(*given)
            # Registers of a group as rows.
            registers = [np.ascontiguousarray(a).reshape(-1, size).T for a in arrays]
            results = ptx.run(text, registers, outputs, number, lasting)
            columns = [result.view(dtype.numpy) for result in results]
            made = np.empty((len(columns[0]), outputs), dtype.numpy)
            for place, column in enumerate(columns):
                made[:, place] = column
            made = made.reshape(arrays[0].shape)
        out_tensor = Tensor(self.session, made, layout)
        shape = out_tensor.a.shape
        needs = tuple([a.made for a in args if isinstance(a, Tensor)])
        steps = [
            self.session.charge(pipe, count * made.size / size, shape, layout, needs)
            for pipe, count in ptx.instructions(text).items()
        ]
        # The pipes work on different registers side by side.
        out_tensor.made = steps[0] if len(steps) == 1 else self.session.charge("all", 0.0, shape, layout, tuple(steps))
        return out_tensor

    def _copied(self, text: str, args: Sequence[Any]) -> Far | None:
        """Intervals of what inline PTX makes of a number: of a plain copy, and of the program's number; None of anything else."""
        found = _COPY.fullmatch(text.strip())
        if found is None or self.session.larger is None:
            return None
        return far_of(args[0]) if found.group(1) == "$1" else self.session.larger.program_id(0)

    # -- memory ----------------------------------------------------------------------------------------------------------

    def store(self, pointer: Pointer, value: Any, mask: Any = None, **_hints: Any) -> None:
        """To global memory."""
        hostside.store(self.session, pointer, value, mask)

    def load(self, pointer: Pointer, mask: Any = None, other: Any = 0, **_hints: Any) -> Any:
        """From global memory."""
        return hostside.load(self.session, pointer, mask, other)

    def allocate_shared_memory(self, element_ty: dtypes.Dtype, shape: Any, layout: Any, value: Any = None) -> Any:
        """Shared memory, or barriers (int64)."""
        made = allocate_shared(self.program, element_ty, shape, layout)
        if value is not None:
            made.store(value)
        return made

    def allocate_tensor_memory(self, element_ty: dtypes.Dtype, shape: Any, layout: Any, value: Any = None) -> Any:
        """Tensor memory."""
        return allocate_tensor(self.program, element_ty, shape, layout, value)

    # -- program ---------------------------------------------------------------------------------------------------------

    def program_id(self, axis: Any) -> Int:
        """Number of the program."""
        number, grid = self.program.number, self.program.grid
        for extent in grid[: int(axis)]:
            number //= extent
        far = self.session.larger.program_id(int(axis)) if self.session.larger is not None else None
        return Int(number % grid[int(axis)] if int(axis) < len(grid) else 0).sampled(far)

    def num_programs(self, axis: Any) -> Int:
        """How many there are."""
        grid = self.program.grid
        far = self.session.larger.num_programs(int(axis)) if self.session.larger is not None else None
        return Int(grid[int(axis)] if int(axis) < len(grid) else 1).sampled(far)

    def barrier(self, cluster: Any = False) -> None:
        """The warps of a role meet.  ``cluster``: those of all its CTAs."""
        self.program.step()
        self.program.charge("barrier", 1.0)
        self.program.meet()
        if cluster:
            self.cluster_barrier()

    def cluster_barrier(self, relaxed: Any = False) -> None:
        """The CTAs of a cluster meet; each knows what the others have done (``relaxed``: none does)."""
        agents = self.program.role().agents
        self.program.all_come()
        if not relaxed:
            self.program.meet()
            known = [agent.release() for agent in agents]
            for agent in agents:
                for other in known:
                    agent.knowledge.join(other)

    def warp_specialize(self, *given: Any) -> Any:
        """Each part a role of its own; returns what the first one does.

        (functions and arguments, warps, registers), or as releases before 3.6 took them: arguments of the first part and
        the part, arguments of all others and those, warps, registers.
        """
        if callable(given[1]):
            mine, first, theirs, others, warps, registers = given
            parts = [(first, mine), *((part, theirs) for part in others)]
        else:
            parts, warps, registers = (*given, None)[:3]
        if len(warps) != len(parts) - 1:
            raise LayoutError(
                f"{self.session.here()}: {len(parts)} partitions need {len(parts) - 1} warp counts, got {len(warps)}"
            )
        budgets = None if registers is None else [int(n) for n in registers]
        (first, arguments), returned = parts[0], []

        def kept(*values: Any) -> None:
            returned.append(first(*values))

        kept.name = getattr(first, "name", "role")  # type: ignore[attr-defined]
        self.program.start_roles([(kept, arguments), *parts[1:]], [int(n) for n in warps], budgets)
        return returned[0]

    def try_cancel(self, result: Shared, barrier: Any) -> None:
        """Ask for a program that has not started."""
        launch_control.try_cancel(self.program, result, self.barrier_at(barrier))

    def load_result(self, src: Shared) -> launch_control.Answer:
        """The answer, in registers."""
        return launch_control.Answer(self.program, int(src.load().a[0]), frames())

    # -- barriers --------------------------------------------------------------------------------------------------------

    def allocate_mbarrier(self, batch: Any = None, two_ctas: bool = False) -> Any:
        """Barriers, one in each CTA or one for a pair."""
        shape = [1] if batch is None else [int(batch), 1]
        return allocate_shared(self.program, dtypes.INT64, shape, None, bool(two_ctas))

    def init(self, bar: Any, count: Any) -> None:
        """Set the count of arrivals."""
        self.barrier_at(bar, True).init(int(count))

    def invalidate(self, bar: Any) -> None:
        """Give a barrier's memory back."""
        self.barrier_at(bar).invalidate()

    def wait(self, bar: Barrier, phase: Any, pred: Any = True, deps: Any = ()) -> None:
        """Wait for the phase of this parity."""
        bar = self.barrier_at(bar)
        if phase not in (0, 1):
            raise LayoutError(f"{self.session.here()}: a parity is 0 or 1, got {int(phase)}")
        if pred and not self.session.leaves_out(bar.name):
            self.program.wait(bar, int(phase))

    def _routes(self, bar: Barrier, from_cta: Any) -> list[tuple[Any, Any]]:
        """(barrier, who arrives there) for each CTA: itself, or the one whose number keeps the bits of ``from_cta``."""
        agents = self.program.role().agents
        bar = self.barrier_at(bar)
        kept = len(agents) - 1 if from_cta is None else int(from_cta)
        return [(bar.of_cta(agent.cta), agents[agent.cta & kept]) for agent in agents]

    def arrive(self, bar: Barrier, count: Any = 1, pred: Any = True, from_cta: Any = None) -> None:
        """Arrive, from each CTA."""
        program = self.program
        program.step()
        if not pred:
            return
        # One thread arrives, when all warps have come this far.
        program.meet()
        keys = []
        for instance, agent in self._routes(bar, from_cta):
            keys.append(instance.arrive(int(count), agent.release(), program.line(), agent.cta))
        bar = self.barrier_at(bar)
        program.record(Arrive(program.line(), keys[0], bar.name, bar.shared and program.ctas > 1))

    def expect(self, bar: Barrier, bytes_per_cta: Any, pred: Any = True, from_cta: Any = None) -> None:
        """Arrive, and announce bytes that copies will bring."""
        program, line = self.program, self.program.line()
        program.step()
        if not pred:
            return
        program.meet()
        keys = []
        for instance, agent in self._routes(bar, from_cta):
            instance.expect(int(bytes_per_cta), agent, line)
            keys.append(instance.arrive(1, agent.release(), line, agent.cta))
        program.record(Arrive(line, keys[0], self.barrier_at(bar).name, False))

    # -- matrix products -------------------------------------------------------------------------------------------------

    def warpgroup_mma(
        self, a: Any, b: Shared, acc: Tensor, use_acc: Any = True, precision: Any = None, max_num_imprecise_acc: Any = None,
        is_async: bool = False,
    ) -> Tensor:  # fmt: skip
        """A product on the tensor core, with the result in registers that are not there before a wait."""
        program = self.program
        program.step()
        role = program.role()
        if self.session.tensor_kind not in ("", "wgmma"):
            raise UnsupportedError(
                f"{self.session.here()}: warpgroup_mma on a machine whose tensor cores are {self.session.tensor_kind}: pass a "
                "Hopper machine"
            )
        program.all_come()
        check_product(program, a, b, acc.shape)
        check_memories(program, a, b)
        if isinstance(a, Tensor) and (not isinstance(a.layout, DotOperandLayout) or a.layout.parent != acc.layout):
            raise LayoutError(
                f"{self.session.here()}: the left operand in registers needs the layout of {acc.layout!r}"
            )
        role.wgmma_issued += 1
        there, columns, inner = self.session.columns_there, b.shape[1], a.shape[1]
        if isinstance(a, Tensor):
            home, columns = "register", there.get(columns, columns)
        else:
            home, inner = "smem", there.get(inner, inner)
        program.record(
            MatrixIssue(
                program.line(), a.shape[0], columns, inner, a.dtype.name, home, 1, role.wgmma_issued, f"wgmma {b.name}",
            )
        )  # fmt: skip
        issued = Wgmma(role, a, b, acc, bool(use_acc), role.wgmma_issued)
        role.wgmma.append(issued)
        out = Tensor(self.session, np.broadcast_to(np.float32(np.nan), [int(n) for n in acc.shape]), acc.layout)
        out.pending = issued
        return out if is_async else self.warpgroup_mma_wait(0, [out])

    def warpgroup_mma_wait(self, num_outstanding: Any = 0, deps: Any = None) -> Any:
        """Wait until at most so many products are in flight; returns ``deps``."""
        program = self.program
        program.step()
        role = program.role()
        last = program.complete_wgmma(role, int(num_outstanding))
        known = role.agents[0].knowledge
        known.epochs[role.wgmma_stream] = max(known.epochs[role.wgmma_stream], last)
        program.record(MatrixWait(program.line(), last))
        if deps is None:
            raise LayoutError(
                f"{self.session.here()}: warpgroup_mma_wait needs deps, the results that later lines use: the compiler "
                "orders them after the wait by nothing else"
            )
        arrived = tuple(dep.arrived() if isinstance(dep, Tensor) else dep for dep in deps)
        return arrived[0] if len(arrived) == 1 else arrived
