"""A bundle against the forecasts: calibrated facts against cited ones, predicted against measured.  No torch, no GPU."""

from __future__ import annotations

import tempfile
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tilecast.model.chip.evaluate import PredictError
from tilecast.model.compiled.code import CodeError, CodeKey, KernelCode, load_codes
from tilecast.model.compiled.forecast import forecast
from tilecast.model.families import parse_variant
from tilecast.model.forecast.answer import BEFORE, COMPILED
from tilecast.model.forecast.predict import predict
from tilecast.model.kernel.verdict import VariantError
from tilecast.model.machine.machine import Machine, MachineError, load_machine
from tilecast.validation.lab.bundle.archive import Bundle
from tilecast.validation.lab.bundle.manifest import BundleError, Manifest
from tilecast.validation.lab.measure.records import Measured, read
from tilecast.validation.measured.settled import best_forecast, settled_mhz
from tilecast.validation.statistics import ErrorSummary, grouped, summarise

CITED, CALIBRATED = "cited facts", "calibrated facts"
#: (how, with which machine) of a forecast
Level = tuple[str, str]
LEVELS: tuple[Level, ...] = ((BEFORE, CITED), (BEFORE, CALIBRATED), (COMPILED, CITED), (COMPILED, CALIBRATED))


@dataclass(frozen=True, slots=True)
class FactRow:
    """A fact that calibration measured; ``cited`` is None when the machine file has none.  ``unit`` as in the file."""

    key: str
    cited: float | None
    measured: float
    unit: str


@dataclass(frozen=True, slots=True)
class PointRow:
    """A short run of a generated kernel and its forecasts in cycles per launch."""

    point: Measured
    cycles: dict[Level, float]
    #: Why a forecast is missing, by level.
    refused: dict[Level, str]

    def error(self, level: Level) -> float:
        """Signed relative error."""
        return self.cycles[level] / self.point.cycles - 1.0


@dataclass(frozen=True, slots=True)
class ClockRow:
    """A sustained run and the settled SM clocks forecast for it in MHz, by machine: from machine code where there is one."""

    point: Measured
    mhz: dict[str, float]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Everything `validate compare` shows."""

    path: str
    manifest: Manifest
    machine: str
    facts: tuple[FactRow, ...]
    points: tuple[PointRow, ...]
    summary: dict[Level, ErrorSummary]
    groups: dict[Level, dict[str, ErrorSummary]]
    clocks: tuple[ClockRow, ...]
    peers: tuple[Measured, ...]


def compare(bundle: Bundle, machine: str | None = None) -> Comparison:
    """Compare a verified bundle with the forecasts of ``machine`` (default: the one that its GPU was recognised as).

    Raises BundleError for members that are not what their names say, MachineError for an unknown machine.
    """
    cited = load_machine(machine or bundle.manifest.machine)
    calibrated, facts = _calibrated(bundle, cited)
    codes = {code.key(): code for code in _codes(bundle)}
    machines = {CITED: cited} | ({CALIBRATED: calibrated} if calibrated is not None else {})
    points = _table(bundle, "points.csv")
    rows = tuple(_point(row, machines, codes) for row in points if row.source_sha)
    summary, groups = {}, {}
    for level in LEVELS:
        have = [row for row in rows if level in row.cycles]
        if have:
            summary[level] = summarise(row.error(level) for row in have)
            groups[level] = grouped(have, _group, _error(level))
    clocks = tuple(_clock(row, machines, codes) for row in _table(bundle, "sustained.csv"))
    peers = tuple(row for row in points if not row.source_sha)
    return Comparison(bundle.path, bundle.manifest, cited.name, facts, rows, summary, groups, clocks, peers)


def _error(level: Level) -> Callable[[PointRow], float]:
    return lambda row: row.error(level)


def _group(row: PointRow) -> str:
    p = row.point
    dims = str(p.head_dim_qk) if p.head_dim_qk == p.head_dim_v else f"{p.head_dim_qk}/{p.head_dim_v}"
    return f"{p.kernel} head_dim {dims} {'full' if p.mask == 'none' else p.mask}"


def _calibrated(bundle: Bundle, cited: Machine) -> tuple[Machine | None, tuple[FactRow, ...]]:
    """The bundle's machine, and what it measured; (None, ()) when calibration left none."""
    text = bundle.text("machine.toml")
    if not text:
        return None, ()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "machine.toml"
        path.write_text(text, encoding="utf-8")
        try:
            machine = load_machine(path)
        except MachineError as error:
            raise BundleError(f"{bundle.path}: {error}") from None
    own = {
        f"{section}.{name}"
        for section, entries in tomllib.loads(text).items()
        if isinstance(entries, dict)
        for name in entries
    }
    facts = tuple(
        FactRow(key, cited[key] if cited.has(key) else None, fact.value, fact.unit)
        for key, fact in machine.facts.items() if key in own
    )  # fmt: skip
    return machine, facts


def _codes(bundle: Bundle) -> list[KernelCode]:
    try:
        return load_codes(bundle.text("codes.txt")) if "codes.txt" in bundle.members else []
    except CodeError as error:
        raise BundleError(f"{bundle.path}: codes.txt: {error}") from None


def _table(bundle: Bundle, name: str) -> list[Measured]:
    """Rows of a table of measurements; none when the bundle has no such table."""
    if name not in bundle.members:
        return []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(bundle.members[name])
        try:
            return read(path)
        except ValueError as error:
            raise BundleError(f"{bundle.path}: {str(error).replace(str(path), name)}") from None


def _point(point: Measured, machines: dict[str, Machine], codes: Mapping[CodeKey, KernelCode]) -> PointRow:
    work, mhz = point.workload(), point.effective_mhz
    code = codes.get(point.code_key())
    cycles: dict[Level, float] = {}
    refused: dict[Level, str] = {}
    for name, machine in machines.items():
        try:
            answer = predict(work, machine, parse_variant(point.variant), clock=mhz, interval=False, compiler=None)
            cycles[BEFORE, name] = answer.time_ms * mhz * 1e3
        except (PredictError, VariantError) as error:
            refused[BEFORE, name] = str(error)
        if code is None:
            continue
        try:
            cycles[COMPILED, name] = forecast(code, work, machine, mhz).cycles
        except (CodeError, MachineError) as error:
            refused[COMPILED, name] = str(error)
    return PointRow(point, cycles, refused)


def _clock(point: Measured, machines: dict[str, Machine], codes: Mapping[CodeKey, KernelCode]) -> ClockRow:
    forecasts = {name: settled_mhz(point, machine, codes.get(point.code_key())) for name, machine in machines.items()}
    return ClockRow(point, {name: mhz[best_forecast(mhz)] for name, mhz in forecasts.items() if mhz})


def best_times(points: Iterable[PointRow]) -> dict[object, PointRow]:
    """Shape -> the generated kernel with the shortest measured time."""
    best: dict[object, PointRow] = {}
    for row in points:
        shape = row.point.workload()
        if shape not in best or row.point.ms < best[shape].point.ms:
            best[shape] = row
    return best
