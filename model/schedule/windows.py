"""What a given II already decides before any search: time windows and the lap counts still open.

Longest paths between all moments bound every time difference; a difference that is bounded leaves few lap
counts to a pair that takes turns; a lap count that is settled lengthens paths again.  Repeating this to the
end proves most impossible IIs impossible, and hands the solver narrow choices otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tilecast.model.sm.recurrences import Arc

#: "No path": small enough that no sum of real path lengths reaches a real one.
_NONE = -(1 << 60)


class _Pair(Protocol):
    @property
    def entries(self) -> tuple[tuple[int, int, int, int], ...]: ...


@dataclass(frozen=True, slots=True)
class Windows:
    """Per moment the earliest and latest time, per pair the range of lap counts; some schedule lies within.

    ``paths[a][b]`` is a proven lower bound on t[b] - t[a] (the last row and column belong to the origin of
    time).
    """

    earliest: tuple[int, ...]
    latest: tuple[int, ...]
    laps: tuple[tuple[int, int], ...]
    paths: tuple[tuple[int, ...], ...]


def earliest(nodes: int, arcs: Sequence[Arc], ii: int) -> list[int]:
    """Earliest times >= 0 at this II (longest paths over the arcs); ValueError when there are none."""
    times = [0] * nodes
    for _ in range(nodes + 1):
        changed = False
        for src, dst, weight, distance in arcs:
            reached = times[src] + weight - distance * ii
            if reached > times[dst]:
                times[dst] = reached
                changed = True
        if not changed:
            return times
    raise ValueError(f"no times exist at II {ii}")


def windows(
    nodes: int, arcs: Sequence[Arc], pairs: Sequence[_Pair], ii: int, caps: Sequence[tuple[int, int]] = ()
) -> Windows | None:
    """Windows at this II, or None when it is impossible (which is then proven).

    ``caps`` are (moment, latest time) demands on top of the loop's own.
    """
    paths = _longest_paths(nodes, arcs, ii)
    if paths is None:
        return None
    latest = _latest(nodes, arcs, paths, ii)
    origin = nodes
    for row in paths:
        row.append(_NONE)
    paths.append([_NONE] * nodes + [0])
    for node in range(nodes):
        if not _extend(paths, origin, node, 0) or not _extend(paths, node, origin, -latest[node]):
            return None
    if not all(_extend(paths, node, origin, -cap) for node, cap in caps):
        return None
    laps = _narrow(paths, pairs, ii)
    if laps is None:
        return None
    return Windows(
        tuple(paths[origin][:nodes]),
        tuple(-paths[node][origin] for node in range(nodes)),
        tuple(laps),
        tuple(tuple(row) for row in paths),
    )


def _longest_paths(nodes: int, arcs: Sequence[Arc], ii: int) -> list[list[int]] | None:
    paths = [[_NONE] * nodes for _ in range(nodes)]
    for node in range(nodes):
        paths[node][node] = 0
    for src, dst, weight, distance in arcs:
        paths[src][dst] = max(paths[src][dst], weight - distance * ii)
    for via in range(nodes):
        onward = paths[via]
        for node in range(nodes):
            to = paths[node][via]
            if to > _NONE // 2:
                paths[node] = [max(old, to + more) for old, more in zip(paths[node], onward, strict=True)]
    if any(paths[node][node] > 0 for node in range(nodes)):
        return None
    return paths


def _extend(paths: list[list[int]], src: int, dst: int, length: int) -> bool:
    """Add one arc to all paths; False when it closes a positive cycle."""
    if length <= paths[src][dst]:
        return True
    if paths[dst][src] > _NONE // 2 and paths[dst][src] + length > 0:
        return False
    onward = paths[dst]
    for node, row in enumerate(paths):
        to = row[src]
        if to > _NONE // 2:
            to += length
            paths[node] = [max(old, to + more) for old, more in zip(row, onward, strict=True)]
    return True


def _latest(nodes: int, arcs: Sequence[Arc], paths: list[list[int]], ii: int) -> list[int]:
    """A latest time for every moment that some schedule, if there is one, keeps.

    Moments that reach each other both ways form a group.  Taking turns only looks at times modulo II, so a
    group may move by whole IIs.  Move each group, upstream ones first, as early as it can go with all times
    >= 0: then either one of its moments is below II or one of the arcs into it has less than II to spare.
    """
    group = [-1] * nodes
    for node in range(nodes):
        if group[node] < 0:
            for other in range(nodes):
                if paths[node][other] > _NONE // 2 and paths[other][node] > _NONE // 2:
                    group[other] = node
    # Upstream first: a group that reaches more moments comes earlier.
    leaders = sorted(set(group), key=lambda lead: -sum(length > _NONE // 2 for length in paths[lead]))
    latest = [0] * nodes
    for lead in leaders:
        members = [node for node in range(nodes) if group[node] == lead]
        limit = max(ii - 1 - paths[lead][node] for node in members)
        for src, dst, weight, distance in arcs:
            if group[dst] == lead and group[src] != lead:
                limit = max(limit, latest[src] + weight - distance * ii + ii - 1 - paths[lead][dst])
        for node in members:
            latest[node] = limit - paths[node][lead]
    return latest


def _narrow(paths: list[list[int]], pairs: Sequence[_Pair], ii: int) -> list[tuple[int, int]] | None:
    """Ranges of lap counts consistent with all paths, to a fixed point; None when some pair has none left."""
    ranges: list[tuple[int, int]] = [(_NONE, -_NONE)] * len(pairs)
    changed = True
    while changed:
        changed = False
        for number, pair in enumerate(pairs):
            low, high = ranges[number]
            for a, b, hold_a, hold_b in pair.entries:
                low = max(low, -((-paths[b][a] - hold_a) // ii))
                high = min(high, (ii - hold_b - paths[a][b]) // ii)
            if low > high:
                return None
            if (low, high) == ranges[number]:
                continue
            ranges[number], changed = (low, high), True
            for a, b, hold_a, hold_b in pair.entries:
                forth, back = hold_a - high * ii, hold_b - ii + low * ii
                if not _extend(paths, a, b, forth) or not _extend(paths, b, a, back):
                    return None
    return ranges
