"""In which order the programs of a launch go on: one after the other, or, at random moments, any that has a place on an SM.

Programs start in their order.  One that waits for global memory, or is about to access it by an atomic, may give way to others.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import greenlet

from tilecast.emulator.session import Session


class _Resident:
    """A program that has started: a thread of control, and what the session knows while it runs."""

    def __init__(self, session: Session, number: int, run: Callable[[], Any]) -> None:
        self.session, self.number = session, number
        self.coroutine = greenlet.greenlet(run)
        self.program: Any = None
        self._unrolled: list[int] = []
        #: Whether it can go on; until it has started it can.
        self.ready: Callable[[], bool] = lambda: True

    def go_on(self, hopeless: bool = False) -> Any:
        """Run it until it ends (its trace) or gives way; ``hopeless``: no other program can go on."""
        session = self.session
        session.program, session.unrolled = self.program, self._unrolled
        returned = self.coroutine.switch(*(() if self.program is None else (not hopeless,)))
        self.program, self._unrolled = session.program, session.unrolled
        session.program = None
        return returned


def run_programs(
    session: Session, count: int, places: int, run: Callable[[int], Any], enter: Callable[[int], None]
) -> list[Any]:
    """What ``run`` returns of each program that was not cancelled, by number.

    ``places``: how many programs are on the machine at once; ``enter`` is told who goes on.
    """
    waiting, finished = deque(range(count)), dict[int, Any]()
    residents: list[_Resident] = []
    late = session.mode == "late"
    chance = random.Random(f"{session.seed} {session.launches}")
    hub = greenlet.getcurrent()

    def give_way(ready: Callable[[], bool]) -> bool:
        current.ready = ready
        return bool(hub.switch())

    session.give_way = None if late else give_way
    try:
        while waiting or residents:
            while waiting and len(residents) < (1 if late else places):
                number = waiting.popleft()
                if number not in session.cancelled:
                    session.started = number
                    residents.append(_Resident(session, number, lambda number=number: run(number)))  # type: ignore[misc]
            if not residents:
                break
            ready = [one for one in residents if one.ready()]
            current = chance.choice(ready or residents[:1])
            enter(current.number)
            returned = current.go_on(hopeless=not ready)
            if current.coroutine.dead:
                finished[current.number] = returned
                residents.remove(current)
    finally:
        session.give_way = None
        for left in residents:
            if left.coroutine:
                left.coroutine.throw()
        session.program = None
    return [finished[number] for number in sorted(finished)]
