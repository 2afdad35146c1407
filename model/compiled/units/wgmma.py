"""The tensor core of an SM as warpgroups share it: wgmma products queued by warp, served in turns, awaited by groups."""

from __future__ import annotations

import math
from collections import deque


class WgmmaQueue:
    """Matrix instructions of the warps of one sub-partition, of which each stands for its warpgroup; times in cycles.

    The tensor core serves warps in turns, an instruction each; ``depth`` instructions at most are under way, from all warps
    together (both measured: `tilecast calibrate`, wgmma_order and wgmma_latency).  An FMA takes a cycle from the instruction
    in service, beyond the share ``hidden_share`` of them that it hides.
    """

    def __init__(self, warps: int, depth: int, latency: float, hidden_share: float) -> None:
        self._depth, self._latency, self._hidden_share = depth, latency, hidden_share
        #: Instructions that wait, by warp: (issue time, cycles, last of its group, latency, cycles of the shared-memory port).
        self._queues: list[deque[tuple[float, float, bool, float, float]]] = [deque() for _ in range(warps)]
        self._waiting = 0
        self._served = 0
        #: By warp: groups committed, and when those that are through were seen to be.
        self._committed = [0] * warps
        self._done: list[list[float]] = [[] for _ in range(warps)]
        #: End of the instruction in service, FMA that may still be issued before it is delayed, and cycles of the shared-memory
        #: port that it leaves to others.
        self.free = 0.0
        self.hidden = 0.0
        self.spare = 0.0
        #: Share of the port that the instruction in service leaves, all in all, and cycles that it takes of it.
        self._left, self._reads = 1.0, 0.0
        #: When the port is done with what others gave it while no product ran, and what streams through it: (begin, end, share).
        self._owed = 0.0
        self._streams: deque[tuple[float, float, float]] = deque()
        #: Warp whose group ends with the instruction in service, and from its end until that is seen.
        self._ending: int | None = None
        self._seen = latency
        self._intervals: deque[tuple[float, float]] = deque()
        #: End of every instruction taken up so far, in order.
        self._ends: list[float] = []

    def room(self, at: float) -> float | None:
        """Earliest issue of an instruction at or after ``at``: when one under way ends; None while that is unknown."""
        ended = len(self._ends) + self._waiting - self._depth
        if ended >= len(self._ends):
            return None
        return max(at, self._ends[ended]) if ended >= 0 else at

    def issue(
        self, warp: int, now: float, cycles: float, commits: bool, port: float = 0.0, latency: float | None = None
    ) -> None:
        """Queue an instruction of ``warp`` that reads shared memory for ``port`` of its cycles; ``latency`` is from its end until who
        waits for its group sees that, where it is not the queue's."""
        self._queues[warp].append((now, cycles, commits, self._latency if latency is None else latency, port))
        self._waiting += 1
        self._committed[warp] += commits

    def through(self, warp: int, pending: int, at: float) -> float | None:
        """When all but the last ``pending`` groups of ``warp`` are through, not before ``at``; None while that is unknown."""
        needed = self._committed[warp] - pending
        if needed <= 0:
            return at
        done = self._done[warp]
        # Groups end in the order they were committed.
        return max(at, done[needed - 1]) if len(done) >= needed else None

    def next_service(self) -> float:
        """When the tensor core can take up its next instruction; infinity when none waits."""
        if not self._waiting:
            return math.inf
        return max(self.free, min(queue[0][0] for queue in self._queues if queue))

    def serve(self, at: float) -> None:
        """Start the next instruction at ``at``: that of the next warp in turn that has one."""
        queues = self._queues
        for step in range(1, len(queues) + 1):
            turn = (self._served + step) % len(queues)
            queue = queues[turn]
            if queue and queue[0][0] <= at:
                break
        _, cycles, last, latency, port = queue.popleft()
        self._waiting -= 1
        self._served = turn
        self.free = at + cycles
        self._intervals.append((at, self.free))
        self._ends.append(self.free)
        self.hidden = self._hidden_share * cycles
        self._ending = turn if last else None
        if last:
            self._seen = latency
            self._done[turn].append(self.free + latency)
        self.spare, self._left, self._reads = cycles - port, 1.0 - port / cycles, port
        shared = max(0.0, self._owed - at)
        for begin, end, share in self._streams:
            shared += max(0.0, min(end, at + cycles) - max(begin, at)) * share
        if self._streams and self._streams[0][1] <= at:
            self._streams.popleft()
        if shared > 0.0:
            self._share(shared)

    def stream(self, begin: float, end: float, share: float) -> None:
        """Others take ``share`` of the port from ``begin`` to ``end``."""
        self._streams.append((begin, end, share))

    def through_port(self, cycles: float) -> float:
        """Cycles until others' access of ``cycles`` is through the port while a product runs.

        It goes through what the product in service leaves, or waits for its turn among the warps that multiply, an instruction of
        each (all measured: `tilecast calibrate`, smem/beside_mma, to within a tenth but for one warpgroup alone).
        """
        ahead = self._reads + sum(queue[0][4] for i, queue in enumerate(self._queues) if queue and i != self._served)
        return min(cycles / self._left if self._left > 0.0 else math.inf, ahead + cycles)

    def take_port(self, now: float, cycles: float) -> None:
        """Others take ``cycles`` of the port from ``now`` on: from the instruction in service, where one is, beyond what it leaves."""
        if now < self.free and self.runs(now):
            self._share(cycles)
        else:
            self._owed = max(self._owed, now) + cycles

    def _share(self, cycles: float) -> None:
        """The port's other users take ``cycles`` of it while the instruction in service runs."""
        self.spare -= cycles
        if self.spare < 0.0:
            self._extend(-self.spare)
            self.spare = 0.0

    def steal(self) -> None:
        """An FMA takes a cycle of the register ports from the instruction in service."""
        self.hidden -= 1.0
        if self.hidden >= 0.0:
            return
        self._extend(min(1.0, -self.hidden))

    def _extend(self, cycles: float) -> None:
        self.free += cycles
        self._ends[-1] = self.free
        self._intervals[-1] = (self._intervals[-1][0], self.free)
        if self._ending is not None:
            self._done[self._ending][-1] = self.free + self._seen

    def runs(self, at: float) -> bool:
        """Whether the tensor core runs at ``at``; times of questions only grow, so what has ended is forgotten."""
        intervals = self._intervals
        while intervals and intervals[0][1] <= at:
            intervals.popleft()
        return bool(intervals) and intervals[0][0] <= at
