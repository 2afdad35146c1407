"""How far the ranges of machine facts move a forecast: every fact with a range, and each by how much.

A fact moves a forecast through the loop (then the pipeline that is built from it differs), through the launch, or through
the clock alone; whatever is the same as before is not computed again.  A test holds the result to one full evaluation a
fact and end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from tilecast.model.chip.evaluate import Evaluation, PredictError, evaluate, timed
from tilecast.model.chip.launch import run_chip
from tilecast.model.families import build_pipeline, family_of, loop_shape
from tilecast.model.kernel.variant import Variant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.machine.reading import ReadMachine
from tilecast.model.pipeline.graph import Pipeline

#: What `chip.launch` and the time of a launch read of a machine beside its pipeline.
_LAUNCH = (
    "launch.kernel_us", "chip.sm_count", "chip.clock_rated_mhz", "chip.clock_max_mhz", "tma.latency_hbm_cycles",
    "tma.latency_l2_cycles", "tma.bytes_per_clk", "hbm.tbps_achieved", "l2.store_tbps", "l2.bytes", "l2.bytes_per_clk_per_sm",
    "l2.bytes_per_clk_per_sm_lockstep",
)  # fmt: skip
#: What the clock depends on beside power.*: the limit, and the rates that price energy even where no loop waits for them.
_CLOCK = ("chip.tdp_w", "mufu.ex2_per_clk", "fma.lanes", "alu.lanes")
#: Relative changes below this are rounding.
_NOTHING = 1e-9
#: (fact, "low" or "high", TFLOP/s there).
Move = tuple[str, str, float]


@dataclass(frozen=True, slots=True)
class FactEffect:
    """TFLOP/s with one fact at the ends of its range; None where the value is that end, or where nothing runs."""

    fact: str
    at_low: float | None
    at_high: float | None

    def scaled(self, by: float) -> FactEffect:
        """The same effect, as a share, on a forecast ``by`` times as high."""
        low, high = (None if end is None else end * by for end in (self.at_low, self.at_high))
        return FactEffect(self.fact, low, high)

    def largest(self, tflops: float) -> float:
        """The larger change of a forecast of ``tflops``, as a share of it."""
        return max((abs(end / tflops - 1.0) for end in (self.at_low, self.at_high) if end is not None), default=0.0)


def fact_effects(
    workload: Workload, machine: Machine, variant: Variant, clock: str | float, answer: Evaluation
) -> tuple[FactEffect, ...]:
    """Every fact with a range that moves the forecast ``answer``, the widest effect first."""
    return effects_of(_moves(workload, machine, variant, clock, answer), answer.tflops)


def effects_of(moves: Iterable[Move], tflops: float) -> tuple[FactEffect, ...]:
    """The effects on a forecast of ``tflops``, the widest first, without those that are nothing."""
    found: dict[str, dict[str, float]] = {}
    for name, end, there in moves:
        if abs(there / tflops - 1.0) > _NOTHING:
            found.setdefault(name, {})[end] = there
    effects = [FactEffect(name, ends.get("low"), ends.get("high")) for name, ends in found.items()]
    return tuple(sorted(effects, key=lambda effect: -effect.largest(tflops)))


def moves_of(ends: Iterable[tuple[str, str, Machine]], tflops_on: Callable[[Machine], float]) -> Iterator[Move]:
    """The forecast at each of ``ends``, where a clock keeps within the limit there."""
    for name, end, moved in ends:
        try:
            there = tflops_on(moved)
        except PredictError:
            continue
        yield name, end, there


def interval(tflops: float, effects: tuple[FactEffect, ...]) -> tuple[float, float]:
    """TFLOP/s interval: every fact moved to its ends in turn, the ratios added in quadrature (as logarithms)."""
    up = down = 0.0
    for effect in effects:
        ratios = [math.log(end / tflops) for end in (effect.at_low, effect.at_high) if end is not None]
        up += max([0.0, *ratios]) ** 2
        down += min([0.0, *ratios]) ** 2
    return tflops * math.exp(-(down**0.5)), tflops * math.exp(up**0.5)


def _moves(
    workload: Workload, machine: Machine, variant: Variant, clock: str | float, answer: Evaluation
) -> Iterator[Move]:
    """Every end that a forecast may read."""
    shape = loop_shape(workload)
    fused = family_of(variant).fused
    loops = _moved_loops(shape, variant, machine) if fused else {}
    for name, end, moved in fact_ends(machine):
        try:
            if not fused:
                yield name, end, evaluate(workload, moved, variant, clock).tflops
            elif (name, end) in loops or name in _LAUNCH:
                pipeline = loops.get((name, end), answer.pipeline)
                chip = run_chip(workload, variant, pipeline, moved)
                yield name, end, timed(workload, moved, pipeline, chip, clock).tflops
            elif isinstance(clock, str) and (name.startswith("power.") or name in _CLOCK):
                yield name, end, timed(workload, moved, answer.pipeline, answer.chip, clock).tflops
        except PredictError:
            continue  # no clock keeps within the limit there


@lru_cache(maxsize=64)
def fact_ends(machine: Machine) -> tuple[tuple[str, str, Machine], ...]:
    """(fact, "low" or "high", the machine with the fact there) of every range."""
    out = []
    for name, fact in machine.facts.items():
        for end, value in (("low", fact.low), ("high", fact.high)):
            if value is not None and value != fact.value:
                out.append((name, end, machine.with_facts({name: value})))
    return tuple(out)


@lru_cache(maxsize=256)
def _moved_loops(shape: Workload, variant: Variant, machine: Machine) -> dict[tuple[str, str], Pipeline]:
    """The pipelines of the ends that change it."""
    base = build_pipeline(shape, variant, machine)
    watched = ReadMachine.of(machine)
    build_pipeline(shape, variant, watched)
    built = {
        (name, end): build_pipeline(shape, variant, moved)
        for name, end, moved in fact_ends(machine)
        if name in watched.read
    }
    return {key: pipeline for key, pipeline in built.items() if pipeline != base}
