"""A specification (TOML) becomes a plan: work items in order, each with its key.

    title = "..."
    do = "forecast"                       # default; or "measure": time kernels on the GPUs of this host
    clocks = ["sustained", "short", 1500] # default ["sustained"]
    interval = true                       # false: no intervals, several times as fast
    pass = "fwd"                          # or "bwd": gradients of q, k, v
    level = "fluid"                       # or "auto", "kept": from machine code where (only where) a loop is at hand
    machines = ["b200", "mine.toml"]
    variants = ["best", "fa4:cta_group=2", "all:fa3"]
    [[machine]]
    name = "b200"
    power = [750, 1000]
    set = {"mufu.ex2_per_clk" = [16, 32]}
    [[workload]]
    tokens = 32768
    seqlen = [1024, 8192]
    head_dim = [64, 128]
    [[variant]]
    family = "fa4"
    emulated_share = [0, 0.125, 0.25]

Every list crosses with every other of its table; machines, workloads, variants and clocks cross with each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tilecast.base.toml_file import read_toml
from tilecast.base.words import nearest
from tilecast.explore.sweep.errors import SpecError
from tilecast.explore.sweep.spec.choice import Choice, SweptPass
from tilecast.explore.sweep.spec.items import FORMAT, SWEPT, canonical, content_key, forecast_item
from tilecast.explore.sweep.spec.machines import read_machines
from tilecast.explore.sweep.spec.variants import FORWARD, measured_variants, read_variants
from tilecast.explore.sweep.spec.workloads import read_workloads
from tilecast.model.chip.evaluate import REGIMES
from tilecast.model.families import loop_shape
from tilecast.model.forecast.level import LEVELS
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.validation.lab.measure.plan import EXTERNAL
from tilecast.validation.lab.measure.records import MODES

KINDS = ("forecast", "measure")
_SHARED = ("title", "do", "machines", "machine", "variants", "variant", "workload")
_FIELDS = {
    "forecast": (*_SHARED, "clocks", "interval", "level", "pass"),
    "measure": (*_SHARED, "kernels", "mode", "rounds"),
}
#: More items than this fit no afternoon; a typing error in a list is likelier.
MOST_ITEMS = 1_000_000


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One piece of work: its canonical JSON, the key of its result, and what it shares simulations with."""

    text: str
    key: str
    group: str


@dataclass(frozen=True)
class Spec:
    """A specification that was read and checked, not yet crossed."""

    where: str
    title: str
    do: str
    machines: tuple[Machine, ...]
    workloads: tuple[Workload, ...]
    choices: tuple[Choice, ...]
    clocks: tuple[str | float, ...] = ("sustained",)
    interval: bool = True
    kernels: tuple[str, ...] = ()
    mode: str = "short"
    rounds: int = 15
    level: str = LEVELS[0]
    swept: SweptPass = FORWARD


@dataclass(frozen=True)
class Plan:
    """Items in order, each key once; ``left_out`` says which choices gave none, and why."""

    spec: Spec
    items: tuple[WorkItem, ...]
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Bench:
    """The GPU that measured items are for, and the software that compiles for it."""

    gpu: str
    torch: str
    triton: str


def load_spec(source: str | Path | Mapping[str, Any]) -> Spec:
    """Read and check a specification file, or its content as a mapping; SpecError in one sentence."""
    if isinstance(source, Mapping):
        return _spec("specification", dict(source), Path())
    path = Path(source)
    return _spec(str(path), read_toml(path, "the specification", SpecError), path.parent)


def at_level(spec: Spec, level: str | None) -> Spec:
    """``spec`` with another level of its forecasts; None: as it is.  SpecError where it has no forecasts."""
    if level is None:
        return spec
    if spec.do != "forecast":
        raise SpecError(f'{spec.where}: level goes with do = "forecast", this one has do = "{spec.do}"')
    _swept("sweep", {"pass": spec.swept.name, "level": level})
    return replace(spec, level=_level("sweep", {"level": level}))


def _spec(where: str, raw: dict[str, Any], folder: Path) -> Spec:
    do = raw.get("do", "forecast")
    if do not in KINDS:
        raise SpecError(f"{where}: do takes {' or '.join(KINDS)}, got {do!r}")
    if do == "measure" and "pass" in raw:
        raise SpecError(
            f"{where}: pass: measuring times forward kernels: tools/sweep_backward.py and tools/compare_backward.py time backward passes"
        )
    for field in raw:
        if field not in _FIELDS[do]:
            raise SpecError(f"{where}: unknown field '{field}' of do = \"{do}\"{nearest(field, _FIELDS[do])}")
    title = raw.get("title", "")
    if not isinstance(title, str):
        raise SpecError(f"{where}: title takes text, got {title!r}")
    workloads = read_workloads(where, raw, folder, MOST_ITEMS)
    swept = _swept(where, raw)
    choices = read_variants(where, raw, swept)
    if do == "measure":
        machines = read_machines(where, raw, folder) if "machines" in raw or "machine" in raw else ()
        if len(machines) > 1 or any(fact.kind in ("given", "what-if") for m in machines for fact in m.facts.values()):
            raise SpecError(f"{where}: machines: measuring runs on the GPU here, at most one machine without changes")
        return Spec(where, title, do, machines, workloads, choices, kernels=_kernels(where, raw), mode=_mode(where, raw),
                    rounds=_rounds(where, raw))  # fmt: skip
    machines = read_machines(where, raw, folder)
    interval = raw.get("interval", True)
    if not isinstance(interval, bool):
        raise SpecError(f"{where}: interval takes true or false, got {interval!r}")
    spec = Spec(
        where,
        title,
        do,
        machines,
        workloads,
        choices,
        _clocks(where, raw),
        interval,
        level=_level(where, raw),
        swept=swept,
    )
    count = len(machines) * len(workloads) * len(choices) * len(spec.clocks)
    if count > MOST_ITEMS:
        raise SpecError(f"{where}: crosses to {count} items, at most {MOST_ITEMS} expected: split the sweep")
    return spec


def _swept(where: str, raw: dict[str, Any]) -> SweptPass:
    name = raw.get("pass", FORWARD.name)
    if name not in SWEPT:
        raise SpecError(f"{where}: pass takes {' or '.join(SWEPT)}, got {name!r}")
    if name != FORWARD.name and raw.get("level", "auto") == "kept":
        raise SpecError(f'{where}: level: backward passes are forecast before compilation: drop level = "kept"')
    return SWEPT[name]


def _level(where: str, raw: dict[str, Any]) -> str:
    level = raw.get("level", LEVELS[0])
    if level not in LEVELS:
        raise SpecError(f"{where}: level takes {', '.join(LEVELS[:-1])} or {LEVELS[-1]}, got {level!r}")
    return str(level)


def _clocks(where: str, raw: dict[str, Any]) -> tuple[str | float, ...]:
    listed = raw.get("clocks", ["sustained"])
    if not isinstance(listed, list) or not listed:
        raise SpecError(f"{where}: clocks takes a list of sustained, short or MHz, got {listed!r}")
    found: dict[str | float, None] = {}
    for clock in listed:
        if isinstance(clock, str) and clock in REGIMES:
            found[clock] = None
        elif isinstance(clock, (int, float)) and not isinstance(clock, bool) and 50 <= clock <= 5000:
            found[float(clock)] = None
        else:
            near = nearest(clock, REGIMES) if isinstance(clock, str) else ""
            raise SpecError(f"{where}: clocks takes sustained, short or 50 to 5000 MHz, got {clock!r}{near}")
    return tuple(found)


def _kernels(where: str, raw: dict[str, Any]) -> tuple[str, ...]:
    listed = raw.get("kernels", [])
    if not isinstance(listed, list):
        raise SpecError(f"{where}: kernels takes a list of {', '.join(EXTERNAL)}, got {listed!r}")
    for name in listed:
        if name not in EXTERNAL:
            raise SpecError(f"{where}: kernels: unknown kernel '{name}'{nearest(str(name), EXTERNAL)}")
    return tuple(dict.fromkeys(listed))


def _mode(where: str, raw: dict[str, Any]) -> str:
    mode = raw.get("mode", "short")
    if mode not in MODES:
        raise SpecError(f"{where}: mode takes {' or '.join(MODES)}, got {mode!r}")
    return str(mode)


def _rounds(where: str, raw: dict[str, Any]) -> int:
    rounds = raw.get("rounds", 15)
    if isinstance(rounds, bool) or not isinstance(rounds, int) or not 3 <= rounds <= 1000:
        raise SpecError(f"{where}: rounds takes a whole number from 3 to 1000, got {rounds!r}")
    return rounds


def plan_forecasts(spec: Spec) -> Plan:
    """Cross machines, workloads, variants and clocks."""
    left_out: dict[str, None] = {}
    items: dict[str, WorkItem] = {}
    for machine in spec.machines:
        for work in spec.workloads:
            for variant in _variants(spec, machine, work, left_out):
                for clock in spec.clocks:
                    item = _work_item(
                        forecast_item(work, machine, variant, clock, spec.interval, spec.level, spec.swept.name), work
                    )
                    items.setdefault(item.key, item)
                    if len(items) > MOST_ITEMS:
                        raise SpecError(f"{spec.where}: crosses to more than {MOST_ITEMS} items: split the sweep")
    if not items:
        raise SpecError(f"{spec.where}: no items: {next(iter(left_out))}")
    return Plan(spec, tuple(items.values()), tuple(left_out))


def _variants(spec: Spec, machine: Machine, work: Workload, left_out: dict[str, None]) -> Iterator[str]:
    for choice in spec.choices:
        found = spec.swept.variants(choice, work, machine)
        if isinstance(found, str):
            left_out[found] = None
        else:
            yield from found


def plan_measurements(spec: Spec, machine_name: str, machine: Machine, bench: Bench) -> Plan:
    """Cross workloads with kernels and variants for the GPU of ``bench``; ``machine_name`` is a name or file."""
    left_out: dict[str, None] = {}
    items: dict[str, WorkItem] = {}
    for work in spec.workloads:
        pairs = [(name, "") for name in spec.kernels]
        for choice in spec.choices:
            family, found = measured_variants(choice, work, machine)
            if isinstance(found, str):
                left_out[found] = None
            else:
                pairs += [(family, variant) for variant in found]
        for kernel, variant in pairs:
            value = {
                "do": "measure", "format": FORMAT, "gpu": bench.gpu, "torch": bench.torch, "triton": bench.triton,
                "machine": machine_name, "kernel": kernel, "variant": variant, "workload": work.as_dict(),
                "mode": spec.mode, "rounds": spec.rounds,
            }  # fmt: skip
            item = _work_item(value, work)
            items.setdefault(item.key, item)
    if not items:
        raise SpecError(f"{spec.where}: no items: {next(iter(left_out), 'no kernels and no variants')}")
    return Plan(spec, tuple(items.values()), tuple(left_out))


def _work_item(value: dict[str, Any], work: Workload) -> WorkItem:
    text = canonical(value)
    kind = value.get("kernel", ""), value["machine"], value["variant"]
    return WorkItem(text, content_key(text, value["do"]), canonical([*kind, loop_shape(work).as_dict()]))
