"""The tensor core of an SM as warpgroups share it: wgmma products queued by warp, served in the order of issue, awaited by groups."""

from __future__ import annotations

import math
from collections import deque

#: Share of the shared-memory port that a product leaves at least where accesses of others do not stand before it.
PORT_LEFT = 0.1


class WgmmaQueue:
    """Matrix instructions of the warps of one sub-partition, of which each stands for its warpgroup; times in cycles.

    The tensor core serves them in the order of their issue (measured: data/measured/h200_two_warpgroups.csv); ``depth`` at most are
    under way, from all warps together (measured: `tilecast calibrate`, wgmma_latency).  One with A in shared memory can begin
    ``fetch`` cycles after its issue; behind another product that is hidden.  Who waits for a group sees its end ``latency`` cycles later.
    While a bulk copy comes in products take ``beside_copy`` of that time longer, of whatever shape (measured: smem/beside_mma).
    """

    def __init__(self, warps: int, depth: int, latency: float, fetch: float, beside_copy: float = 0.0) -> None:
        self._depth, self._latency, self._fetch, self._beside_copy = depth, latency, fetch, beside_copy
        #: Instructions that wait: (warp, earliest begin, cycles, last of its group, cycles of the shared-memory port).
        self._queue: deque[tuple[int, float, float, bool, float]] = deque()
        self._served = 0
        #: By warp: groups committed, and when those that are through were seen to be.
        self._committed = [0] * warps
        self._done: list[list[float]] = [[] for _ in range(warps)]
        #: End of the instruction in service, and cycles of the shared-memory port that it leaves to others.
        self.free = 0.0
        self.spare = 0.0
        #: Share of the port that the instruction in service leaves, all in all, and cycles that it takes of it.
        self._left, self._reads = 1.0, 0.0
        #: When the port is done with what others gave it while no product ran, and what streams through it: (begin, end, share).
        self._owed = 0.0
        self._streams: deque[tuple[float, float, float]] = deque()
        #: Copies that come in: (begin, end).
        self._copies: deque[tuple[float, float]] = deque()
        #: Warp whose group ends with the instruction in service.
        self._ending: int | None = None
        self._intervals: deque[tuple[float, float]] = deque()
        #: End of every instruction taken up so far, in order.
        self._ends: list[float] = []

    def room(self, at: float) -> float | None:
        """Earliest issue of an instruction at or after ``at``: when one under way ends; None while that is unknown."""
        ended = len(self._ends) + len(self._queue) - self._depth
        if ended >= len(self._ends):
            return None
        return max(at, self._ends[ended]) if ended >= 0 else at

    def issue(
        self, warp: int, now: float, cycles: float, commits: bool, port: float = 0.0, fetched: bool = False
    ) -> None:
        """Queue an instruction of ``warp`` that reads shared memory for ``port`` of its cycles; A ``fetched`` from there too."""
        self._queue.append((warp, now + self._fetch if fetched else now, cycles, commits, port))
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
        return max(self.free, self._queue[0][1]) if self._queue else math.inf

    def busy(self, at: float) -> float:
        """Until when products surely follow each other, asked at ``at``; infinity while one waits."""
        return math.inf if self._queue else max(at, self.free)

    def serve(self, at: float) -> None:
        """Start the next instruction at ``at``."""
        warp, _, cycles, last, port = self._queue.popleft()
        self._served = warp
        if self._copies:
            cycles += self._beside_copies(at, at + cycles)
        self.free = at + cycles
        self._intervals.append((at, self.free))
        self._ends.append(self.free)
        self._ending = warp if last else None
        if last:
            self._done[warp].append(self.free + self._latency)
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

    def copy(self, begin: float, end: float) -> None:
        """A bulk copy comes in from ``begin`` to ``end``."""
        self._copies.append((begin, end))

    def _beside_copies(self, begin: float, end: float) -> float:
        """Cycles that copies add to a product from ``begin`` to ``end``."""
        while self._copies and self._copies[0][1] <= begin:
            self._copies.popleft()
        found = 0.0
        for first, last in self._copies:
            if min(last, end) > max(first, begin):
                found += (min(last, end) - max(first, begin)) * self._beside_copy
        return found

    def through_port(self, cycles: float) -> float:
        """Cycles until others' access of ``cycles`` is through the port while a product runs.

        It goes through what the product in service leaves, or waits for its turn among the warps that multiply, an instruction of
        each (all measured: `tilecast calibrate`, smem/beside_mma, to within a tenth but for one warpgroup alone).
        """
        ahead, seen = self._reads, {self._served}
        for warp, _, _, _, port in self._queue:
            if warp not in seen:
                ahead += port
                seen.add(warp)
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

    def _extend(self, cycles: float) -> None:
        self.free += cycles
        self._ends[-1] = self.free
        self._intervals[-1] = (self._intervals[-1][0], self.free)
        if self._ending is not None:
            self._done[self._ending][-1] = self.free + self._latency

    def holds(self, at: float) -> bool:
        """Whether what runs at ``at`` is a product that leaves others nothing of the shared-memory port."""
        return at < self.free and self._left < PORT_LEFT

    def runs(self, at: float) -> bool:
        """Whether the tensor core runs at ``at``; times of questions only grow, so what has ended is forgotten."""
        intervals = self._intervals
        while intervals and intervals[0][1] <= at:
            intervals.popleft()
        return bool(intervals) and intervals[0][0] <= at
