"""Machines: GPUs as data files, every fact with value, unit, kind, source and, where sources conflict, a range."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tilecast.base.toml_file import read_toml
from tilecast.base.words import nearest
from tilecast.model.machine.schema import (
    FAMILIES,
    KEYS,
    TENSOR_KINDS,
    TEXT_KEYS,
    MachineError,
    check_complete,
    check_fact,
    machine_json_schema,
)

__all__ = ["Fact", "Machine", "MachineError", "load_machine", "machine_json_schema", "machine_names"]

_FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Fact:
    """One number about a machine; ``kind`` is spec, measured, inferred, assumed, given (of this very board) or what-if."""

    value: float
    unit: str
    kind: str
    source: str
    low: float | None = None
    high: float | None = None
    note: str = ""
    #: Machine the fact was inherited from; "" when its own file says it.
    inherited_from: str = ""


@dataclass(frozen=True)
class Machine:
    """A GPU; ``machine["mufu.ex2_per_clk"]`` is the value of a fact, `fact` the whole fact."""

    name: str
    title: str
    arch: str
    family: str
    tensor_kind: str
    facts: Mapping[str, Fact] = field(repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "facts", MappingProxyType(dict(self.facts)))
        values = {key: fact.value for key, fact in self.facts.items()}
        object.__setattr__(self, "_values", values)
        object.__setattr__(self, "_hash", hash((self.name, tuple(values.items()))))

    def __reduce__(self) -> tuple[type[Machine], tuple[object, ...]]:
        # A read-only view cannot be pickled; compilers of the tuner run in processes of their own.
        return Machine, (self.name, self.title, self.arch, self.family, self.tensor_kind, dict(self.facts))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined,no-any-return]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Machine):
            return NotImplemented
        return self is other or (self.name == other.name and self.facts == other.facts)

    def __getitem__(self, key: str) -> float:
        try:
            return self._values[key]  # type: ignore[attr-defined,no-any-return]
        except KeyError:
            raise MachineError(f"machine {self.name} has no fact '{key}'{nearest(key, tuple(self.facts))}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.facts)

    def get(self, key: str, default: float) -> float:
        """Value of ``key`` or ``default``."""
        return self._values.get(key, default)  # type: ignore[attr-defined,no-any-return]

    def has(self, key: str) -> bool:
        """Whether the machine has the fact ``key``."""
        return key in self.facts

    def fact(self, key: str) -> Fact:
        """The whole fact; MachineError names near keys when there is none."""
        self[key]
        return self.facts[key]

    def with_facts(self, changes: Mapping[str, float]) -> Machine:
        """The machine with some values changed (what-if); raises MachineError for unknown keys and bad values."""
        facts = dict(self.facts)
        for key, value in changes.items():
            entry = {
                "value": value,
                "unit": KEYS[key].unit if key in KEYS else "",
                "kind": "what-if",
                "source": "what-if",
            }
            check_fact(self.name, key, entry)
            facts[key] = Fact(float(value), KEYS[key].unit, "what-if", f"changed from {self.get(key, 0.0):g}")
        return replace(self, facts=facts)

    def at_power(self, watts: float) -> Machine:
        """The machine as a board whose power limit is ``watts``; MachineError for a limit that no such board can have.

        What the limiter lets through in short runs moves with the limit: it regulates power against the limit, and the
        boards on which both are known overshoot by about the same share of it.
        """
        limit, short, idle = self.facts["chip.tdp_w"], self.facts["power.short_run_w"], self["power.idle_w"]
        # Also refuses NaN, which compares with nothing.
        if not idle < watts <= KEYS["chip.tdp_w"].high:
            raise MachineError(
                f"power: expected more than the {idle:g} W that {self.name} draws when idle and at most "
                f"{KEYS['chip.tdp_w'].high:g} W, got {watts:g}"
            )
        share = watts / limit.value
        scaled = replace(
            short, value=short.value * share, kind="inferred" if share != 1.0 else short.kind,
            low=None if short.low is None else short.low * share, high=None if short.high is None else short.high * share,
            source=short.source if share == 1.0 else f"{short.value:g} W x {watts:g}/{limit.value:g}, as the limit given; {short.source}",
        )  # fmt: skip
        given = Fact(
            float(watts),
            limit.unit,
            "given",
            f"power limit given for this board, {limit.value:g} W in the machine file",
        )
        return replace(
            self, title=f"{self.title}, {watts:g} W",
            facts={**self.facts, "chip.tdp_w": given, "power.short_run_w": scaled},
        )  # fmt: skip

    @property
    def rated_mhz(self) -> float:
        """The rated or usual SM clock, the top one where none is known."""
        return self.get("chip.clock_rated_mhz", self["chip.clock_max_mhz"])

    def bytes_per_clk(self, tbps: float, mhz: float) -> float:
        """An SM's share of ``tbps`` TB/s that all SMs have together, in bytes a clock of ``mhz``."""
        return tbps * 1e6 / mhz / self["chip.sm_count"]

    @property
    def given_power_w(self) -> float | None:
        """The power limit that `at_power` set; None where it is the machine file's."""
        limit = self.facts.get("chip.tdp_w")
        return limit.value if limit is not None and limit.kind == "given" else None


def machine_names() -> tuple[str, ...]:
    """Names of the machines that ship with tilecast."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))


def load_machine(name_or_path: str | Path) -> Machine:
    """A shipped machine by name (or "h200" for h200-sxm), or any machine file by path (something with a slash or ending in .toml)."""
    text = str(name_or_path)
    if text.endswith(".toml") or "/" in text:
        return _load_file(Path(text))
    return _load_shipped(text)


def machine_of(machine: Machine | str | Path) -> Machine:
    """A machine that is given as such, by name or by path; MachineError for anything else."""
    if isinstance(machine, (str, Path)):
        return load_machine(machine)
    if not isinstance(machine, Machine):
        raise MachineError(f"machine: expected a name, a file or a tilecast.Machine, got {type(machine).__name__}")
    return machine


@lru_cache(maxsize=64)
def _load_shipped(name: str) -> Machine:
    known = machine_names()
    wanted = name.lower()
    # "h200" and "5090" are names people use: one part of a name is enough where only one machine has it.
    short = [full for full in known if wanted in full.split("-")]
    if wanted not in known and len(short) == 1:
        wanted = short[0]
    if wanted not in known:
        raise MachineError(f"unknown machine '{name}'{nearest(name, known)}")
    return _load_file(_FOLDER / f"{wanted}.toml")


def _load_file(path: Path) -> Machine:
    where = path.name
    raw = read_toml(path, "the machine file", MachineError, where)
    facts = _facts(where, raw)
    texts = {key: raw[key] for key in TEXT_KEYS if key in raw}
    for key, value in texts.items():
        if not isinstance(value, str) or not value:
            raise MachineError(f"{where}: field '{key}' takes text, got {value!r}")
    if "inherits" in texts:
        parent = _load_shipped(texts["inherits"])
        inherited = {k: replace(f, inherited_from=f.inherited_from or parent.name) for k, f in parent.facts.items()}
        facts = {**inherited, **facts}
        for key in ("title", "arch", "family", "tensor_kind"):
            texts.setdefault(key, getattr(parent, key))
    for key in ("name", "title", "arch", "family", "tensor_kind"):
        if key not in texts:
            raise MachineError(f"{where}: lacks '{key}': add it at the top, or inherit a machine that has it")
    if texts["tensor_kind"] not in TENSOR_KINDS:
        raise MachineError(
            f"{where}: field 'tensor_kind' takes {', '.join(TENSOR_KINDS)}, got '{texts['tensor_kind']}'"
        )
    if texts["family"] not in FAMILIES:
        raise MachineError(f"{where}: field 'family' takes {', '.join(FAMILIES)}, got '{texts['family']}'")
    check_complete(where, texts["tensor_kind"], set(facts))
    return Machine(texts["name"], texts["title"], texts["arch"], texts["family"], texts["tensor_kind"], facts)


def _facts(where: str, raw: dict[str, Any]) -> dict[str, Fact]:
    facts = {}
    for section, entries in raw.items():
        if section in TEXT_KEYS:
            continue
        if not isinstance(entries, dict):
            known = (*TEXT_KEYS, *sorted({key.split(".")[0] for key in KEYS}))
            raise MachineError(f"{where}: unknown field '{section}'{nearest(section, known)}")
        for name, entry in entries.items():
            key = f"{section}.{name}"
            check_fact(where, key, entry)
            facts[key] = Fact(
                float(entry["value"]), entry["unit"], entry["kind"], entry["source"],
                None if "low" not in entry else float(entry["low"]),
                None if "high" not in entry else float(entry["high"]), entry.get("note", ""),
            )  # fmt: skip
    return facts
