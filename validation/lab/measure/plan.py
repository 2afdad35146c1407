"""What to measure: a TOML file of shapes and kernels, turned into a list of items.  No torch, no GPU.

    title = "..."
    [[group]]
    role = "build"                      # or "held-out": kept out of sight while the model is changed
    runs = ["short"]                    # what `tilecast bundle` measures it in: short (default), sustained, quick
    kernels = ["cudnn", "flash-attn-4"] # peers
    variants = ["hopper_ws:warpgroups=2,tile_n=64,...", "triton:tile_m=128,..."]
    shapes = [ {seqlen = 4096, head_dim = 128, causal = true, batch = 4, heads = 16}, ... ]

Variants that the family cannot write for a shape are left out and listed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tilecast.base.toml_file import read_toml
from tilecast.model.families import parse_variant
from tilecast.model.kernel.shapes_csv import parse_window
from tilecast.model.kernel.variant import variant_text
from tilecast.model.kernel.verdict import VariantError
from tilecast.model.kernel.workload import Workload, WorkloadError
from tilecast.model.machine.machine import Machine

#: Kernels that are not ours.
EXTERNAL = ("cudnn", "flash-attn-2", "flash-attn-4", "flex")
ROLES = ("build", "held-out")
RUNS = ("short", "sustained", "quick")
_GROUP = {"role", "runs", "kernels", "variants", "shapes"}
_SHAPE = {"seqlen", "seqlen_k", "head_dim", "head_dim_v", "batch", "heads", "heads_kv", "causal", "window", "dtype"}


class PlanError(ValueError):
    """A plan that makes no sense, or an item of it that cannot be measured: one sentence."""


@dataclass(frozen=True, slots=True)
class Item:
    """One kernel at one shape."""

    kernel: str
    variant: str
    workload: Workload
    machine: str
    role: str = "build"

    def label(self) -> str:
        """Kernel, variant and shape in one line."""
        return f"{self.kernel} {self.variant} at {self.workload.label()}".replace("  ", " ")


def item_to(item: Item) -> dict[str, Any]:
    """An item as JSON takes it."""
    return {**asdict(item), "workload": item.workload.as_dict()}


def item_from(raw: Mapping[str, Any]) -> Item:
    """Inverse of `item_to`; entries that an item has not are left alone."""
    work = Workload.from_dict(raw["workload"])
    return Item(raw["kernel"], raw["variant"], work, raw["machine"], raw.get("role", "build"))


@dataclass(frozen=True, slots=True)
class Options:
    """How to measure."""

    rounds: int = 15
    mode: str = "short"
    settle_s: float = 1.0
    measure_s: float = 1.0
    #: Processes that compile and check kernels ahead of their turn (0: one a core, at most 12; 1: none).
    workers: int = 0
    command: str = ""
    version: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """Items in measuring order (a shape's items follow each other), and what was left out, with the reason."""

    items: tuple[Item, ...]
    left_out: tuple[str, ...]


def load_plan(path: Path, machine: Machine, run: str | None = None) -> Plan:
    """Read a plan, or only its groups of a ``run``; PlanError names file, group, field, expected and got."""
    raw = read_toml(path, "the plan", PlanError)
    groups = raw.get("group")
    if not isinstance(groups, list) or not groups:
        raise PlanError(f"{path}: expected at least one [[group]] with shapes and kernels or variants")
    items: list[Item] = []
    left_out: list[str] = []
    for number, group in enumerate(groups, start=1):
        where = f"{path}: group {number}"
        if run is not None and run not in _runs(where, group):
            continue
        for workload in _shapes(where, group):
            for entry in _items(where, group, workload, machine):
                if isinstance(entry, str):
                    left_out.append(entry)
                elif entry not in items:
                    items.append(entry)
    # One shape after the other, so that its kernels can be measured in turns.
    order = {workload: i for i, workload in enumerate(dict.fromkeys(item.workload for item in items))}
    return Plan(tuple(sorted(items, key=lambda item: order[item.workload])), tuple(dict.fromkeys(left_out)))


def _runs(where: str, group: dict[str, Any]) -> list[str]:
    runs = group.get("runs", ["short"])
    if not isinstance(runs, list) or not runs or not all(name in RUNS for name in runs):
        raise PlanError(f"{where}: runs takes a list of {', '.join(RUNS)}, got {runs!r}")
    return runs


def _shapes(where: str, group: dict[str, Any]) -> Iterator[Workload]:
    if not isinstance(group, dict):
        raise PlanError(f"{where}: expected a table with shapes and kernels or variants, got {group!r}")
    unknown = sorted(set(group) - _GROUP)
    if unknown:
        raise PlanError(f"{where}: unknown field '{unknown[0]}'; known: {', '.join(sorted(_GROUP))}")
    if group.get("role", "build") not in ROLES:
        raise PlanError(f"{where}: role takes {' or '.join(ROLES)}, got '{group['role']}'")
    for name in ("kernels", "variants"):
        listed = group.get(name, [])
        if not isinstance(listed, list) or not all(isinstance(entry, str) for entry in listed):
            raise PlanError(f"{where}: {name} takes a list of names, got {listed!r}")
    shapes = group.get("shapes")
    if not isinstance(shapes, list) or not shapes:
        raise PlanError(f"{where}: expected shapes, a list of tables with seqlen and head_dim")
    for shape in shapes:
        if not isinstance(shape, dict):
            raise PlanError(f"{where}: a shape is a table with seqlen and head_dim, got {shape!r}")
        unknown = sorted(set(shape) - _SHAPE)
        if unknown:
            raise PlanError(f"{where}: unknown shape field '{unknown[0]}'; known: {', '.join(sorted(_SHAPE))}")
        try:
            yield _workload(shape)
        except KeyError as error:
            raise PlanError(f"{where}: shape {shape}: {error.args[0]} is missing") from None
        except WorkloadError as error:
            raise PlanError(f"{where}: shape {shape}: {error}") from None


def _workload(shape: dict[str, Any]) -> Workload:
    length, dim = shape["seqlen"], shape["head_dim"]
    heads = shape.get("heads", 16)
    window = parse_window(str(shape["window"]), False) if "window" in shape else None
    mask = "window" if window else "causal" if shape.get("causal") else "none"
    return Workload(
        shape.get("batch", 1), heads, shape.get("heads_kv", heads), length, shape.get("seqlen_k", length), dim,
        shape.get("head_dim_v", dim), mask, window, shape.get("dtype", "bf16"),
    )  # fmt: skip


def _items(where: str, group: dict[str, Any], workload: Workload, machine: Machine) -> Iterator[Item | str]:
    from tilecast.model.families import find_family, writable

    role = group.get("role", "build")
    for name in group.get("kernels", []):
        if name not in EXTERNAL:
            raise PlanError(f"{where}: unknown kernel '{name}'; known: {', '.join(EXTERNAL)}")
        yield Item(name, "", workload, machine.name, role)
    for text in group.get("variants", []):
        name, _, knobs = text.partition(":")
        try:
            family = find_family(name)
            variant = parse_variant(f"family={family.name},{knobs}" if knobs else f"family={family.name}")
        except VariantError as error:
            raise PlanError(f"{where}: variant '{text}': {error}") from None
        verdict = writable(variant, workload, machine)
        if verdict.legal:
            yield Item(name, variant_text(variant), workload, machine.name, role)
        else:
            yield f"{name} {knobs}: {workload.label()}: {verdict.sentence()}"
