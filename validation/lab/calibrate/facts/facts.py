"""Rows to facts of a machine file: a pure function, one rule a fact, every rule with the rows it rests on.

A rule gives the value from the median rows, and low and high from the spread over repeats or, where the number depends
on conditions that a kernel meets, from the range over those conditions.  A rule without its rows gives nothing: the
fact keeps its cited value and is listed as a hole.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tilecast.model.machine.machine import Fact, Machine
from tilecast.model.machine.schema import KEYS
from tilecast.validation.lab.calibrate.cases import Value
from tilecast.validation.lab.calibrate.store import Row

#: Facts that are definitions, capacities or data sheet: no microbenchmark fills them.
NOT_MEASURABLE = (
    "chip.clock_rated_mhz", "chip.tdp_w", "chip.compute_capability", "tensor.fp4_flop_per_clk", "alu.minmax_inputs",
    "fma.packed_f32x2", "fma.lanes", "issue.warp_inst_per_clk", "smem.per_sm_bytes", "reg.file_bytes", "reg.max_per_thread",
    "sm.max_warps", "sm.max_ctas", "tmem.columns", "tmem.lanes", "tmem.load_reduce", "hbm.tbps_spec",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Found:
    """A rule's answer: the value, its range, the rows it came from, and what must be said with it."""

    value: float
    low: float
    high: float
    rows: tuple[Row, ...]
    note: str = ""


class Table:
    """The rows of one GPU, looked up by benchmark and parameters; later rows replace earlier ones."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows: dict[tuple[str, str, str, str], Row] = {}
        for row in rows:
            self._rows[(row.group, row.benchmark, row.params, row.quantity)] = row
        self._params: dict[str, dict[str, Value]] = {row.params: json.loads(row.params) for row in self._rows.values()}

    def all(self, place: str, quantity: str, **params: Value | tuple[Value, ...]) -> list[Row]:
        """Rows of ``place`` ("group/benchmark") with these parameters; a tuple allows any of its values."""
        group, benchmark = place.split("/")
        return [
            row
            for (g, b, text, q), row in self._rows.items()
            if (g, b, q) == (group, benchmark, quantity) and _matches(self._params[text], params)
        ]

    def one(self, place: str, quantity: str, **params: Value) -> Row | None:
        """The single row with these parameters, or None; LookupError when they leave a choice."""
        found = self.all(place, quantity, **params)
        if len(found) > 1:
            raise LookupError(f"{place} {quantity} {params}: {len(found)} rows")
        return found[0] if found else None

    def params(self, row: Row) -> dict[str, Value]:
        """A row's parameters."""
        return self._params[row.params]


def _matches(have: Mapping[str, Value], wanted: Mapping[str, Value | tuple[Value, ...]]) -> bool:
    return all(
        have.get(key) in value if isinstance(value, tuple) else have.get(key) == value for key, value in wanted.items()
    )


Rule = Callable[[Table], Found | None]


def spread(rows: Sequence[Row | None], how: Callable[[float], float] = lambda x: x, note: str = "") -> Found | None:
    """The first row's value through ``how``, the range over all of them and their repeats; None when any is missing."""
    have = [row for row in rows if row is not None]
    if not have or len(have) < len(rows):
        return None
    ends = [how(x) for row in have for x in (row.low, row.value, row.high)]
    return Found(how(have[0].value), min(ends), max(ends), tuple(have), note)


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(intercept, slope) of the least-squares line through at least two points with different abscissas."""
    count = len(points)
    mean_x, mean_y = sum(x for x, _ in points) / count, sum(y for _, y in points) / count
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    return mean_y - slope * mean_x, slope


def derive(rows: Iterable[Row]) -> dict[str, Fact]:
    """Every fact that the rows determine, by key, kind "measured"; the rows must be of one GPU and driver."""
    from tilecast.validation.lab.calibrate.facts import chip as facts_chip
    from tilecast.validation.lab.calibrate.facts import fetch as facts_fetch
    from tilecast.validation.lab.calibrate.facts import power as facts_power
    from tilecast.validation.lab.calibrate.facts import sm as facts_sm

    table = Table(rows)
    facts: dict[str, Fact] = {}
    for rules in (facts_sm.RULES, facts_fetch.RULES, facts_chip.RULES, facts_power.RULES):
        for key, rule in rules.items():
            found = rule(table)
            if found is not None:
                facts[key] = Fact(
                    found.value, KEYS[key].unit, "measured", source_text(found.rows), found.low, found.high, found.note
                )
    return facts


def source_text(rows: Sequence[Row]) -> str:
    """Command, GPU, driver, date and the rows: "tilecast calibrate (NVIDIA H200, ...): tensor/wgmma_rate {...} cycles"."""
    first = rows[0]
    told = "; ".join(f"{row.group}/{row.benchmark} {row.params} {row.quantity}".replace('"', "") for row in rows[:3])
    more = f" and {len(rows) - 3} rows more" if len(rows) > 3 else ""
    return f"tilecast calibrate ({first.gpu}, driver {first.driver}, {first.date}): {told}{more}"


def holes(base: Machine, facts: Mapping[str, Fact]) -> list[str]:
    """Facts of ``base`` that a microbenchmark could fill and ``facts`` lacks, and required ones it only assumes."""
    return [key for key in base if key not in facts and key not in NOT_MEASURABLE]
