"""Settled clocks: what the power limit leaves of the SM clock after seconds of work, predicted against measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tilecast.model.machine import Machine, load_machine
from tilecast.model.predict import PredictError, predict
from tilecast.model.variant import VariantError, parse_variant
from tilecast.validation.measure.records import Measured


@dataclass(frozen=True, slots=True)
class SettledRow:
    """A sustained run of a generated kernel and the SM clock forecast for it, in MHz (cycles over time)."""

    point: Measured
    mhz: float

    @property
    def error(self) -> float:
        """Signed relative error of the clock."""
        return self.mhz / self.point.effective_mhz - 1.0


def settled_mhz(point: Measured, machine: Machine) -> float | None:
    """The settled SM clock forecast for a measured kernel in MHz; None for a peer and where there is no forecast."""
    if not point.source_sha:
        return None
    try:
        variant = parse_variant(point.variant)
        return predict(point.workload(), machine, variant, clock="sustained", interval=False).clock_mhz
    except (PredictError, VariantError):
        return None


def settled_rows(points: Iterable[Measured], machine: str | None = None) -> tuple[SettledRow, ...]:
    """Forecasts of the sustained runs among ``points``, in their order."""
    rows = []
    for point in points:
        if point.mode == "sustained":
            mhz = settled_mhz(point, load_machine(machine or point.machine))
            if mhz is not None:
                rows.append(SettledRow(point, mhz))
    return tuple(rows)
