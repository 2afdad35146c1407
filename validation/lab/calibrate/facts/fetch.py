"""Rules for the facts of instruction fetch and of spilled registers."""

from __future__ import annotations

from tilecast.model.compiled.units.fetch import INSTRUCTION_BYTES
from tilecast.validation.lab.calibrate.facts.rule import Found, Rule, Table, spread
from tilecast.validation.lab.calibrate.store import Row

#: Cycles an instruction up to which code counts as fetched for nothing, and as held by the second cache.
_FREE, _HELD = 1.1, 2.6
#: Cycles between the two clocks of sync/one_way that are not the hand-over (machine code: 15 before, 10 after).
_ONE_WAY_CODE = 25.0


def _lengths(table: Table, sms: str) -> list[tuple[int, Row]]:
    """(bytes of all copies, row) of straight-line code with copies of their own, quick enough to be limited by fetch."""
    rows = table.all("code/length", "cycles", sms=sms, shared=False, chains=16)
    sizes = []
    for row in rows:
        params = table.params(row)
        copies = int(str(params["warpgroups"]))
        sizes.append((int(str(params["instructions"])) * copies * INSTRUCTION_BYTES, row))
    return sorted(sizes, key=lambda pair: pair[0])


def _longest(table: Table, sms: str, limit: float) -> Found | None:
    """The largest code that runs within ``limit`` cycles an instruction; the range reaches to the next larger one."""
    sizes = _lengths(table, sms)
    within = [(size, row) for size, row in sizes if row.value <= limit]
    beyond = [size for size, row in sizes if row.value > limit]
    if not within or not beyond:
        return None
    held = max(size for size, _ in within if size < max(beyond))
    rows = tuple(row for size, row in within if size == held)
    return Found(float(held), float(held), float(min(size for size in beyond if size > held)), rows)


def _rate(low_kb: int, high_kb: int) -> Rule:
    """Mean cycles an instruction of code between two sizes, SMs apart, two and three copies."""

    def rule(table: Table) -> Found | None:
        rows = [
            row
            for size, row in _lengths(table, "all apart")
            if low_kb << 10 <= size <= high_kb << 10 and table.params(row)["warpgroups"] != 1
        ]
        if not rows:
            return None
        values = [row.value for row in rows]
        return Found(sum(values) / len(values), min(values), max(values), tuple(rows))

    return rule


def _queue(table: Table) -> Found | None:
    """Stores under way where a burst begins to wait: issued by then, less those that left at the later rate."""
    depths: list[tuple[float, tuple[Row, ...]]] = []
    for warps in (3, 2):
        rows = {
            n: table.one("local/burst", "issue_cycles", stores=n, warps_per_partition=warps) for n in (1, 4, 16, 24)
        }
        found = {n: row for n, row in rows.items() if row is not None}
        if len(found) < 4:
            return None
        early, late = ((found[b].value - found[a].value) / (b - a) for a, b in ((1, 4), (16, 24)))
        if late <= early:
            return None
        burst = (found[1].value - early - found[24].value + 24 * late) / (late - early)
        began = found[1].value + early * (burst - 1)
        depths.append((burst * warps - began * warps / late, tuple(found.values())))
    values = [depth for depth, _ in depths]
    return Found(values[0], min(values), max(values), depths[0][1], "three warps; the range includes two")


def _one_way(table: Table) -> Found | None:
    usual = table.one("sync/one_way", "cycles", waiters=4)
    rows = [usual, *table.all("sync/one_way", "cycles", waiters=(1, 8))]
    return spread(rows, lambda cycles: cycles - _ONE_WAY_CODE, "less 25 cycles of code between the clocks")


RULES: dict[str, Rule] = {
    "code.l1_bytes": lambda t: _longest(t, "all apart", _FREE),
    "code.l2_bytes": lambda t: _longest(t, "all", _HELD),
    "code.fetch_cycles": _rate(48, 48),
    "code.fetch_full_cycles": _rate(120, 128),
    "code.fetch_far_cycles": _rate(240, 256),
    "local.latency_cycles": lambda t: spread([t.one("local/access", "cycles", access="load", warps_per_partition=1)]),
    "local.store_queue_depth": _queue,
    "sync.mbarrier_one_way_cycles": _one_way,
}
