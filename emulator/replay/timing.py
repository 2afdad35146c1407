"""The second route to a kernel's time: replay what its roles executed, with the costs of a machine.

Roles go in order; products run on the tensor core in issue order, copies move one after the other, as machine code is simulated
(`model.compiled.sm`), and running operations share the units fairly (`sharing`).  wgmma goes instruction by instruction: a role whose next one finds no room in
the queue stands still, so that others come in between.  Nothing here knows the pipeline: order, counts and dependences come from the executed source, costs from
the machine file.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from tilecast.emulator.errors import EmulationError
from tilecast.emulator.replay import costs
from tilecast.emulator.replay.sharing import Load, speeds
from tilecast.emulator.replay.timeline import Span, Timeline
from tilecast.emulator.replay.work import work_load
from tilecast.emulator.trace import (
    Arrive,
    Commit,
    CopyIssue,
    Event,
    Fork,
    Join,
    Key,
    MatrixIssue,
    MatrixWait,
    ProgramTrace,
    RoleTrace,
    Wait,
    Work,
)
from tilecast.model.machine.machine import Machine
from tilecast.model.sm.fluid import EPS_CYCLES as _EPS
from tilecast.model.sm.fluid import advance

#: What `replay` can leave out.
RESCALE, COPY_LATENCY, MEETINGS = "rescale", "copy latency", "barriers before arrivals"
ROOM, BESIDE = "room for few wgmma", "slower arithmetic beside wgmma"
COPY_ORDER = "the order of copies"
PORT = "loads in between the reads of products"
_NEVER = float("inf")


@dataclass(slots=True)
class _Role:
    trace: RoleTrace
    started: bool = False
    place: int = 0
    free: float = 0.0
    busy: bool = False
    #: Whether it stands at a barrier.
    stood: bool = False
    #: When each of its own products is done and may be touched.
    products: dict[int, float] = field(default_factory=dict)
    #: Of wgmma: instructions of the product that it issues now which found no room yet.
    to_issue: int = 0
    issuing: tuple[MatrixIssue, _Product] | None = None
    #: Which one its last instruction was, of all.
    issued: int = 0

    @property
    def done(self) -> bool:
        return self.started and not self.busy and not self.to_issue and self.place >= len(self.trace.events)


@dataclass(slots=True)
class _Running:
    load: Load
    left: float
    start: float
    role: _Role
    event: Event
    #: Of wgmma: instructions of the same product that are not done.
    product: _Product | None = None


@dataclass(slots=True)
class _Product:
    """A product of wgmma that goes instruction by instruction."""

    left: int
    start: float = -1.0


class _Replay:
    """State of one replay."""

    def __init__(self, trace: ProgramTrace, machine: Machine, without: Collection[str]) -> None:
        self.machine, self.without, self.ctas = machine, without, trace.ctas
        self.roles = {role.index: _Role(role) for role in trace.roles}
        self.spans: list[Span] = []
        self.active: list[_Running] = []
        self.queue: deque[_Running | tuple[Commit, _Role]] = deque()
        self.last_product: tuple[float, float] = (0.0, 0.0)
        self.engine_busy = False
        #: Copies that were asked for, the oldest of which moves.
        self.copies: deque[_Running] = deque()
        self.copying = False
        #: Whether the first product has begun.
        self.multiplied = False
        #: When each phase completes: contributions still to come, and the latest so far.
        self.missing: dict[Key, int] = {}
        self.complete: dict[Key, float] = {}
        for event in (event for role in trace.roles for event in role.events):
            for key in _contributions(event):
                self.missing[key] = self.missing.get(key, 0) + 1
        self.speeds: dict[tuple[Load, ...], tuple[float, ...]] = {}
        self.loads: dict[object, Load] = {}
        self.sync = costs.synchronisation(machine)
        #: Of wgmma: instructions that may be under way (0: products go whole), those that are, and all so far.
        self.depth = (
            int(machine.get("tensor.mma_queue_depth", 0.0))
            if machine.tensor_kind == "wgmma" and ROOM not in without
            else 0
        )
        self.under_way = self.count = 0

    def contribute(self, key: Key, when: float) -> None:
        """One arrival of a phase."""
        self.missing[key] -= 1
        self.complete[key] = max(self.complete.get(key, 0.0), when)

    def ready(self, key: Key) -> float:
        """When a wait for the phase returns; infinite while arrivals are to come."""
        if key[1] < 0:
            return 0.0
        return _NEVER if self.missing.get(key, 1) else self.complete[key]

    def product(self, issue: MatrixIssue) -> Load:
        """One object for products that are alike, so that shares are computed once."""
        key = (issue.m, issue.n, issue.k, issue.dtype, issue.a_home, issue.pair)
        if key not in self.loads:
            self.loads[key] = costs.product_load(issue, self.machine)
        return self.loads[key]

    def whole(self, issue: MatrixIssue, one: Load) -> Load:
        """All instructions of a wgmma product in a row."""
        key = ("whole", id(one), issue.m, issue.k)
        if key not in self.loads:
            self.loads[key] = one.times(costs.wgmma_instructions(issue))
        return self.loads[key]

    def copy(self, issue: CopyIssue) -> Load:
        """The same of copies."""
        if issue.bytes not in self.loads:
            self.loads[issue.bytes] = costs.copy_load(issue, self.machine)
        return self.loads[issue.bytes]

    # -- roles ---------------------------------------------------------------------------------------------------------

    def advance(self, role: _Role, now: float) -> bool:
        """Let a role take its next step if it can at ``now``; whether it did."""
        if not role.started or role.busy or role.free > now + _EPS:
            return False
        if role.to_issue:
            return self._issue_more(role, now)
        if role.place >= len(role.trace.events):
            return False
        event = role.trace.events[role.place]
        if isinstance(event, (Wait, MatrixWait, Join)) and not self._wait(role, event, now):
            return False
        role.place += 1
        if isinstance(event, Work):
            if RESCALE in self.without and costs.is_rescale(event):
                return True
            load = self._work(role, event)
            if load.cycles > _EPS:
                role.busy = True
                self.active.append(_Running(load, load.cycles, now, role, event))
        elif isinstance(event, Arrive):
            role.free = now + self.sync.arrival(1 if MEETINGS in self.without else role.trace.warps)
            self.contribute(event.key, role.free + (self.sync.across if event.across else self.sync.handover))
        elif isinstance(event, (CopyIssue, MatrixIssue)):
            self._issue(role, event, now)
        elif isinstance(event, Commit):
            self.queue.append((event, role))
        elif isinstance(event, Fork):
            for index in event.roles:
                self.roles[index].started, self.roles[index].free = True, now
        return True

    def _work(self, role: _Role, event: Work) -> Load:
        events = role.trace.events
        hands_over = role.place < len(events) and not isinstance(events[role.place], (Wait, MatrixWait))
        return work_load(event.steps, role.trace.warps, self.ctas, self.machine, hands_over)

    def _wait(self, role: _Role, event: Wait | MatrixWait | Join, now: float) -> bool:
        """Whether the wait is over; otherwise when to look again, where that is known."""
        if isinstance(event, Wait):
            when = self.ready(event.key)
        elif isinstance(event, MatrixWait):
            when = role.products.get(event.number, _NEVER if event.number else 0.0)
        else:
            others = [self.roles[index] for index in event.roles]
            when = max(other.free for other in others) if all(other.done for other in others) else _NEVER
        if when > now + _EPS:
            if when < _NEVER:
                self._span(role.trace.name, "wait", now, when, event.line, "wait")
                role.free, role.stood = when, True
            return False
        # Who stood at the barrier goes on when the phase is handed over.
        role.free = now + (self.sync.poll if isinstance(event, Wait) and not role.stood else 0.0)
        role.stood = False
        return True

    def _issue(self, role: _Role, event: CopyIssue | MatrixIssue, now: float) -> None:
        if isinstance(event, CopyIssue):
            load = self.copy(event)
            self.copies.append(_Running(load, load.cycles, now, role, event))
        else:
            load = self.product(event)
            if ROOM in self.without and self.machine.tensor_kind == "wgmma":
                load = self.whole(event, load)
            if self.depth:
                role.to_issue = costs.wgmma_instructions(event)
                role.issuing = event, _Product(role.to_issue)
                return
            self.queue.append(_Running(load, load.cycles, now, role, event))
        role.free = now + load.issue_cycles

    def _issue_more(self, role: _Role, now: float) -> bool:
        """Issue the next instruction of a wgmma product if the queue has room, and nobody who waits for some issued longer ago; whether it has."""
        if self.under_way >= self.depth or role.issuing is None:
            return False
        if any(one.to_issue and one.free <= now + _EPS and one.issued < role.issued for one in self.roles.values()):
            return False
        event, product = role.issuing
        load = self.product(event)
        self.queue.append(_Running(load, load.cycles, now, role, event, product))
        role.to_issue -= 1
        self.under_way += 1
        self.count += 1
        role.issued = self.count
        role.free = now + load.issue_cycles
        return True

    # -- engines -------------------------------------------------------------------------------------------------------

    def start_copy(self, now: float) -> bool:
        """Let the oldest copy move, where none does; whether one began."""
        if not self.copies or (self.copying and COPY_ORDER not in self.without):
            return False
        entry = self.copies.popleft()
        entry.start, self.copying = now, True
        self.active.append(entry)
        return True

    def start_engine(self, now: float) -> bool:
        """Begin the oldest product, or arrive for a commit whose products are done; whether anything happened."""
        if self.engine_busy or not self.queue:
            return False
        entry = self.queue.popleft()
        if isinstance(entry, tuple):
            end, latency = self.last_product
            for key in entry[0].keys:
                self.contribute(key, max(end + latency, now))
            return True
        entry.start = now
        if entry.product is not None and entry.product.start < 0.0:
            entry.product.start = now
        self.active.append(entry)
        self.engine_busy = self.multiplied = True
        return True

    def finish(self, entry: _Running, now: float) -> None:
        """An operation has ended."""
        event, name = entry.event, entry.role.trace.name
        if isinstance(event, MatrixIssue):
            self.engine_busy = False
            began = entry.start
            if entry.product is not None:
                self.under_way -= 1
                entry.product.left -= 1
                if entry.product.left:
                    return
                began = entry.product.start
            latency = costs.completion_cycles(event, self.machine)
            self.last_product = (now, latency)
            entry.role.products[event.number] = now + latency
            self._span(name, f"{event.name}, {event.m} x {event.n} x {event.k}", began, now, event.line, "product")
        elif isinstance(event, CopyIssue):
            self.copying = False
            self._span(name, event.name, entry.start, now, event.line, "copy")
            if event.key is not None:
                # The first tiles were not asked for before: they come from memory.
                latency = costs.copy_latency(self.machine, cold=not self.multiplied)
                self.contribute(event.key, now + (0.0 if COPY_LATENCY in self.without else latency))
        else:
            entry.role.busy = False
            entry.role.free = now
            self._span(name, _what(event), entry.start, now, event.line, "work")

    def _span(self, lane: str, name: str, start: float, end: float, line: int, kind: str) -> None:
        self.spans.append(Span(lane, name, start, end, line, kind))

    # -- time ----------------------------------------------------------------------------------------------------------

    def run(self) -> float:
        """From event to event until every role is done; returns the last end."""
        now = costs.start_cycles(self.machine, len({key[0] for key in self.missing}))
        first = self.roles[0]
        first.started, first.free = True, now
        while True:
            while any(
                [
                    *(self.advance(role, now) for role in self.roles.values()),
                    self.start_copy(now),
                    self.start_engine(now),
                ]
            ):
                pass
            if not self.active and not self.copies and all(role.done for role in self.roles.values() if role.started):
                return max(now, *(role.free for role in self.roles.values()))
            upcoming = min((role.free for role in self.roles.values() if role.free > now + _EPS), default=_NEVER)
            key = tuple([entry.load for entry in self.active])
            if key not in self.speeds:
                self.speeds[key] = speeds(key, BESIDE not in self.without, PORT not in self.without)
            step, ended = advance(self.active, self.speeds[key], upcoming - now)
            if step == _NEVER:
                raise EmulationError("the replay of the executed trace deadlocks: its waits and arrivals do not match")
            now += step
            self.active = [entry for entry in self.active if entry.left > _EPS]
            for entry in ended:
                self.finish(entry, now)


def _contributions(event: Event) -> Iterable[Key]:
    if isinstance(event, Arrive):
        return (event.key,)
    if isinstance(event, Commit):
        return event.keys
    if isinstance(event, CopyIssue) and event.key is not None:
        return (event.key,)
    return ()


def _what(event: Event) -> str:
    counts = event.counts if isinstance(event, Work) else {}
    return ", ".join(f"{pipe} {count:.0f}" for pipe, count in sorted(counts.items(), key=lambda item: -item[1])[:3])


def replay(trace: ProgramTrace, machine: Machine, without: Collection[str] = ()) -> Timeline:
    """Time one program's trace on one SM of ``machine``.

    ``without`` leaves something out, to see what it costs: RESCALE (O is never rescaled), COPY_LATENCY (copies land when
    the engine has moved them), COPY_ORDER (copies move side by side), MEETINGS (the warps of a role do not meet before it arrives), ROOM (products of wgmma go whole, in
    the order of their issue, and a queue of them always has room), BESIDE (arithmetic is as fast beside a product as alone), PORT
    (loads and stores of shared memory have what the reads of products leave of its port).
    """
    state = _Replay(trace, machine, without)
    cycles = state.run()
    return Timeline(trace.program, tuple(sorted(state.spans, key=lambda span: (span.start, span.end))), cycles)
