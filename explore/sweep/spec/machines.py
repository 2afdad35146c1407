"""The machines of a specification: names, files, and what-if changes whose lists cross."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from tilecast.base.words import nearest
from tilecast.explore.sweep.errors import SpecError
from tilecast.model.machine.changes import moved_together
from tilecast.model.machine.machine import Machine, MachineError, load_machine

_FIELDS = ("name", "label", "power", "set", "scale")


def read_machines(where: str, raw: dict[str, Any], folder: Path) -> tuple[Machine, ...]:
    """Machines of ``machines = [...]`` and ``[[machine]]`` tables, in order; SpecError names field, expected, got.

    ``set`` and ``scale`` map facts to a value or factor, ``power`` is the board's power limit in watts; each may be a list:
    lists cross.  A changed machine is called after its changes unless ``label`` names it.
    """
    names = raw.get("machines", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise SpecError(f"{where}: machines takes a list of names and machine files, got {names!r}")
    tables = raw.get("machine", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise SpecError(f"{where}: machine takes tables, each under [[machine]], got {tables!r}")
    found = [_load(f"{where}: machines", name, folder) for name in names]
    for number, table in enumerate(tables, start=1):
        found += _changed(f"{where}: machine {number}", table, folder)
    if not found:
        raise SpecError(f'{where}: expected machines = ["b200", ...] or at least one [[machine]]')
    by_name: dict[str, Machine] = {}
    for machine in found:
        if by_name.setdefault(machine.name, machine) != machine:
            raise SpecError(f"{where}: two different machines are called '{machine.name}': give one a label")
    return tuple(by_name.values())


def _load(where: str, name: str, folder: Path) -> Machine:
    is_file = name.endswith(".toml") or "/" in name
    try:
        return load_machine(folder / name if is_file else name)
    except MachineError as error:
        raise SpecError(f"{where}: {error}") from None


def _changed(where: str, table: dict[str, Any], folder: Path) -> Iterator[Machine]:
    for field in table:
        if field not in _FIELDS:
            raise SpecError(f"{where}: unknown field '{field}'{nearest(field, _FIELDS)}")
    for field in ("name", "label"):
        if not isinstance(table.get(field, "x"), str) or not table.get(field, "x"):
            raise SpecError(f"{where}: {field} takes text, got {table[field]!r}")
    if "name" not in table:
        raise SpecError(f"{where}: name is missing: a shipped machine or a machine file")
    base = _load(where, table["name"], folder)
    setting = list(_axes(f"{where}: set", table.get("set", {})))
    scaling = list(_axes(f"{where}: scale", table.get("scale", {})))
    limits: list[float | None] = [None]
    if "power" in table:
        limits = [watts for _, values in _axes(where, {"power": table["power"]}) for watts in values]
    twice = {key for key, _ in setting} & {key for key, _ in scaling}
    if twice:
        raise SpecError(f"{where}: '{min(twice)}' is both set and scaled: keep one")
    combinations = list(product(limits, product(*(values for _, values in (*setting, *scaling)))))
    for watts, values in combinations:
        set_to = {key: value for (key, _), value in zip(setting, values, strict=False)}
        factors = {key: value for (key, _), value in zip(scaling, values[len(setting) :], strict=True)}
        parts = [] if watts is None else [f"power={watts:g}"]
        parts += [f"{key}={value:g}" for key, value in set_to.items()]
        parts += [f"{key}*{value:g}" for key, value in factors.items()]
        label = table.get("label", base.name)
        if parts and ("label" not in table or len(combinations) > 1):
            label = " ".join((label, *parts))
        try:
            board = base if watts is None else base.at_power(watts)
            # A missing fact is refused here, by name, before it could be scaled.
            changes = {**set_to, **{key: board[key] * factor for key, factor in factors.items()}}
            yield replace(board.with_facts(moved_together(board, changes)) if changes else board, name=label)
        except MachineError as error:
            raise SpecError(f"{where}: {error}") from None


def _axes(where: str, table: object, prefix: str = "") -> Iterator[tuple[str, list[float]]]:
    """(fact, values) of a table; an unquoted dotted key is a table within the table."""
    if not isinstance(table, dict):
        raise SpecError(f'{where} takes a table such as {{"mufu.ex2_per_clk" = 32}}, got {table!r}')
    for key, value in table.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _axes(where, value, f"{name}.")
            continue
        listed = value if isinstance(value, list) else [value]
        for number in listed:
            if isinstance(number, bool) or not isinstance(number, (int, float)) or number != number:
                raise SpecError(f"{where}: '{name}' takes a number or a list of numbers, got {number!r}")
        if not listed:
            raise SpecError(f"{where}: '{name}' takes at least one number, got an empty list")
        yield name, [float(number) for number in listed]
