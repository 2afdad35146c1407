"""How the time moves with each fact of the machine: percent per percent, the kernel as it is and chosen again.

A central difference in logarithms, ``(ln t(high) - ln t(low)) / (ln high - ln low)`` with the fact moved by ``step``
both ways: -1 is a fact the time is inversely proportional to (the clock of a compute-bound kernel), 0 one that does
not matter, +1 a latency that is all there is.
"""

from __future__ import annotations

import math
from dataclasses import replace

from tilecast.base.progress import Progress, reported, silent
from tilecast.model.chip.evaluate import PredictError, check_clock
from tilecast.model.families import legality, native_family
from tilecast.model.forecast.brief import seconds_of
from tilecast.model.forecast.level import Compiler, at_hand, follows, level_words, search_of, settled
from tilecast.model.kernel.variant import Variant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.changes import is_latency, is_rate
from tilecast.model.machine.machine import Fact, Machine, machine_of
from tilecast.model.machine.schema import KEYS
from tilecast.model.search.best import Best
from tilecast.model.whatif.answers import Sensitivity
from tilecast.model.whatif.rows import Sensitivities

#: Capacities, switches and identity: a percent of these means nothing.
WHOLE = ("GB", "B", "B/SM", "columns", "lanes", "registers", "warps", "CTA", "flag", "inputs", "sm")
#: What a reader expects to see even at zero.
MAIN = (
    "mufu.ex2_per_clk", "fma.lanes", "alu.lanes", "issue.warp_inst_per_clk", "smem.bytes_per_clk",
    "tmem.read_bytes_per_clk", "tmem.write_bytes_per_clk", "l2.bytes_per_clk_per_sm", "hbm.tbps_achieved",
    "chip.sm_count", "chip.clock_max_mhz", "chip.tdp_w", "tmem.load_latency_cycles", "sync.mbarrier_roundtrip_cycles",
)  # fmt: skip
#: Below this, in percent per percent, a fact does not matter.
NOTHING = 5e-4
#: The kernel is chosen again only for facts that matter at least this much, or rates a choice could come to use.
WORTH = 0.01

#: Below it what a step does to a time drowns in rounding.
SMALLEST_STEP = 1e-6


def check_step(step: float) -> None:
    """PredictError unless facts can be moved by ``step``."""
    if not SMALLEST_STEP <= step <= 0.5:
        raise PredictError(f"step: expected a share from {SMALLEST_STEP:g} to 0.5, got {step:g}")


def sensitivities(
    workload: Workload,
    machine: Machine | str,
    variant: Variant | None = None,
    *,
    family: str | None = None,
    clock: str | float = "sustained",
    step: float = 0.05,
    reoptimised: bool = True,
    compiler: Compiler | None = at_hand,
    progress: Progress = silent,
) -> Sensitivities:
    """Every fact the forecast moves with, and the main units even where it does not, largest first.

    ``variant`` is the kernel kept (default: the best of ``family``, or of the machine's own).  ``reoptimised=False`` skips choosing
    again, which then repeats the fixed value.  ``compiler`` as in `predict`, for all forecasts.  Raises PredictError or MachineError with one sentence.
    """
    check_step(step)
    chip = machine_of(machine)
    check_clock(clock, chip)
    workload = workload.reduced()
    level = settled(compiler, workload, chip, variant, family, clock)
    found = _optimum(workload, chip, variant, family, clock, level)
    base = seconds_of(workload, chip, found.variant, clock, level)
    rows = []
    for key in reported(list(chip), "facts", len(chip.facts), progress):
        if key in MAIN or key == f"tensor.{workload.dtype}_flop_per_clk" or KEYS[key].unit not in WHOLE:
            row = _row(workload, chip, found, key, clock, step, base, reoptimised, level)
            if row is not None:
                rows.append(row)
    ordered = sorted(rows, key=lambda r: (-max(abs(r.fixed), abs(r.reoptimised)), r.fact))
    return Sensitivities(ordered, chip, workload, found.variant, clock, level_words(level))


def _optimum(
    workload: Workload,
    machine: Machine,
    variant: Variant | None,
    family: str | None,
    clock: str | float,
    level: Compiler | None,
) -> Best:
    """The kernel asked about, with the variants that could overtake it."""
    if variant is None:
        found = search_of(level)(workload, machine, family or native_family(machine).name, clock)
        return replace(found, near=tuple(v for v in found.near if follows(level, workload, machine, v)))
    verdict = legality(variant, workload, machine)
    if not verdict.legal:
        raise PredictError(f"{variant.family} cannot run {workload.label()} on {machine.name}: {verdict.sentence()}")
    found = search_of(level)(workload, machine, variant.family, clock)
    near = tuple(v for v in (found.variant, *found.near) if v != variant and follows(level, workload, machine, v))
    return replace(found, variant=variant, seconds=seconds_of(workload, machine, variant, clock, level), near=near)


def _row(
    workload: Workload, machine: Machine, found: Best, key: str, clock: str | float, step: float, base: float,
    reoptimised: bool, level: Compiler | None,
) -> Sensitivity | None:  # fmt: skip
    fact = machine.fact(key)
    ends = ends_of(key, fact, step)
    if ends is None:
        return None
    machines = tuple(machine.with_facts({key: value}) for value in ends)
    if not all(legality(found.variant, workload, m).legal for m in machines):
        return None
    fixed = tuple(seconds_of(workload, m, found.variant, clock, level) for m in machines)
    span = math.log(ends[1] / ends[0])
    slope = math.log(fixed[1] / fixed[0]) / span
    free = fixed
    if reoptimised and (abs(slope) >= WORTH or key in MAIN):
        free = tuple(
            _best(workload, m, found, seconds, clock, level) for m, seconds in zip(machines, fixed, strict=True)
        )
    free_slope = math.log(free[1] / free[0]) / span
    if key not in MAIN and max(abs(slope), abs(free_slope)) < NOTHING:
        return None
    return Sensitivity(
        key, KEYS[key].meaning, group_of(key), fact.value, fact.unit, fact.kind, slope, free_slope, base * 1e3, ends[0],
        ends[1], fixed[0] * 1e3, fixed[1] * 1e3, free[0] * 1e3, free[1] * 1e3,
    )  # fmt: skip


def ends_of(key: str, fact: Fact, step: float) -> tuple[float, float] | None:
    """The fact moved down and up, inside what the schema allows; None where it has no room."""
    rule = KEYS[key]
    low, high = fact.value * (1 - step), fact.value * (1 + step)
    if rule.unit == "SM":
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, rule.low), min(high, rule.high)
    return (low, high) if 0 < low < high else None


def _best(
    workload: Workload, machine: Machine, found: Best, seconds: float, clock: str | float, level: Compiler | None
) -> float:
    """Shortest time among the kept variant and those that could overtake it."""
    for variant in found.near:
        if legality(variant, workload, machine).legal:
            seconds = min(seconds, seconds_of(workload, machine, variant, clock, level))
    return seconds


def group_of(key: str) -> str:
    """ "rate", "latency", "power" or "chip": under which a fact is listed."""
    if is_rate(key):
        return "rate"
    if is_latency(key):
        return "latency"
    return "power" if key.startswith("power.") or key == "chip.tdp_w" else "chip"
