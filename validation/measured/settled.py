"""Settled clocks: what the power limit leaves of the SM clock after seconds of work, predicted against measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tilecast.model.chip.evaluate import PredictError
from tilecast.model.compiled.code import CodeError, CodeKey, KernelCode
from tilecast.model.compiled.energy import settled_clock
from tilecast.model.families import parse_variant
from tilecast.model.forecast.answer import BEFORE, COMPILED
from tilecast.model.forecast.predict import predict
from tilecast.model.kernel.verdict import VariantError
from tilecast.model.machine.machine import Machine, load_machine
from tilecast.validation.lab.measure.records import Measured

#: The power balance of what a kernel executes in the cycles that it was measured to take: the energies without the cycles.
BALANCE = "power balance at measured cycles"
#: What a clock was forecast from, the most known first.
LEVELS = (BALANCE, COMPILED, BEFORE)


@dataclass(frozen=True, slots=True)
class SettledRow:
    """A sustained run of a generated kernel and the SM clocks forecast for it, in MHz (cycles over time), by level."""

    point: Measured
    mhz: Mapping[str, float]

    @property
    def forecast(self) -> str:
        """The best level that knows nothing measured of the kernel."""
        return best_forecast(self.mhz)

    def error(self, level: str) -> float:
        """Signed relative error of the clock."""
        return self.mhz[level] / self.point.effective_mhz - 1.0


def best_forecast(mhz: Mapping[str, float]) -> str:
    """From machine code where there is one, else before compilation."""
    return COMPILED if COMPILED in mhz else BEFORE


def settled_mhz(point: Measured, machine: Machine, code: KernelCode | None) -> dict[str, float]:
    """Settled SM clocks in MHz by level; those that ``code``, the kernel's profile, is needed for only with it.

    Empty for a peer and where there is no forecast.
    """
    if not point.source_sha:
        return {}
    found: dict[str, float] = {}
    work = point.workload()
    try:
        variant = parse_variant(point.variant)
        found[BEFORE] = predict(work, machine, variant, clock="sustained", interval=False, compiler=None).clock_mhz
    except (PredictError, VariantError):
        pass
    if code is not None:
        try:
            found[COMPILED] = settled_clock(code, work, machine).mhz
            found[BALANCE] = settled_clock(code, work, machine, cycles=point.cycles).mhz
        except CodeError:
            pass
    return found


def settled_rows(
    points: Iterable[Measured], codes: Mapping[CodeKey, KernelCode],
    machine: str | None = None,
) -> tuple[SettledRow, ...]:  # fmt: skip
    """Forecasts of the sustained runs among ``points``, in their order, with the profiles of their kernels."""
    rows = []
    for point in points:
        if point.mode == "sustained":
            mhz = settled_mhz(point, load_machine(machine or point.machine), codes.get(point.code_key()))
            if mhz:
                rows.append(SettledRow(point, mhz))
    return tuple(rows)
