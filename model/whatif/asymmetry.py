"""The map of asymmetric scaling: two rates of a machine along two axes, what binds and what is reached in each cell.

Every other fact is the machine's, and so is the clock unless another is given: one number for the whole map, that of
the machine's own forecast, so that cells differ by their two rates alone and not by what the power limit makes of them.
In every cell the kernel is chosen among those that are best somewhere (at the machine, in the corners of the map, from
machine code in the middles of its edges too), with its share of emulated exponentials chosen again, and those of the cells
around it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from tilecast.base.html_table import html_table
from tilecast.base.progress import Progress, reported, silent
from tilecast.base.words import significant
from tilecast.model.chip.evaluate import PredictError
from tilecast.model.forecast.answer import BEFORE
from tilecast.model.forecast.brief import Brief
from tilecast.model.forecast.level import Compiler, at_hand, following, follows, level_words
from tilecast.model.kernel.variant import emulated_share, variant_text, with_emulated_share
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.changes import facts_named, is_rate, moved_together
from tilecast.model.machine.machine import Machine, MachineError, load_machine, machine_names, machine_of
from tilecast.model.machine.schema import KEYS, KINDS
from tilecast.model.passes import FORWARD, Pass

#: Machines a map shows unless told: the data-centre line the question is about.
SHOWN = ("h100-sxm", "b200", "b300", "gb300", "rubin")
_SHARES = (0.0, 0.125, 0.25, 0.375, 0.5)
#: A cell keeps the smaller share unless another is faster by more than this.
_GAIN = 0.002
_LEVELS = (0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0)


@dataclass(frozen=True, slots=True)
class MapPoint:
    """A GPU's place on the map: its two rates, and where they come from.  Not a forecast for that GPU."""

    name: str
    label: str
    x: float
    y: float
    kind: str
    source: str


@dataclass(frozen=True, slots=True, repr=False)
class AsymmetryMap:
    """Grid data: row ``j``, column ``i`` belongs to ``y[j]`` and ``x[i]`` (geometric steps, both ascending).

    ``bound_by`` and ``lap`` as in `Brief`; ``tflops`` in 10^12 FLOP/s at ``clock_mhz``; ``variants`` are the kernels chosen
    in the cells, ``emulated_share`` their shares of exponentials on the FMA pipe (0 where the family has no such knob);
    ``variant`` is the machine's own.  ``levels`` are throughputs for iso-performance lines:
    multiples of what the machine itself reaches (``base_tflops``).
    """

    workload: Workload
    machine: str
    x_fact: str
    y_fact: str
    x_unit: str
    y_unit: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    tflops: tuple[tuple[float, ...], ...]
    bound_by: tuple[tuple[str, ...], ...]
    lap: tuple[tuple[str, ...], ...]
    emulated_share: tuple[tuple[float, ...], ...]
    variants: tuple[tuple[str, ...], ...]
    clock_mhz: float
    base_tflops: float
    variant: str
    levels: tuple[float, ...]
    points: tuple[MapPoint, ...]
    #: What every cell was made from (`forecast.level`).
    level: str = BEFORE
    #: The pass, and what stands before the shape in headlines.
    asked_pass: str = "fwd"
    words: str = ""

    @property
    def level_note(self) -> str:
        """For headlines: the level where it is not before compilation."""
        return "" if self.level == BEFORE else f", {self.level}"

    def __repr__(self) -> str:
        cells = f"{len(self.x)} x {len(self.y)} cells of {self.x_fact} and {self.y_fact}"
        return f"<AsymmetryMap {self.machine}: {cells}, {self.words}{self.workload.label()}, {self.clock_mhz:.0f} MHz>"

    def _repr_html_(self) -> str:
        """TFLOP/s and what binds in every cell, the higher ``y`` above, as `tilecast map` draws them."""
        rows = [
            (f"{y:.4g}", *(f"{significant(t)} {bound}" for t, bound in zip(tflops, bound_by, strict=True)))
            for y, tflops, bound_by in zip(self.y, self.tflops, self.bound_by, strict=True)
        ]
        title = f"{self.machine}: {self.words}{self.workload.label()}, {self.clock_mhz:.0f} MHz{self.level_note}; TFLOP/s and what binds"
        return html_table(title, (f"{self.y_fact} by {self.x_fact}", *(f"{x:.4g}" for x in self.x)), rows[::-1])

    def to_dict(self) -> dict[str, Any]:
        """Keys as documented in docs/json.md."""
        out: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        asked, _ = out.pop("asked_pass"), out.pop("words")
        if asked != FORWARD.name:
            out = {"pass": asked, **out}
        out["workload"] = self.workload.as_dict()
        out["points"] = [{key: getattr(point, key) for key in point.__slots__} for point in self.points]
        return out


def asymmetry_map(
    workload: Workload,
    machine: Machine | str,
    *,
    axes: tuple[str, str] | None = None,
    grid: int = 13,
    span: float = 4.0,
    clock: str | float | None = None,
    variant: Any = None,
    family: str | None = None,
    shown: Sequence[str] = SHOWN,
    compiler: Compiler | None = at_hand,
    progress: Progress = silent,
    asked_pass: Pass = FORWARD,
) -> AsymmetryMap:
    """The map of two facts (default: matrix rate of the dtype, then ex2 rate) from value/``span`` to value*``span``.

    ``grid`` cells each way (odd, so that the machine itself has one), ``clock`` None (that of the machine's own
    sustained forecast), MHz, or a regime, which settles in each cell.  ``shown`` are machine names, machine files or
    entries of map_points.toml; those without both facts, or off the map, are left out.
    ``compiler`` as in `predict`: one level for all cells, so that of machine code only kernels are chosen whose loops are at
    hand.  Raises MachineError, PredictError or WorkloadError (all ValueError) with one sentence.
    """
    chip = machine_of(machine)
    workload = workload.reduced()
    if not 3 <= grid <= 101 or grid % 2 == 0:
        raise PredictError(f"grid: expected an odd number of cells from 3 to 101, got {grid}")
    if not 1.0 < span <= 64.0:
        raise PredictError(f"span: expected a factor above 1 and at most 64, got {span:g}")
    x_fact, y_fact = _axes(chip, axes or (f"tensor.{workload.dtype}_flop_per_clk", "mufu.ex2_per_clk"))
    xs, ys = _ticks(chip[x_fact], x_fact, grid, span), _ticks(chip[y_fact], y_fact, grid, span)
    points = _points(shown, x_fact, y_fact, xs, ys)
    start = "sustained" if clock is None else clock

    def at(x: float, y: float) -> Machine:
        return chip.with_facts(moved_together(chip, {x_fact: x, y_fact: y}))

    level = asked_pass.settled(following(compiler, at(xs[0], ys[0])), workload, chip, variant, family, start)
    base = asked_pass.kernel(workload, chip, variant, family, start, level)
    own = asked_pass.brief(workload, chip, base, start, level)
    held: str | float = own.clock_mhz if clock is None else clock
    if variant is None and clock is None:
        # Without the power limit another kernel may be the best one.
        base = asked_pass.kernel(workload, chip, None, base.family, held, level)
    # Of machine code more kernels are best somewhere, each at its own rhythm: the middles are asked for them too.
    across, up = ((t[0], t[-1]) if level is None else (t[0], t[len(t) // 2], t[-1]) for t in (xs, ys))
    searched = () if variant is not None else [at(x, y) for x in across for y in up]
    kernels = _kernels(asked_pass, workload, chip, base, searched, held, level)
    cells: list[list[tuple[Brief, Any]]] = []
    for y in reported(ys, "rows", len(ys), progress):
        row: list[tuple[Brief, Any]] = []
        for i, x in enumerate(xs):
            hint = _on_the_steps(cells[-1][i][1] if cells else row[-1][1] if row else kernels[0])
            cell = _cell(asked_pass, workload, at(x, y), kernels, held, hint, level)
            if x == chip[x_fact] and y == chip[y_fact]:
                # The machine itself: the kernel as the search or the caller chose it, its share of emulation included.
                cell = asked_pass.brief(workload, chip, base, held, level), base
            row.append(cell)
        cells.append(row)
    if variant is None:
        _try_neighbours(
            cells, lambda i, j, kernel: _forecast(asked_pass, workload, at(xs[i], ys[j]), kernel, held, level)
        )
    reached = asked_pass.brief(workload, chip, base, held, level).tflops
    return AsymmetryMap(
        workload, chip.name, x_fact, y_fact, KEYS[x_fact].unit, KEYS[y_fact].unit, xs, ys,
        tuple(tuple(cell.tflops for cell, _ in row) for row in cells),
        tuple(tuple(cell.bound_by for cell, _ in row) for row in cells),
        tuple(tuple(cell.critical_unit for cell, _ in row) for row in cells),
        tuple(tuple(emulated_share(kernel) or 0.0 for _, kernel in row) for row in cells),
        tuple(tuple(variant_text(kernel) for _, kernel in row) for row in cells),
        own.clock_mhz if clock is None or isinstance(clock, str) else float(clock), reached, variant_text(base),
        tuple(reached * multiple for multiple in _LEVELS), points, level_words(level), asked_pass.name, asked_pass.words,
    )  # fmt: skip


def _axes(machine: Machine, names: tuple[str, str]) -> tuple[str, str]:
    """The two facts; of a section with several rates it must be said which."""
    keys = []
    for name in names:
        found = [key for key in facts_named(name, machine) if is_rate(key)]
        if not found:
            raise MachineError(f"map: '{name}' is no rate: an axis takes something per clock, or bytes a second")
        if len(found) > 1:
            raise MachineError(f"map: '{name}' names {len(found)} rates: an axis takes one of {', '.join(found)}")
        keys.append(found[0])
    if keys[0] == keys[1]:
        raise MachineError(f"map: both axes are {keys[0]}: name two facts")
    return keys[0], keys[1]


def _ticks(value: float, key: str, grid: int, span: float) -> tuple[float, ...]:
    """Geometric steps around ``value``, inside the schema."""
    rule = KEYS[key]
    step = span ** (2.0 / (grid - 1))
    ticks = (value * step ** (i - grid // 2) for i in range(grid))
    return tuple(tick for tick in ticks if rule.low <= tick <= rule.high)


def _kernels(
    asked: Pass, workload: Workload, machine: Machine, base: Any, machines: Sequence[Machine], clock: str | float,
    level: Compiler | None,
) -> tuple[Any, ...]:  # fmt: skip
    """The machine's own kernel and those that are best on ``machines``, shares of emulation apart where the level allows."""
    found = [asked.kernel(workload, other, None, base.family, clock, level) for other in machines]
    plain = ((with_emulated_share(variant, 0.0), variant) for variant in (base, *found))
    return tuple(dict.fromkeys(p if follows(level, workload, machine, p) else variant for p, variant in plain))


def _cell(
    asked: Pass,
    workload: Workload,
    machine: Machine,
    kernels: tuple[Any, ...],
    clock: str | float,
    hint: Any,
    level: Compiler | None,
) -> tuple[Brief, Any]:
    """The forecast of a cell and its kernel: uphill from the neighbour's share of emulation with the neighbour's knobs,
    then the other kernels."""
    found, best = asked.brief(workload, machine, hint, clock, level), hint

    def better(variant: Any, margin: float) -> Brief | None:
        if not follows(level, workload, machine, variant):
            return None
        tried = asked.brief(workload, machine, variant, clock, level)
        return tried if tried.seconds < found.seconds * margin else None

    # Down first, and down for as good as equal: a smaller share leaves the FMA pipe alone.
    for direction, margin in ((-1, 1 + _GAIN), (1, 1 - _GAIN)):
        while (share := _step(best, direction)) is not None:
            tried = better(with_emulated_share(best, share), margin)
            if tried is None:
                break
            found, best = tried, with_emulated_share(best, share)
    for kernel in kernels:
        # With the share found so far, and with its own: of machine code the former may not be at hand.
        for variant in dict.fromkeys((with_emulated_share(kernel, emulated_share(best) or 0.0), kernel)):
            tried = better(variant, 1 - _GAIN) if variant != best else None
            if tried is not None:
                found, best = tried, variant
    return found, best


def _forecast(
    asked: Pass, workload: Workload, machine: Machine, kernel: Any, clock: str | float, level: Compiler | None
) -> Brief | None:
    """The forecast of ``kernel``; None where its machine code is not at hand."""
    return asked.brief(workload, machine, kernel, clock, level) if follows(level, workload, machine, kernel) else None


def _try_neighbours(cells: list[list[tuple[Brief, Any]]], forecast: Callable[[int, int, Any], Brief | None]) -> None:
    """Give each cell the kernel of a neighbour where that is faster, until none is: what is best here is good next door, and the way
    uphill may have missed it.  ``forecast`` (column, row, kernel) is its forecast there."""
    open_cells = {(i, j) for j, row in enumerate(cells) for i in range(len(row))}
    while open_cells:
        i, j = open_cells.pop()
        around = {(i + a, j + b) for a, b in ((-1, 0), (1, 0), (0, -1), (0, 1))}
        around = {(k, m) for k, m in around if 0 <= m < len(cells) and 0 <= k < len(cells[m])}
        for kernel in dict.fromkeys(cells[m][k][1] for k, m in sorted(around)):
            found = cells[j][i][0]
            tried = forecast(i, j, kernel) if kernel != cells[j][i][1] else None
            if tried is not None and tried.seconds < found.seconds * (1 - _GAIN):
                cells[j][i] = tried, kernel
                open_cells |= around


def _step(variant: Any, direction: int) -> float | None:
    """The next share of emulation in ``direction``; None beyond the last, or where the family has none."""
    share = emulated_share(variant)
    if share is None:
        return None
    at = _SHARES.index(share) + direction
    return _SHARES[at] if 0 <= at < len(_SHARES) else None


def _on_the_steps(variant: Any) -> Any:
    """The variant with the nearest of the map's shares of emulation: the search refines between them."""
    share = emulated_share(variant) or 0.0
    return with_emulated_share(variant, min(_SHARES, key=lambda step: abs(step - share)))


def _points(
    shown: Sequence[str], x_fact: str, y_fact: str, xs: tuple[float, ...], ys: tuple[float, ...]
) -> tuple[MapPoint, ...]:
    points = []
    for name in shown:
        point = _cited(name, x_fact, y_fact) if name in _catalogue() else _machine_point(name, x_fact, y_fact)
        if point is not None and xs[0] <= point.x <= xs[-1] and ys[0] <= point.y <= ys[-1]:
            points.append(point)
    return tuple(points)


def _machine_point(name: str, x_fact: str, y_fact: str) -> MapPoint | None:
    try:
        machine = load_machine(name)
    except MachineError:
        if "/" in name or name.endswith(".toml"):
            raise
        known = ", ".join((*machine_names(), *_catalogue()))
        raise MachineError(f"map: no machine '{name}' to show; known: {known}") from None
    if not (machine.has(x_fact) and machine.has(y_fact)):
        return None
    pair = (machine.fact(x_fact), machine.fact(y_fact))
    label = machine.name.upper().replace("-SXM", "")
    return MapPoint(name, label, pair[0].value, pair[1].value, _weaker(pair[0].kind, pair[1].kind),
                    f"machine file {machine.name}")  # fmt: skip


def _cited(name: str, x_fact: str, y_fact: str) -> MapPoint | None:
    entry = _catalogue()[name]
    facts = entry["facts"]
    if x_fact not in facts or y_fact not in facts:
        return None
    x, y = facts[x_fact], facts[y_fact]
    return MapPoint(name, entry["label"], float(x["value"]), float(y["value"]), _weaker(x["kind"], y["kind"]),
                    f"{x_fact}: {x['source']}; {y_fact}: {y['source']}")  # fmt: skip


def _weaker(one: str, other: str) -> str:
    return max(one, other, key=KINDS.index)


@lru_cache(maxsize=1)
def _catalogue() -> dict[str, Any]:
    """map_points.toml: cited rates of GPUs that are not complete machines."""
    path = Path(__file__).parent / "map_points.toml"
    return tomllib.loads(path.read_text(encoding="utf-8"))
