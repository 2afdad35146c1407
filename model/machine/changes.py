"""What-if changes: facts by the names people use, and the machine that results.

A name is a full key (``mufu.ex2_per_clk``), the beginning of one (``mufu.ex2``: of several facts that begin so, the
rate is meant; ``hbm.tbps``: the specified one, with which the achieved one moves), a section (``smem``: every rate in it) or a group (``clock``, ``sms``, ``tdp``, ``latency``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tilecast.base.words import close_matches
from tilecast.model.machine.machine import Machine, MachineError
from tilecast.model.machine.schema import KEYS, WHOLE_UNITS

_GROUPS: dict[str, tuple[str, ...]] = {
    "clock": ("chip.clock_max_mhz",),
    "sms": ("chip.sm_count",),
    "tdp": ("chip.tdp_w", "power.short_run_w"),
}
#: Facts that move with another unless they are changed themselves: what is reached of a rate, what a limit lets through in short runs
#: (as `Machine.at_power` has it), a launch within a graph.
_MOVES_WITH = {
    "fma.lanes": "fma.achieved_lanes",
    "hbm.tbps_spec": "hbm.tbps_achieved",
    "chip.tdp_w": "power.short_run_w",
    "launch.kernel_us": "launch.graph_kernel_us",
}


@dataclass(frozen=True, slots=True)
class Change:
    """One fact moved from ``before`` to ``after`` (in ``unit``)."""

    fact: str
    unit: str
    before: float
    after: float


def is_rate(key: str) -> bool:
    """Whether more of the fact means more throughput: something per clock and SM, or bytes a second."""
    unit = KEYS[key].unit
    return unit.endswith("/clk/SM") or unit == "TB/s"


def is_latency(key: str) -> bool:
    """Whether the fact is a time in cycles."""
    return KEYS[key].unit == "cycles"


def facts_named(name: str, machine: Machine) -> tuple[str, ...]:
    """The facts of ``machine`` that ``name`` means; MachineError with the nearest names when there is none."""
    word = name.strip().lower().replace("-", "_")
    if machine.has(word):
        return (word,)
    if word == "latency":
        return tuple(key for key in machine if is_latency(key))
    if word in _GROUPS:
        return tuple(key for key in _GROUPS[word] if machine.has(key))
    section = [key for key in machine if key.startswith(f"{word}.")]
    if section:
        rates = [key for key in section if is_rate(key)]
        if not rates:
            raise MachineError(f"{machine.name}: '{name}' has no rates: name one of {', '.join(section)}")
        return tuple(rates)
    found = [key for key in machine if key.startswith(word)] if "." in word else []
    if len(found) > 1:
        found = [key for key in found if is_rate(key)] or found
        if not all(is_rate(key) for key in found):
            raise MachineError(f"{machine.name}: '{name}' could be {' or '.join(found)}: name one")
    if found:
        return tuple(found)
    if word in KEYS:
        raise MachineError(f"{machine.name}: the machine has no {word} ({KEYS[word].meaning}) to change")
    raise MachineError(f"{machine.name}: unknown fact '{name}'{_near(word, machine)}")


def _near(word: str, machine: Machine) -> str:
    """'; did you mean ...' among full keys, sections and groups."""
    sections = {key.split(".")[0] for key in machine if is_rate(key)}
    known = (*machine, *sorted(sections), *_GROUPS, "latency")
    close = close_matches(word, known, cutoff=0.5)
    if not close:
        # A right fact in the wrong section, or without one.
        tail = word.rpartition(".")[2]
        fields = {key.partition(".")[2]: key for key in machine}
        close = [fields[field] for field in close_matches(tail, fields, cutoff=0.6)]
    if close:
        return f"; did you mean {' or '.join(close)}?"
    return f"; sections: {', '.join(sorted(sections))}; `tilecast machine show {machine.name}` lists every fact"


def change_machine(
    machine: Machine, changes: Mapping[str, float] | None = None, scales: Mapping[str, float] | None = None
) -> tuple[Machine, tuple[Change, ...]]:
    """The machine with facts set (``changes``) or multiplied (``scales``), and what that moved; ``machine`` stays.

    Raises MachineError, one sentence, for no change at all, unknown or ambiguous names, one fact changed twice,
    values that are not finite or lie outside what the schema allows, and fractions of things that only come whole.
    """
    values: dict[str, float] = {}
    for name, value in (changes or {}).items():
        number = _number(machine, name, value)
        keys = _leading(facts_named(name, machine))
        if len(keys) > 1:
            raise MachineError(
                f"{machine.name}: '{name}' names {len(keys)} facts: set one of {', '.join(keys)}, or scale them together"
            )
        _put(machine, values, keys, (number,))
    for name, value in (scales or {}).items():
        factor = _number(machine, name, value)
        if factor <= 0:
            raise MachineError(f"{machine.name}: '{name}' takes a factor above 0, got {factor:g}")
        keys = facts_named(name, machine)
        _put(machine, values, keys, tuple(machine[key] * factor for key in keys))
    if not values:
        raise MachineError(
            f"{machine.name}: nothing to change: set (--set mufu.ex2=32) or scale (--scale smem=2) at least one fact"
        )
    values = moved_together(machine, values)
    changed = machine.with_facts(values)
    moved = tuple(Change(key, KEYS[key].unit, machine[key], changed[key]) for key in values)
    return changed, moved


def moved_together(machine: Machine, values: Mapping[str, float]) -> dict[str, float]:
    """``values``, and those of the facts that move with them by the same factor."""
    out = dict(values)
    for key, value in values.items():
        other = _MOVES_WITH.get(key, "")
        if machine.has(other) and other not in values and machine[key]:
            rule = KEYS[other]
            out[other] = min(max(machine[other] * value / machine[key], rule.low), rule.high)
    return out


def _leading(keys: tuple[str, ...]) -> tuple[str, ...]:
    """``keys`` without those that move with another of them."""
    led = {_MOVES_WITH.get(key) for key in keys}
    return tuple(key for key in keys if key not in led)


def _number(machine: Machine, name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise MachineError(f"{machine.name}: '{name}' takes a finite number, got {value}")
    return float(value)


def _put(machine: Machine, values: dict[str, float], keys: Iterable[str], new: Iterable[float]) -> None:
    for key, value in zip(keys, new, strict=True):
        if key in values:
            raise MachineError(f"{machine.name}: {key} is changed twice")
        unit = KEYS[key].unit
        if unit in WHOLE_UNITS and value != int(value):
            raise MachineError(f"{machine.name}: {key} takes a whole number ({unit}), got {value:g}")
        values[key] = value


def parse_changes(option: str, texts: Iterable[str]) -> dict[str, float]:
    """{"name": value} from "name=value" texts of a command line ``option``; MachineError on anything else."""
    out: dict[str, float] = {}
    for text in texts:
        name, equals, number = text.partition("=")
        if not equals or not name.strip() or not number.strip():
            raise MachineError(f"{option}: expected fact=number, got '{text}'")
        if name.strip() in out:
            raise MachineError(f"{option}: {name.strip()} is given twice")
        try:
            out[name.strip()] = float(number)
        except ValueError:
            raise MachineError(f"{option}: {name.strip()} takes a number, got '{number.strip()}'") from None
    return out
