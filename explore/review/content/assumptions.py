"""The machine facts a forecast rests on: kind, source, range, and how far the range moves the answer."""

from __future__ import annotations

import hashlib

from tilecast.explore.review.content.content import Assumption
from tilecast.explore.review.content.roofline import UNIT_FACTS
from tilecast.model.forecast.answer import Explained
from tilecast.model.forecast.interval import FactEffect
from tilecast.model.machine.machine import Fact, Machine
from tilecast.model.machine.schema import KEYS

#: Facts that every forecast reads besides its units' rates.
_CHIP = (
    "chip.sm_count",
    "chip.clock_max_mhz",
    "chip.tdp_w",
    "power.short_run_w",
    "hbm.tbps_achieved",
    "l2.bytes_per_clk_per_sm",
)


def assumptions(p: Explained) -> tuple[Assumption, ...]:
    """Facts whose range moves the forecast, those changed by hand and the rates of the units; the widest effect first."""
    machine = p.machine
    ranged = {effect.fact: effect for effect in p.fact_effects}
    changed = tuple(name for name in machine if machine.fact(name).kind == "what-if")
    units = dict.fromkeys(unit for kernel in p.kernels for unit in kernel.pipeline.demand())
    rates = tuple(UNIT_FACTS[u][0].format(dtype=p.workload.dtype) for u in units if u in UNIT_FACTS)
    names = dict.fromkeys((*ranged, *changed, *rates, *_CHIP))
    rows = [_row(p, name, ranged.get(name)) for name in names if machine.has(name)]
    order = {name: i for i, name in enumerate(names)}
    return tuple(sorted(rows, key=lambda row: (-row.effect, order[row.fact])))


def _row(p: Explained, name: str, effect: FactEffect | None) -> Assumption:
    fact = p.machine.fact(name)
    if effect is None:
        return Assumption(
            name, KEYS[name].meaning, fact.value, fact.unit, fact.kind, _source(fact), None, None, None, None, 0.0
        )
    low, high = _ends(fact)
    # An end that is the value itself moves nothing.
    at_low, at_high = (p.tflops if end is None else end for end in (effect.at_low, effect.at_high))
    return Assumption(
        name, KEYS[name].meaning, fact.value, fact.unit, fact.kind, _source(fact), low, high, at_low, at_high,
        effect.largest(p.tflops),
    )  # fmt: skip


def _ends(fact: Fact) -> tuple[float, float]:
    return (fact.value if fact.low is None else fact.low), (fact.value if fact.high is None else fact.high)


def _source(fact: Fact) -> str:
    note = f" ({fact.note})" if fact.note else ""
    via = f" [from {fact.inherited_from}]" if fact.inherited_from else ""
    return fact.source + note + via


def machine_digest(machine: Machine) -> str:
    """First 12 hex digits of SHA-256 over every fact: two reports with the same digest had the same machine."""
    lines = [
        f"{key}={f.value!r} {f.unit} {f.kind} {f.low!r} {f.high!r} {f.source}"
        for key, f in sorted(machine.facts.items())
    ]
    text = "\n".join((machine.name, machine.arch, machine.tensor_kind, *lines))
    return hashlib.sha256(text.encode()).hexdigest()[:12]
