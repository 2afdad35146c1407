"""A warp of a role with its loop and what is around it, and the slots of rings of barriers that it goes by, one by one."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tilecast.codegen.compiler.structure.shape import Barrier, KernelShape, Role, Step

#: Iterations that loops are unrolled to at most.
_MOST_UNROLLED = 8
#: Where a CTA's shared memory begins: the system has what is before.
_BASE = 0x400
#: Low bits of an address in shared memory that do not depend on where it begins.
_SPAN = 256


@dataclass(frozen=True)
class Steady:
    """A warp of a role, with what it runs in its loop and ahead of it."""

    role: Role
    warp: int
    ahead: tuple[Step, ...]
    #: Steps of an iteration.
    repeated: tuple[Step, ...]
    #: All steps of a tile before and after its iterations.
    begin: tuple[Step, ...]
    end: tuple[Step, ...]

    @property
    def name(self) -> str:
        """ "warp 0 (matrix and compute)", for messages and tables."""
        return f"warp {self.warp} ({self.role.work})"

    def site(self, step: Step) -> Barrier | None:
        """The barrier of a step of this warp; the pair's two CTAs do the same, so the leader's is each one's own."""
        found = next((barrier for warps, barrier in step.barriers if self.warp in warps), None)
        return dataclasses.replace(found, owner="own") if found is not None else None

    def place(self, step: Step) -> Barrier | None:
        """The barrier of a step where it is one in shared memory whose places are known."""
        site = self.site(step)
        return site if site is not None and not site.named and site.resolved else None

    def passes(self, site: Barrier | None) -> int:
        """Phases of a barrier that this warp takes for complete before the first arrival: the parity it asks for at first."""
        waits = (
            step
            for step in (*self.ahead, *self.repeated, *self.begin)
            if step.kind == "wait" and self.site(step) == site
        )
        # Where the first one's parity is not known, a later one's is that of the same phase but for whole laps.
        known = next((step.amount for step in waits if step.amount >= 0), None)
        # Where none is known: who fills slots finds them free at first, who empties them does not find them full.
        return known if known is not None else int(any(step.kind == "copy_in" for step in self.repeated))


def by_slot(chosen: Sequence[Steady]) -> tuple[list[Steady], int]:
    """The same with loops unrolled until every use of a ring is one of a slot, and how often; once where that tells nothing new.

    It does where a role begins elsewhere in a ring than after the slots it used before, or takes what is due in one of several
    iterations.
    """
    rings = {site for one in chosen for step in one.repeated if (site := one.place(step)) is not None}
    slots = {place for site in rings if site.stages > 1 for place in site.places}
    alone = {
        site.places[0]
        for one in chosen
        for step in (*one.ahead, *one.repeated)
        if (site := one.place(step)) is not None and site.stages == 1
    }
    apart = bool(alone & slots)
    shifted = any(
        step.first in site.places and site.places.index(step.first) != _used_ahead(one, site) % site.stages
        for one in chosen
        for step in one.repeated
        if step.kind == "wait" and (site := one.site(step)) is not None and site in rings and site.stages > 1
    )
    seldom = any(step.turns for one in chosen for step in one.repeated)
    if not (apart or shifted or seldom) or _several(chosen):
        return list(chosen), 1
    times = math.lcm(
        *(site.stages for site in rings), *(len(step.turns) for one in chosen for step in one.repeated if step.turns)
    )
    if times > _MOST_UNROLLED:
        return list(chosen), 1
    out = []
    for one in chosen:
        repeated = [
            dataclasses.replace(_at_slot(one, step, i), turn=i)
            for i in range(times)
            for step in one.repeated
            if not step.turns or step.turns[i % len(step.turns)]
        ]
        ahead, begin, end = ([_at_slot(one, step, 0) for step in steps] for steps in (one.ahead, one.begin, one.end))
        out.append(
            dataclasses.replace(one, ahead=tuple(ahead), repeated=tuple(repeated), begin=tuple(begin), end=tuple(end))
        )
    return out, times


def with_whole_phases(one: Steady) -> Steady:
    """The same where fewer copies complete a phase ahead of the loop than in it (K and V in a slot of Q, dO and the rows' terms): the last
    one as often as in the loop."""

    def copies(steps: Sequence[Step], site: Barrier | None) -> int:
        return sum(step.kind == "copy_in" and one.site(step) == site for step in steps)

    def whole(before: Sequence[Step]) -> tuple[Step, ...]:
        out: list[Step] = []
        for step in before:
            out.append(step)
            site = one.place(step)
            # Once for each slot: that it has one filling ahead of the loop.
            fillings = sum(s.kind == "expect" and one.site(s) == site for s in before)
            if step.kind == "copy_in" and fillings == 1 and copies(out, site) == copies(before, site):
                out += [step] * (copies(one.repeated, site) - copies(before, site))
        return tuple(out)

    return dataclasses.replace(one, ahead=whole(one.ahead), begin=whole(one.begin))


def _used_ahead(one: Steady, ring: Barrier, kind: str = "wait") -> int:
    """Waits, or steps of another kind, at slots of a ring ahead of a role's loop."""
    sites = (one.site(step) for step in one.ahead if step.kind == kind)
    return sum(site is not None and site.resolved and set(site.places) <= set(ring.places) for site in sites)


def _several(chosen: Sequence[Steady]) -> bool:
    """Whether a role goes on by several slots of a ring in an iteration: then which slot comes next is not known."""
    for one in chosen:
        waits: Counter[int] = Counter()
        for step in one.repeated:
            site = one.site(step)
            if step.kind == "wait" and site is not None and not site.named and site.stages > 1:
                waits.update(site.places)
        if any(count > 1 for count in waits.values()):
            return True
    return False


def _at_slot(one: Steady, step: Step, turn: int) -> Step:
    """``step`` of the ``turn``-th iteration, with the slot of its ring in place of the ring."""
    site = one.place(step)
    if site is None or site.stages == 1:
        return step
    if step.first in site.places:
        begin = site.places.index(step.first)
    else:
        # Where it begins is not known: after what was used ahead of the loop.
        begin = _used_ahead(one, site, "expect" if step.kind == "copy_in" else step.kind)
    laps, slot = divmod(begin + turn, site.stages)
    mine = dataclasses.replace(site, places=(site.places[slot],))
    # The parity of the phase it asks for changes with every lap.
    amount = step.amount ^ (laps & 1) if step.kind == "wait" and step.amount >= 0 else step.amount
    return dataclasses.replace(step, barriers=(((one.warp,), mine),), amount=amount)


def arrivals_by_turns(site: Barrier, chosen: Sequence[Steady], shape: KernelShape, unrolled: int) -> int:
    """Arrivals that complete a phase of a barrier, or of a slot of a loop that is ``unrolled``, at which roles arrive by turns; 0 where
    each comes to every phase."""
    if site.named or not site.resolved:
        return 0
    if _gets_first_turn(site, chosen, shape):
        return 1
    if unrolled == 1:
        return 0
    waits = max((sum(s.kind == "wait" and one.site(s) == site for s in one.repeated) for one in chosen), default=0)
    comes = [sum(s.kind == "arrive" and one.site(s) == site for s in one.repeated) for one in chosen]
    if sum(map(bool, comes)) < 2 or all(count >= waits for count in comes if count):
        return 0
    return next((count for barrier, count in shape.barriers if barrier.places == site.places and count > 0), 1)


def _gets_first_turn(site: Barrier, chosen: Sequence[Steady], shape: KernelShape) -> bool:
    """Whether a role arrives once, ahead of its loop, at a barrier of one arrival where another does in every iteration."""
    if not any(barrier.places == site.places and count == 1 for barrier, count in shape.barriers):
        return False

    def arrives(one: Steady, steps: Sequence[Step]) -> bool:
        return any(step.kind == "arrive" and one.site(step) == site for step in steps)

    once = [arrives(one, one.ahead) and not arrives(one, one.repeated) for one in chosen]
    return any(once) and any(arrives(one, one.repeated) for one in chosen)


def at_base(chosen: Sequence[Steady], shape: KernelShape) -> list[Steady]:
    """The same where a role lost sight of where shared memory begins, and reads places from 0 on: with those that are set up.

    A role that knows some of them has not lost it: what it waits for below the base is the system's own (a pair of CTAs that
    allocates tensor memory meets there).
    """
    known = {place for site, _ in shape.barriers for place in site.places}

    def place(step: Step) -> Step:
        sites = []
        for warps, site in step.barriers:
            moved = tuple(at + _BASE for at in site.places)
            lost = not site.named and site.resolved and not known & set(site.places) and known >= set(moved)
            sites.append((warps, dataclasses.replace(site, places=moved) if lost else site))
        if tuple(sites) == step.barriers:
            return step
        return dataclasses.replace(step, barriers=tuple(sites), first=step.first + _BASE if step.first >= 0 else -1)

    def sees(one: Steady) -> bool:
        steps = (*one.ahead, *one.repeated, *one.begin, *one.end)
        return any(
            not site.named and known & set(site.places) for step in steps if (site := one.site(step)) is not None
        )

    return [one if sees(one) else mapped([one], place)[0] for one in chosen]


def mapped(chosen: Sequence[Steady], change: Callable[[Step], Step]) -> list[Steady]:
    """The same with every step changed."""
    return [
        dataclasses.replace(
            one, ahead=tuple(map(change, one.ahead)), repeated=tuple(map(change, one.repeated)),
            begin=tuple(map(change, one.begin)), end=tuple(map(change, one.end)),
        )
        for one in chosen
    ]  # fmt: skip


def placed(chosen: Sequence[Steady]) -> list[Steady]:
    """The same with rings for barriers whose slot is not known, where the known part of the address points at one ring alone.

    Shared memory begins at an address that the loader gives, a multiple of the span below: what is known agrees in its low bits.
    """
    sites = {site for one in chosen for step in one.repeated if (site := one.site(step)) is not None and not site.named}
    rings: dict[int, set[Barrier]] = {}
    for site in sites:
        if site.resolved:
            rings.setdefault(site.places[0] % _SPAN, set()).add(site)

    def place(step: Step) -> Step:
        found = []
        for warps, site in step.barriers:
            alike = rings.get(site.offset % _SPAN, set()) if not site.resolved and not site.named else set()
            found.append((warps, next(iter(alike)) if len(alike) == 1 else site))
        return dataclasses.replace(step, barriers=tuple(found))

    return mapped(chosen, place)
