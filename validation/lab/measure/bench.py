"""Time shapes in a process of their own; a kernel that takes the process down costs its item and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tilecast.validation.lab.measure.plan import Item, Options, item_to
from tilecast.validation.lab.worker.process import Asker, WorkerError, WorkerLostError

#: What one step with one kernel may take: writing, compiling, checking and capturing it, or a sample.
SILENCE_S = 300.0


@dataclass(frozen=True, slots=True)
class Failure:
    """An item that could not be measured, and why, in one line."""

    item: Item
    reason: str
    #: Whether the kernel took its process down: crash, lost context or hang.
    fatal: bool = False

    def sentence(self) -> str:
        """For people."""
        return f"{self.item.label()}: {self.reason}"


class Bench:
    """A worker that times shapes into ``table``, replaced (by ``start``) when a kernel took it down.

    The worker says which item it is about to touch, so that what happens next is known to be that item's doing.
    """

    def __init__(self, start: Callable[[], Asker], table: Path, options: Options) -> None:
        self._start, self._table, self._options = start, table, options
        self._silence_s = SILENCE_S + options.settle_s + options.measure_s
        self._worker: Asker | None = None

    def close(self) -> None:
        """End the worker."""
        if self._worker is not None:
            self._worker.close()
        self._worker = None

    def measure(self, items: Sequence[Item]) -> list[Failure]:
        """Time the items of one shape in turns; those left after a loss are timed again together, in a new process.

        Raises WorkerLostError where the process is lost twice before it touches a kernel.
        """
        left, failures, false_starts = list(items), [], 0
        while left:
            at: list[int] = []
            try:
                answer = self._ask(left, at)
            except WorkerError as error:
                lost = isinstance(error, WorkerLostError)
                if lost:
                    self.close()
                if at:
                    failures.append(Failure(left.pop(at[-1]), str(error), lost))
                elif not lost:
                    return [*failures, *(Failure(item, str(error)) for item in left)]
                elif false_starts:
                    raise
                else:
                    false_starts += 1
                continue
            return [*failures, *(Failure(left[index], reason) for index, reason in answer["failed"])]
        return failures

    def _ask(self, items: Sequence[Item], at: list[int]) -> dict[str, Any]:
        request = {
            "do": "measure", "items": [item_to(item) for item in items], "options": asdict(self._options),
            "table": str(self._table),
        }  # fmt: skip
        if self._worker is None:
            self._worker = self._start()
        return self._worker.ask(request, self._silence_s, lambda text, _: at.append(int(text)))
