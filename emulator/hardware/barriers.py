"""Barriers in shared memory: phases, arrivals, bytes, and the knowledge that a completed phase hands on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from tilecast.emulator.errors import BarrierError, BoundsError, RaceError
from tilecast.emulator.hardware.clocks import Agent, Knowledge
from tilecast.emulator.hardware.context import Context
from tilecast.emulator.trace import Key
from tilecast.emulator.values.memory_layouts import MBarrierLayout


class Instance:
    """The barrier object in the shared memory of one CTA."""

    def __init__(self, barrier: Barrier, cta: int) -> None:
        self.barrier, self.cta = barrier, cta
        self.count = 0
        #: Phases completed; the number of the running phase.
        self.completed = 0
        self.pending = 0
        self.expected = self.received = 0
        self.expect_line = 0
        self.gathered = Knowledge()
        #: What the completion of each phase told, that of earlier ones included.
        self.told: list[Knowledge] = []
        #: Last phase each agent has waited for; the first phase that each does not know to be over.
        self.seen: dict[int, int] = {}
        self._running_for: dict[int, int] = {}
        self._born = 0
        #: Event of init by the role's agent in each CTA, and its line.
        self.origins: list[int] = []
        self.origin_line = 0

    @property
    def name(self) -> str:
        """For messages."""
        where = f" of CTA {self.cta}" if self.barrier.program.ctas > 1 and not self.barrier.shared else ""
        return f"{self.barrier.name}{where}"

    def arrive(self, count: int, known: Knowledge, line: int, cta: int = 0) -> Key:
        """``count`` arrivals from a CTA that hand on what they know; BarrierError beyond the count of the phase."""
        self.require(known, cta, line)
        if count > self.pending:
            raise BarrierError(
                f"{self.barrier.program.session.source.quote(line)}: {self.name} gets more arrivals in phase {self.completed} than the "
                f"{self.count} it was initialised with"
            )
        key = (self.barrier.number, self.completed)
        self.pending -= count
        self.gathered.join(known)
        self._close()
        return key

    def expect(self, size: int, agent: Agent, line: int) -> None:
        """Bytes that copies must bring before the phase completes."""
        self.require(agent.knowledge, agent.cta, line)
        self.expected += size
        self.expect_line = line
        if self.received > self.expected:
            self._too_many()

    def deliver(self, size: int, copy: int) -> Key:
        """A copy has written ``size`` bytes."""
        key = (self.barrier.number, self.completed)
        self.received += size
        self.gathered.copies |= 1 << copy
        if self.pending == 0 and self.received > self.expected:
            self._too_many()
        self._close()
        return key

    def require(self, known: Knowledge, cta: int, line: int) -> None:
        """BarrierError when the barrier was never initialised, RaceError when a role has whose initialisation its user does not know of."""
        quote = self.barrier.program.session.source.quote
        if not self.count:
            raise BarrierError(f"{quote(line)}: {self.name} is used before mbarrier.init")
        if not known.has(self.origins[cta]):
            raise RaceError(
                f"race on {self.name}: it is used at {quote(line)}, but its init by "
                f"{self.barrier.program.actor(self.origins[cta])} at {quote(self.origin_line)} is not ordered before that"
            )

    def born(self, count: int, agents: list[Agent], line: int) -> None:
        """init: a new life, of which only those know who know of the init."""
        self.count = self.pending = count
        self._born, self._running_for = self.completed, {}
        self.origins, self.origin_line = [agent.code for agent in agents], line

    def retire(self) -> None:
        """Forget the phases, but not what their completion told: who waited for them knows it still."""
        # The phases of the next life must not be taken for those of this one: replay tells them apart by number.
        self.count = self.pending = 0
        self.expected = self.received = 0
        while self.completed & 1:
            self.told.append(self.gathered.copy())
            self.completed += 1
        self.seen.clear()

    def _too_many(self) -> None:
        program = self.barrier.program
        raise BarrierError(
            f"{self.name} expects {self.expected} bytes in phase {self.completed} "
            f"({program.session.source.quote(self.expect_line)}), but copies bring {self.received}: "
            "the phase would complete before they have landed"
        )

    def _close(self) -> None:
        if self.pending == 0 and self.received == self.expected:
            self.told.append(self.gathered.copy())
            self.completed += 1
            self.pending = self.count
            self.expected = self.received = 0

    def passed(self, parity: int) -> bool:
        """Whether a wait for the phase of this parity returns."""
        return self.completed & 1 != parity

    def learnt(self, agent: Agent, parity: int) -> Knowledge | None:
        """What a wait that has returned tells for certain; None where it may have returned before any phase was complete.

        It may have returned on any phase of its parity whose successor the waiter does not know to be over: the earliest.
        """
        first = self._running_for.get(agent.index, self._born)
        while first < self.completed and agent.knowledge.has_all(self.told[first]):
            first += 1
        self._running_for[agent.index] = first
        phase = first - 1 if first & 1 != parity else first
        return self.told[phase] if phase >= self._born else None

    def target(self, parity: int) -> int:
        """The phase that a wait starting now is for: the last completed one, or the running one.

        Who waits may skip phases: a role that needs no answer this time need not ask for it.
        """
        return self.completed - 1 if self.passed(parity) else self.completed

    def check(self, target: int, line: int) -> None:
        """BarrierError when the phase waited for is gone, and with it the chance to see it."""
        if self.completed - 1 > target:
            raise BarrierError(
                f"{self.barrier.program.session.source.quote(line)}: {self.name} has completed phase {self.completed - 1} while "
                f"the wait is for phase {target}: who arrives is a lap ahead, too few arrivals are counted, or a wait is missing"
            )

    def missed(self, agent: int, parity: int) -> str:
        """Whether a waiter that sees every phase has missed one, for a deadlock report; empty when not."""
        wanted = self.seen.get(agent, -2 if parity else -1) + 1
        if wanted & 1 == parity and self.completed - 1 > wanted:
            return (
                f" ({self.name} has completed phase {self.completed - 1} already, the next one not waited for is {wanted}: who "
                "arrives is a lap ahead, too few arrivals are counted, or a wait is missing)"
            )
        return ""

    def status(self, parity: int) -> str:
        """What is missing, for a deadlock report."""
        missing = []
        if self.pending:
            missing.append(f"{self.pending} of {self.count} arrivals")
        if self.expected != self.received:
            missing.append(f"{self.expected - self.received} of {self.expected} bytes")
        return f"{self.name}, parity {parity}; phase {self.completed} is running and lacks {' and '.join(missing) or 'nothing'}"


class Barrier:
    """One element of a barrier array: an object in each CTA, or one for several (``homes``: in whose memory, by CTA)."""

    def __init__(self, program: Context, name: str, number: int, homes: Sequence[int]) -> None:
        self.program, self.name, self.number, self._homes = program, name, number, list(homes)
        self._of = {cta: Instance(self, cta) for cta in sorted(set(homes))}
        self.instances = list(self._of.values())
        #: Where it was initialised, and who called for that.
        self.made: list[int] = []

    @property
    def layout(self) -> MBarrierLayout:
        """Which CTAs have one of their own."""
        bits = (len(self._homes) - 1).bit_length()
        return MBarrierLayout([[self._homes[1 << bit]] for bit in range(bits)])

    @property
    def shared(self) -> bool:
        """Whether CTAs share an object."""
        return len(self.instances) < len(self._homes)

    def init(self, count: int) -> None:
        """Set the arrivals of a phase; both CTAs arrive at a shared barrier."""
        if count < 1:
            raise BarrierError(f"{self.program.here()}: {self.name} is initialised with a count of {count}: at least 1")
        agents, line = self.program.agents(), self.program.line()
        self.made = self.program.session.source.calls()
        for instance in self.instances:
            if instance.count:
                raise BarrierError(f"{self.program.here()}: {self.name} is initialised twice")
            instance.born(count * self._homes.count(instance.cta), agents, line)
        for agent in agents:
            agent.release()

    def invalidate(self) -> None:
        """Give the memory back: only ``init`` may follow."""
        agents, line = self.program.agents(), self.program.line()
        for instance in self.instances:
            instance.require(agents[instance.cta].knowledge, instance.cta, line)
            instance.retire()

    def of_cta(self, cta: int) -> Instance:
        """The object that this CTA's arrivals go to."""
        return self._of[self._homes[cta]]


class Outside:
    """What an index out of range gives: an address is no access, so only its use is wrong (``pred=False`` is none)."""

    def __init__(self, fault: str) -> None:
        self._fault = fault

    def __getattr__(self, name: str) -> Any:
        raise BoundsError(self._fault)


class BarrierArray:
    """Barriers as kernels hold them: [count, 1] or [1] of int64 in shared memory."""

    def __init__(self, count: int, make: Callable[[int], Barrier], program: Context, name: str) -> None:
        self._count, self._make, self._program, self.name = count, make, program, name
        #: Those that were asked for: kernels also take memory of this kind to fill an SM.
        self._barriers: dict[int, Barrier] = {}

    @property
    def shape(self) -> list[int]:
        """Extents."""
        return [self._count, 1]

    @property
    def type(self) -> BarrierArray:
        """What kernels ask of a type is here."""
        return self

    @property
    def layout(self) -> MBarrierLayout:
        """Which CTAs have barriers of their own."""
        return self._at(0).layout

    def _keep_alive(self) -> None:
        """Where the compiler may not reuse the memory before: here it never does."""

    def index(self, i: Any) -> Barrier:
        """One barrier; outside the array, one that raises BoundsError when it is used."""
        if not 0 <= int(i) < self._count:
            fault = f"{self._program.here()}: barrier {self.name}[{int(i)}] of {self._count}"
            return cast(Barrier, Outside(fault))
        return self._at(int(i))

    def _at(self, i: int) -> Barrier:
        if i not in self._barriers:
            self._barriers[i] = self._make(i)
        return self._barriers[i]
