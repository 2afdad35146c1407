"""What a calibration hands over: a machine file, the table cited against measured, and the holes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from tilecast.model.machine.machine import Fact, Machine, load_machine, machine_names
from tilecast.model.machine.schema import KEYS, MachineError, check_fact
from tilecast.validation.lab.calibrate.facts.facts import derive, holes
from tilecast.validation.lab.calibrate.gpu import Identity
from tilecast.validation.lab.calibrate.store import Row


def base_machine(gpu_name: str, compute_capability: int) -> Machine:
    """The shipped machine to inherit: the same compute capability, then the most words of its title in the GPU's name.

    Without one of the same capability, the nearest; what is not measured then describes another chip, and
    `report_text` says so.
    """
    words = set(gpu_name.lower().replace("-", " ").split())

    def distance(machine: Machine) -> tuple[float, int]:
        title = set(machine.title.lower().replace("-", " ").split())
        return abs(machine["chip.compute_capability"] - compute_capability), -len(words & title)

    return min((load_machine(name) for name in machine_names()), key=distance)


def identity_facts(identity: Identity, date: str) -> dict[str, Fact]:
    """Facts the driver states about the device."""
    source = f"tilecast calibrate ({identity.name}, driver {identity.driver}, {date}): device attributes"
    values = {
        "chip.sm_count": identity.sm_count,
        "chip.clock_max_mhz": identity.clock_mhz,
        "chip.compute_capability": identity.compute_capability,
        "smem.per_cta_bytes": identity.smem_per_cta,
        "l2.bytes": identity.l2_bytes,
    }
    return {key: Fact(float(value), KEYS[key].unit, "measured", source) for key, value in values.items()}


def all_facts(rows: Iterable[Row], identity: Identity) -> tuple[dict[str, Fact], dict[str, str]]:
    """(facts that a machine file accepts, key -> why a derived one is refused)."""
    rows = tuple(rows)
    date = max((row.date for row in rows), default="")
    facts, refused = {}, {}
    for key, fact in {**identity_facts(identity, date), **derive(rows)}.items():
        try:
            check_fact("calibrate", key, _entry(fact))
        except MachineError as error:
            refused[key] = str(error)
        else:
            facts[key] = fact
    return facts, refused


def machine_text(rows: Iterable[Row], identity: Identity, name: str) -> str:
    """The machine file as TOML: what was measured, everything else inherited."""
    facts, _ = all_facts(rows, identity)
    base = base_machine(identity.name, identity.compute_capability)
    lines = [
        f"# {identity.name}, measured by `tilecast calibrate` (driver {identity.driver}).",
        f"# What is not listed is {base.name}'s, as cited there.",
        f'inherits = "{base.name}"',
        f"name = {json.dumps(name)}",
        f"title = {json.dumps(identity.name)}",
    ]
    for section in dict.fromkeys(key.split(".")[0] for key in KEYS if key in facts):
        lines += ["", f"[{section}]"]
        for key in KEYS:
            if key in facts and key.startswith(f"{section}."):
                entry = ", ".join(f"{word} = {json.dumps(value)}" for word, value in _entry(facts[key]).items())
                lines.append(f"{key.split('.', 1)[1]} = {{ {entry} }}")
    return "\n".join(lines) + "\n"


def _entry(fact: Fact) -> dict[str, float | str]:
    """A fact as the entry of a machine file: four digits, ends only where they differ from the value."""
    value = _round(fact.value)
    entry: dict[str, float | str] = {"value": value, "unit": fact.unit, "kind": fact.kind, "source": fact.source}
    low = _round(fact.value if fact.low is None else fact.low)
    high = _round(fact.value if fact.high is None else fact.high)
    if (low, high) != (value, value):
        entry |= {"low": low, "high": high}
    if fact.note:
        entry["note"] = fact.note
    return entry


def _round(value: float) -> float:
    # Counts and sizes stay exact.
    return value if value == int(value) else float(f"{value:.4g}")


def report_text(rows: Iterable[Row], identity: Identity, output: str) -> str:
    """The table fact by fact, then what kept its cited value."""
    facts, refused = all_facts(rows, identity)
    base = base_machine(identity.name, identity.compute_capability)
    lines = [f"{identity.name} against {base.name} as shipped", ""]
    if base["chip.compute_capability"] != identity.compute_capability:
        lines[0] += f" (no shipped machine has compute capability {identity.compute_capability})"
    lines.append(f"{'fact':<38} {'cited':>10} {'measured':>10} {'diff':>7}  range")
    for key in KEYS:
        if key in facts:
            lines.append(_line(key, facts[key], base))
    for key, why in refused.items():
        lines.append(f"refused: {key}: {why}")
    missing = holes(base, facts)
    lines += ["", f"{len(missing)} holes, kept as cited:"]
    for key in missing:
        fact = base.fact(key)
        lines.append(f"  {key} = {fact.value:g} {fact.unit} ({fact.kind}: {fact.source})")
    return "\n".join(lines)


def _line(key: str, fact: Fact, base: Mapping[str, float] | Machine) -> str:
    cited = base[key] if key in set(base) else None
    left = "-" if cited is None else f"{cited:.4g}"
    difference = "" if not cited else f"{100 * (fact.value / cited - 1):+.1f}%"
    low, high = fact.low if fact.low is not None else fact.value, fact.high if fact.high is not None else fact.value
    span = "" if low == high else f"{low:.4g} to {high:.4g} "
    return f"{key:<38} {left:>10} {fact.value:>10.4g} {difference:>7}  {span}{fact.unit}"
