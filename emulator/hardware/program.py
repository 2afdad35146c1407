"""One program (a CTA, or a pair): its roles as coroutines, its memories, and what they tell each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tilecast.emulator.errors import (
    AllocationError,
    LayoutError,
    RaceError,
    UnsupportedError,
)
from tilecast.emulator.hardware.barriers import Barrier
from tilecast.emulator.hardware.clocks import (
    COPY,
    FIRST_WGMMA,
    MATRIX_ENGINE,
    MAX_ROLES,
    STREAM_SHIFT,
    Agent,
)
from tilecast.emulator.hardware.columns import Columns
from tilecast.emulator.hardware.engines import Copy
from tilecast.emulator.hardware.liveness import Liveness
from tilecast.emulator.hardware.role import Role
from tilecast.emulator.hardware.schedule import EFFECT, Schedule
from tilecast.emulator.hardware.shadow import Access, Shadow
from tilecast.emulator.hardware.stuck import deadlock
from tilecast.emulator.session import NO_STEP, Session
from tilecast.emulator.trace import Arrive, CopyIssue, Event, Fork, Join, MatrixIssue, ProgramTrace, Step, Wait, Work
from tilecast.emulator.trace import Commit as CommitEvent
from tilecast.emulator.values import legal
from tilecast.emulator.values.wellformed import wrong_rank

#: Elements, and products of elements, that take about as long to emulate as an event does.
_COUNTED, _MULTIPLIED = 1 << 15, 1 << 18
#: How many times the columns of an SM the allocations of a program may come to, live or not.
_ROOM = 16


class Program(Schedule):
    """State of one running program; see the module docstring."""

    def __init__(self, session: Session, number: int, grid: Sequence[int], ctas: int) -> None:
        super().__init__(session, number)
        self.grid, self.ctas = tuple(grid), ctas
        self.products = 0
        #: Whether the CTAs multiply in pairs: known once tensor memory for two of them is allocated.
        self.paired = False
        self.last_product_line = 0
        #: (line, first cell of shared memory) of every copy, by number, in each CTA.
        self.issued_copies: list[dict[int, tuple[int, int]]] = [{} for _ in range(ctas)]
        self._copy_number = 0
        self._barriers = 0
        self.live = Liveness()
        #: Barriers in shared memory that was allocated as integers, by cell.
        self.barriers_at: dict[int, Barrier] = {}
        #: Columns of tensor memory that a CTA has here: what is not live together may be more than an SM has.
        self.tmem_room = _ROOM * session.tmem_columns
        self._columns, self.live_columns = Columns(self.tmem_room), Liveness()
        self.smem = Shadow(self, "shared memory", has_proxies=True, used=self.live.use)
        self.tmem = Shadow(
            self, "tensor memory", has_proxies=False, used=lambda cell: self.live_columns.use(cell % self.tmem_room)
        )
        self.tmem.grow(self.tmem_room * ctas)
        self.tmem_bytes = np.full((128 * ctas, 4 * session.tmem_columns), 0xFF, np.uint8)
        #: Scale factors in tensor memory by first byte, rows and columns.
        self.scales: dict[tuple[int, int, int], Any] = {}
        self._cell_owner = np.zeros(0, np.int8)
        #: Steps so far.
        self.steps = 0
        #: Places, and their callers', where flags of other programs were read; the last one last.
        self.flags_read: dict[tuple[int, ...], None] = {}

    # -- what memory and engines ask -------------------------------------------------------------------------------

    def here(self) -> str:
        """The same, quoted."""
        return self.session.here()

    def target(self) -> str:
        """Name that the running statement assigns to."""
        return self.session.source.target() or "an unnamed allocation"

    def actor(self, code: int) -> str:
        """Who an event code belongs to."""
        if code >= COPY:
            return "a copy"
        stream = code >> STREAM_SHIFT
        if stream == MATRIX_ENGINE:
            return "a matrix product"
        width = max(self.ctas, 2)
        role = self.roles[stream - FIRST_WGMMA if stream >= FIRST_WGMMA else stream // width]
        if stream >= FIRST_WGMMA:
            return f"a wgmma of {role.name}"
        return role.name + (f" (CTA {stream % width})" if self.ctas > 1 else "")

    def too_weak(self, code: int) -> str:
        """For a message about an event that the other side does not know of: the wait that left it in flight; empty without one."""
        stream, number = code >> STREAM_SHIFT, code & ((1 << STREAM_SHIFT) - 1)
        if code >= COPY or not FIRST_WGMMA <= stream < MATRIX_ENGINE:
            return ""
        line = self.roles[stream - FIRST_WGMMA].left_by.get(number, 0)
        return f"; the wait at {self.session.source.quote(line)} leaves that product in flight" if line else ""

    def agents(self) -> list[Agent]:
        """The running role in each CTA."""
        return self.role().agents

    def warps(self) -> int:
        """Warps of the running role."""
        return self.role().warps

    def fits(self, layout: Any, shape: Sequence[int] | None = None) -> Any:
        """A register layout; LayoutError where it is none, is made for another number of warps than the running role has, or for
        another number of dimensions than a tensor of ``shape``."""
        if layout is not None and self.current is not None:
            complaint = legal.wrong_for_role(layout, self.current.warps)
            if not complaint and shape is not None:
                complaint = wrong_rank(layout, shape)
            if complaint:
                raise LayoutError(f"{self.here()}: {complaint}")
        return layout

    def accesses(self) -> list[tuple[int, Access]]:
        """The running role's access to memory, CTA by CTA."""
        role, line = self.role(), self.line()
        return [
            (
                a.cta,
                Access(a.code, a.index, a.knowledge, line, role.name + (f" (CTA {a.cta})" if self.ctas > 1 else "")),
            )
            for a in role.agents
        ]

    def new_barrier(self, name: str, homes: Sequence[int]) -> Barrier:
        """A barrier with a number of its own; ``homes``: of each CTA, the one in whose memory its barrier is."""
        self._barriers += 1
        return Barrier(self, name, self._barriers, homes)

    def reserve_smem(self, size: int, name: str, lasting: bool = False) -> None:
        """Account for the next cells of shared memory; ``lasting``: barriers, which have no cells and live to the end."""
        place = (self.current.index if self.current else 0, *self.session.source.calls(), *self.session.unrolled)
        self.live.allocate(size, name, self.here(), place, None if lasting else self.smem.cells)

    def take_columns(self, columns: int, name: str, buffer: int = 0) -> int:
        """The first of so many columns of tensor memory; AllocationError when they run out.

        What a loop allocates again is where it was the last time; ``buffer``: which of those that one statement allocates.
        """
        source = self.session.source
        place = (self.current.index if self.current else 0, columns, buffer, *source.calls(), *self.session.unrolled)
        again = self._columns.again(place)
        if again is not None:
            return again
        first = self._columns.take(columns, place)
        if first is None:
            raise AllocationError(
                f"{self.here()}: {name} brings tensor memory to {self._columns.with_more(columns)} columns, an SM has {self.session.tmem_columns}"
            )
        if buffer:
            self.live_columns.more(columns, first)
        else:
            self.live_columns.allocate(columns, name, self.here(), place, first)
        more = 4 * (first + columns) - self.tmem_bytes.shape[1]
        if more > 0:
            self.tmem_bytes = np.pad(self.tmem_bytes, ((0, 0), (0, more)), constant_values=0xFF)
        for cta in range(self.ctas):
            start = cta * self.tmem_room + first
            self.tmem.call(start, start + columns, columns, name + (f" (CTA {cta})" if self.ctas > 1 else ""))
        return first

    def own_cells(self, owners: Any) -> None:
        """CTA of new cells of shared memory."""
        self._cell_owner = np.append(self._cell_owner, owners)

    def cta_of_cell(self, cells: Any) -> Any:
        """CTA of cells of shared memory."""
        return self._cell_owner[cells]

    def next_copy(self) -> int:
        """A number for a copy."""
        self._copy_number += 1
        return self._copy_number

    # -- the warps of a role ------------------------------------------------------------------------------------------

    def meet(self, certain: bool = True) -> None:
        """The warps of the running role wait for one another here, or (``certain=False``) may, as the compiler decides."""
        role = self.role()
        if role.warps == 1:
            return
        if certain:
            self.all_come()
        role.unmet.meet()
        for agent in role.agents:
            agent.meet()

    def all_come(self) -> None:
        """BarrierError where the running statement, which takes all warps of the role, is reached by some of them only."""
        role, source = self.role(), self.session.source
        if role.unmet.alone:
            above = [condition for place in source.calls() for condition in source.conditions(place)]
            role.unmet.all_come(self.here(), above, source.quote, role.name)

    def decides_alone(self) -> None:
        """The running line branches on what each warp found out for itself."""
        role = self.role()
        if role.warps > 1:
            role.unmet.alone.add(self.line())

    def touch_global(self, memory: Any, places: Any, warps: Any, stores: bool) -> None:
        """The running role loads or stores elements, each by one of its ``warps`` (None: not known)."""
        role = self.role()
        if role.warps > 1 and warps is not None and places.size:
            role.unmet.access(memory, places, warps, self.line(), stores, self.session.source.quote)

    # -- trace -------------------------------------------------------------------------------------------------------

    def charge(
        self, pipe: str, count: float, shape: tuple[int, ...] = (), layout: Any = None, operands: tuple[int, ...] = (),
        axis: int | None = None,
    ) -> int:  # fmt: skip
        """Account for a step of the running role; its number."""
        if self.current is None:
            return NO_STEP
        self.session.spend(count / _COUNTED)
        if pipe == "barrier":
            self.current.touched.clear()
        if self._segment is None:
            self._segment = Work(self.line())
            self.current.trace.events.append(self._segment)
        number = self.steps = self.steps + 1
        self._segment.steps.append(Step(number, pipe, count / self.ctas, shape, layout, operands, axis))
        return number

    def record(self, event: Event) -> None:
        """Append to the trace of the running role."""
        self.session.spend(event.m * event.n * event.k / _MULTIPLIED if isinstance(event, MatrixIssue) else 0.0)
        self._segment = None
        role = self.role()
        role.trace.events.append(event)
        role.unmet.signalled |= isinstance(event, (Arrive, CommitEvent, CopyIssue))
        if isinstance(event, Arrive):
            role.touched.clear()

    def touch_shared(self, memory: int, stores: bool) -> None:
        """The running role loads or stores of an allocation of shared memory.

        Triton's compiler has its warps meet before one of two accesses to the same allocation stores, whichever threads have the
        elements (read in the PTX of 3.9: `test_what_triton_orders`).
        """
        role = self.role()
        if role.warps == 1:
            return
        stored = role.touched.get(memory)
        if stored is not None and (stores or stored):
            self.charge("barrier", 1.0)
        role.touched[memory] = stores or role.touched.get(memory, False)

    # -- roles and barriers ------------------------------------------------------------------------------------------

    def wait(self, bar: Barrier, parity: int) -> None:
        """mbarrier.wait: each CTA at its own barrier, at a shared one only the leader."""
        role = self.role()
        instances = bar.instances
        line = self.line()
        self.step()
        if role.unmet.signalled:
            # The compiler has the warps meet between an arrival and a wait that may be for the same barrier.
            self.meet(certain=False)
        for instance in instances:
            instance.require(role.agents[instance.cta].knowledge, instance.cta, line)
        targets = [instance.target(parity) for instance in instances]
        role.waiting = (instances, parity, line)
        self.block(lambda: all(instance.passed(parity) for instance in instances))
        for instance, target in zip(instances, targets, strict=True):
            agent = role.agents[instance.cta]
            instance.check(target, line)
            instance.seen[agent.index] = instance.completed - 1
            told = instance.learnt(agent, parity)
            if told is not None:
                agent.knowledge.join(told)
        self.record(Wait(line, (bar.number, instances[0].completed - 1), bar.name))

    def start_roles(
        self, parts: Sequence[tuple[Callable[..., Any], Sequence[Any]]], warps: Sequence[int], registers: Any = None
    ) -> None:
        """warp_specialize: the first part on the running role, each other one on a role of its own; then wait for all."""
        budget = legal.over_budget(warps, registers, self.role().warps)
        if budget:
            raise AllocationError(f"{self.here()}: {budget}")
        parent, line = self.role(), self.line()
        room = min(MAX_ROLES, FIRST_WGMMA // self.ctas)
        if len(self.roles) - 1 + len(parts) > room:
            raise UnsupportedError(f"{self.here()}: more than {room} partitions in a cluster of {self.ctas} CTAs")
        names = [getattr(fn, "name", "role") for fn, _ in parts]
        labels = [n if names.count(n) == 1 else f"{n} {names[:i].count(n)}" for i, n in enumerate(names)]
        # Both CTAs of a pair meet before the partitions start and after they end.
        known = [agent.release() for agent in parent.agents]
        workers = []
        for (fn, args), label, width in zip(parts[1:], labels[1:], warps, strict=True):
            role = Role(self, len(self.roles), label, width, lambda fn=fn, args=args: fn(*args))  # type: ignore[misc]
            workers.append(role)
            self.roles.append(role)
        for role in (parent, *workers):
            for agent in role.agents:
                for other in known:
                    agent.knowledge.join(other)
        indices = tuple(role.index for role in workers)
        self.record(Fork(line, indices))
        self.live.partitions(run=True)
        name, parent.name = parent.name, labels[0]
        parent.trace.name = labels[0]
        fn, args = parts[0]
        fn(*args)
        self.block(lambda: all(role.done for role in workers))
        parent.name = name
        for agent in parent.agents:
            for role in (parent, *workers):
                for other_agent in role.agents:
                    agent.knowledge.join(other_agent.knowledge)
        self.record(Join(line, indices))
        self.live.partitions(run=False)

    def run(self, kernel: Callable[[], Any], name: str) -> ProgramTrace:
        """Run the kernel to its end; DeadlockError when no role can go on."""
        self.roles.append(Role(self, 0, name, self.session.num_warps, kernel))
        while not all(role.done for role in self.roles):
            ready = [role for role in self.roles if not role.done and (role.blocked is None or role.blocked())]
            if not self.late and (not ready or self.random.random() < EFFECT) and self._random_effect():
                continue
            if not ready and not self._forced_effect() and not self._others_go_on():
                raise deadlock(self.roles, self.session.source, self.number, self.session.explains)
            if ready:
                role = ready[0] if self.late else self._chosen(ready)
                role.blocked = None
                self.current, self._segment = role, None
                role.coroutine.switch()
                self.current = None
            if self._courteous and self.session.give_way is not None:
                self.session.give_way(lambda: True)
                self._courteous = False
        while self._forced_effect():
            pass
        for role in self.roles:
            self.complete_wgmma(role, 0)
        for transfer in self._transfers():
            transfer.take_effect()
        self._check_end()
        return ProgramTrace(self.number, tuple(role.trace for role in self.roles), self.ctas)

    def _check_end(self) -> None:
        """RaceError when a copy or product may still be in flight as the program ends and gives up its memory; AllocationError
        when it needs more shared or tensor memory than there is.
        """
        for live, limit, memory, unit, owner in (
            (self.live, self.session.smem_limit, "shared memory", "bytes", "a CTA"),
            (self.live_columns, self.session.tmem_columns, "tensor memory", "columns", "an SM"),
        ):
            if (over := live.over(limit)) is not None:
                raise AllocationError(f"{over[2]}: {over[1]} brings {memory} to {over[0]} {unit}, {owner} has {limit}")
        for agent in self.roles[0].agents:
            known, quote = agent.knowledge, self.session.source.quote
            for number, (line, cell) in self.issued_copies[agent.cta].items():
                if not known.has(COPY + number):
                    raise RaceError(
                        f"program {self.number} ends while the copy issued at {quote(line)} may be in flight ({self.smem.place(cell)})"
                    )
            if known.epochs[MATRIX_ENGINE] < self.products:
                raise RaceError(
                    f"program {self.number} ends while the matrix product issued at {quote(self.last_product_line)} may be in flight"
                )

    def coming(self, memory: Any, cell: int) -> str:
        """For a message about a cell of shared memory that was never written: the copy on its way, and the barrier that counts it."""
        for copy in self.copies if memory is self.smem else ():
            if isinstance(copy, Copy) and cell in copy.target.cells_of(copy.cta):
                quote, bar = self.session.source.quote, copy.bar
                return (
                    f": the copy issued at {quote(copy.line)} is on its way, and {bar.name} counts its bytes, "
                    f"expected at {quote(bar.expect_line)}"
                )
        return ""
