"""The level of the loops at hand against measured tables: how far off, and which kernel it would have picked."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from tilecast.base.data import MEASURED
from tilecast.model.compiled.code import CodeKey, KernelCode
from tilecast.model.compiled.loops.shelf import loop_at_hand
from tilecast.model.families import parse_variant
from tilecast.model.forecast.answer import BEFORE, COMPILED
from tilecast.model.kernel.verdict import VariantError
from tilecast.model.machine.machine import load_machine
from tilecast.validation.lab.measure.records import Measured
from tilecast.validation.measured.recorded import Row

#: The variants of the H200's tables whose loops are at hand, measured again as they are written now: the loops are today's.
AGAIN = MEASURED / "h200_at_hand.csv"
#: Shapes count where so many variants of a kernel were measured.
LEAST = 8


@dataclass(frozen=True, slots=True)
class Pick:
    """One shape: how far the variant that each level picks lies behind the best measured one (shares).

    The level of the loops at hand picks of the measured variants whose loops are, which ``at_hand`` counts; the forecast
    before compilation picks of all.
    """

    label: str
    variants: int
    at_hand: int
    kept: float
    fluid: float
    #: The best of those at hand.
    possible: float
    #: The first of all variants, each by machine code where its loop is at hand, else before compilation: no verb compares so.
    mixed: float


def as_written_now(points: Iterable[Measured], again: Iterable[Measured]) -> list[Measured]:
    """``points``, those that ``again`` has of the same GPU, kernel, variant and shape by its measurement."""
    later = {point.key(): point for point in again}
    return [replace(later.get(point.key(), point), role=point.role) for point in points]


def kept_profiles(points: Iterable[Measured], machine: str | None) -> dict[CodeKey, KernelCode]:
    """The code that the loops at hand give for every measured kernel that has one."""
    found: dict[CodeKey, KernelCode] = {}
    for point in points:
        try:
            variant = parse_variant(point.variant)
        except VariantError:
            continue  # the row is refused with that sentence
        made = loop_at_hand(point.workload(), load_machine(machine or point.machine), variant)
        if made is not None and made.code is not None:
            found[point.code_key()] = made.code
    return found


def picks_of(rows: Iterable[Row], least: int = LEAST) -> tuple[Pick, ...]:
    """The picks for every shape and kernel with enough measured variants, one of them at hand."""
    shapes: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        shapes.setdefault((row.point.kernel, row.point.workload()), []).append(row)
    out = []
    for (kernel, work), members in shapes.items():
        known = [row for row in members if COMPILED in row.cycles]
        if len(members) < least or not known:
            continue
        best = min(row.point.cycles for row in members)
        kept = min(known, key=lambda row: row.cycles[COMPILED])
        fluid = min(members, key=lambda row: row.cycles[BEFORE])
        mixed = min(members, key=lambda row: row.cycles.get(COMPILED, row.cycles[BEFORE]))
        behind = [row.point.cycles / best - 1 for row in (kept, fluid)]
        possible = min(row.point.cycles for row in known) / best - 1
        label = f"{kernel} {work.label()}"  # type: ignore[attr-defined]
        out.append(Pick(label, len(members), len(known), behind[0], behind[1], possible, mixed.point.cycles / best - 1))
    return tuple(out)


def picks_text(picks: Sequence[Pick]) -> list[str]:
    """Lines for people; none without picks."""
    if not picks:
        return []
    lines = [
        "",
        f"First pick behind the best of all measured variants, {len(picks)} shapes with {LEAST} or more ({sum(p.at_hand for p in picks)} of "
        f"{sum(p.variants for p in picks)} variants have a loop at hand):",
    ]
    for name, shares in (
        ("by the loops at hand", [p.kept for p in picks]),
        ("before compilation", [p.fluid for p in picks]),
        ("levels mixed", [p.mixed for p in picks]),
        ("best of those at hand", [p.possible for p in picks]),
    ):
        lines.append(
            f"  {name:<22} {statistics.mean(shares):.1%} (mean), {statistics.median(shares):.1%} (median), {max(shares):.1%} (worst)"
        )
    return lines
