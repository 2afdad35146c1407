"""Hand tasks to lanes, keep every answer the moment it comes, and survive workers that die.

Tasks of a group go to one lane, which then has their simulations; a lane without work takes half of what the fullest one
has left.  What is in flight, and lost when everything is killed, is at most ``depth`` tasks a lane.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Any

from tilecast.explore.sweep.errors import SweepError
from tilecast.explore.sweep.run.lanes import Engine, Lane, Request
from tilecast.validation.lab.worker.process import WorkerLostError

#: A task that was running when its worker died this often is given up.
ATTEMPTS = 2


@dataclass(frozen=True, slots=True)
class Task:
    """A request, under a name, and the group of tasks it shares work with."""

    name: str
    request: Request
    group: str


#: What to do with an answer: (task, answer, seconds from hand-out to answer).
Keep = Callable[[Task, dict[str, Any], float], None]
_Event = tuple["_Slot", Lane, "Task | None", Future[dict[str, Any]]]


@dataclass
class _Slot:
    """A lane and its work."""

    start: Callable[[], Lane]
    waiting: deque[Task] = field(default_factory=deque)
    flying: deque[tuple[Task, Future[dict[str, Any]], float]] = field(default_factory=deque)
    lane: Lane | None = None
    #: Whether its worker has said that it is the right program: nothing is handed to it before.
    ready: bool = False
    false_starts: int = 0
    #: When its last answer came.
    answered: float = 0.0


def drive(tasks: Iterable[Task], engine: Engine, greeting: Request, keep: Keep) -> None:
    """Run all tasks; returns when each had its answer kept, exceptions of ``keep`` end it.

    ``greeting`` is the first request of every lane; its answer must equal what it holds under "expect".  An answer with
    "lost" true has its worker replaced.  A task whose worker dies is tried once more, then kept as failed.
    """
    groups: dict[str, deque[Task]] = {}
    for task in tasks:
        groups.setdefault(task.group, deque()).append(task)
    left = sum(map(len, groups.values()))
    if left:
        run = _Run(deque(groups.values()), left, engine, greeting, keep)
        try:
            run.all()
        finally:
            run.close()


class _Run:
    def __init__(self, groups: deque[deque[Task]], left: int, engine: Engine, greeting: Request, keep: Keep) -> None:
        self._groups, self._left, self._depth, self._keep = groups, left, engine.depth, keep
        self._greeting = greeting
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._slots = [_Slot(start) for start in engine.starts(left)]
        self._died: dict[str, int] = {}

    def all(self) -> None:
        for slot in self._slots:
            self._open(slot)
        while self._left:
            slot, lane, task, future = self._events.get()
            if slot.lane is not lane:
                continue  # of a worker that was replaced: its tasks wait again or were given up
            error = _error(future)
            if task is None:
                self._greeted(slot, future, error)
            elif isinstance(error, WorkerLostError):
                self._replace(slot, str(error))
            else:
                answer = future.result() if error is None else _failed(str(error))
                self._answered(slot, task, answer)
                if answer.get("lost"):
                    self._replace(slot, "")
            self._feed(slot)

    def close(self) -> None:
        for slot in self._slots:
            if slot.lane is not None:
                slot.lane.close()
                slot.lane = None

    def _open(self, slot: _Slot) -> None:
        slot.lane, slot.ready = slot.start(), False
        self._submit(slot, None, self._greeting)

    def _submit(self, slot: _Slot, task: Task | None, request: Request) -> None:
        lane = slot.lane
        assert lane is not None
        future = lane.submit(request)
        if task is not None:
            slot.flying.append((task, future, time.monotonic()))
        future.add_done_callback(lambda done: self._events.put((slot, lane, task, done)))

    def _feed(self, slot: _Slot) -> None:
        while slot.ready and len(slot.flying) < self._depth:
            if not slot.waiting:
                self._find_work(slot)
            if not slot.waiting:
                return
            task = slot.waiting.popleft()
            self._submit(slot, task, task.request)

    def _find_work(self, slot: _Slot) -> None:
        if self._groups:
            slot.waiting.extend(self._groups.popleft())
            return
        fullest = max(self._slots, key=lambda other: len(other.waiting))
        for _ in range((len(fullest.waiting) + 1) // 2):
            slot.waiting.appendleft(fullest.waiting.pop())

    def _greeted(self, slot: _Slot, future: Future[dict[str, Any]], error: BaseException | None) -> None:
        if isinstance(error, WorkerLostError) and slot.false_starts + 1 < ATTEMPTS:
            slot.false_starts += 1
            self._replace(slot, "")
        elif error is not None:
            raise SweepError(f"a worker could not start: {error}")
        elif future.result() != self._greeting["expect"]:
            raise SweepError("a worker runs another version of tilecast: install the same one everywhere, start again")
        else:
            slot.ready, slot.false_starts = True, 0

    def _answered(self, slot: _Slot, task: Task, answer: dict[str, Any]) -> None:
        for entry in slot.flying:
            if entry[0] is task:
                slot.flying.remove(entry)
                self._left -= 1
                now = time.monotonic()
                # What waited behind another task began when that one was answered.
                began, slot.answered = max(entry[2], slot.answered), now
                self._keep(task, answer, now - began)
                return

    def _replace(self, slot: _Slot, reason: str) -> None:
        """Another worker for the slot; with a ``reason`` it died, and the first task without an answer is why."""
        for task, future, _ in list(slot.flying):
            if future.done() and _error(future) is None:
                self._answered(slot, task, future.result())
        again = [task for task, _, _ in slot.flying]
        if again and reason:
            suspect = again[0]
            self._died[suspect.name] = self._died.get(suspect.name, 0) + 1
            if self._died[suspect.name] >= ATTEMPTS:
                answer = _failed(f"its worker died {ATTEMPTS} times: {reason}")
                self._answered(slot, suspect, answer)
                again = again[1:]
        assert slot.lane is not None
        slot.lane.close()
        slot.lane, slot.ready = None, False
        slot.flying.clear()
        slot.waiting.extendleft(reversed(again))
        if self._left:
            self._open(slot)


def _error(future: Future[dict[str, Any]]) -> BaseException | None:
    try:
        return future.exception()
    except CancelledError as error:
        return WorkerLostError(str(error) or "cancelled")


def _failed(reason: str) -> dict[str, Any]:
    return {"status": "failed", "reason": reason}
