"""A review of the backward pass: what it compares with, and which measurements it is held against."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tilecast.explore.review.content.content import Launch, Point, Region
from tilecast.explore.review.content.nearby import region
from tilecast.explore.review.content.reviewed import Comparison, Reviewed, comparison
from tilecast.explore.review.content.roofline import loop_work
from tilecast.model.backward import BACKWARD_FAMILIES, BackwardVariant, family_of, native_backward
from tilecast.model.forecast.answer import Explained
from tilecast.model.forecast.level import Compiler
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine, load_machine
from tilecast.model.training.evaluate import backward_flops
from tilecast.model.training.forecast import BackwardPrediction, best_backward, predict_backward
from tilecast.model.training.passes import BACKWARD
from tilecast.model.training.whatif import backward_sensitivities, backward_what_if
from tilecast.model.whatif.rows import Sensitivities
from tilecast.validation.measured.backward import PASSES, MeasuredPass, fastest_passes, forecast_pass
from tilecast.validation.published.backward import FastestBackward, fastest_published, forecast_published


def _predict(
    workload: Workload, machine: Machine, variant: BackwardVariant | None, family: str | None, clock: str | float,
    interval: bool, level: Compiler | None,
) -> BackwardPrediction:  # fmt: skip
    return predict_backward(workload, machine, variant, family=family, clock=clock, interval=interval)


def _what_if(
    workload: Workload, machine: Machine, changes: dict[str, float] | None, scales: dict[str, float] | None,
    variant: BackwardVariant | None, family: str | None, clock: str | float, level: Compiler | None,
) -> Comparison:  # fmt: skip
    return comparison(backward_what_if(workload, machine, changes, scales, variant=variant, family=family, clock=clock))


def _sensitivities(
    workload: Workload, machine: Machine, variant: BackwardVariant, clock: str | float, step: float,
    level: Compiler | None,
) -> Sensitivities:  # fmt: skip
    return backward_sensitivities(workload, machine, variant, clock=clock, step=step)


def _space(variant: BackwardVariant, workload: Workload, machine: Machine) -> tuple[BackwardVariant, ...]:
    return tuple(family_of(variant).space(workload, machine))


def _refusal(variant: BackwardVariant, workload: Workload, machine: Machine) -> str:
    return family_of(variant).legality(variant, workload, machine).sentence()


def _unwritten(variant: BackwardVariant, workload: Workload, machine: Machine) -> str:
    return family_of(variant).writable(variant, workload, machine).sentence()


def _shipped(variant: BackwardVariant, workload: Workload, machine: Machine) -> None:
    """Only tilecast ships kernels of these classes as they are written here."""


def _others(
    variant: BackwardVariant, workload: Workload, machine: Machine, clock: str | float
) -> Iterator[tuple[str, BackwardVariant]]:
    for family in BACKWARD_FAMILIES:
        if family.name != variant.family and any(True for _ in family.space(workload, machine)):
            yield family.name, best_backward(workload, machine, family.name, clock)[0]


def _native(workload: Workload, machine: Machine) -> str:
    return native_backward(workload, machine).name


def _launches(p: BackwardPrediction) -> tuple[Launch, ...]:
    return tuple(
        Launch(one.kernel.name, one.seconds * 1e3, one.seconds / p.run.seconds, one.hbm_bytes) for one in p.run.launches
    )


# --- measurements -----------------------------------------------------------------------------------------------------


def regions(p: Explained, table: Path | None = None) -> tuple[Region, ...]:
    """Accuracy near ``p``'s question: against the fastest published pass of every shape, and against our own.

    ``table`` is a file of tools/compare_backward.py; default: the H200's.  BackwardTableError for another one.
    """
    return _published(p), _measured(p, table)


def _published(p: Explained) -> Region:
    note = (
        "Fastest published backward pass of every shape from 2048 tokens on against the forecast at short-run clock; no "
        "constant was fitted on these rows."
    )
    missing = f"No published backward pass was taken on a GPU with {p.machine.name}'s kind of tensor core: nothing here says how far off the forecast is."
    return region(
        p, "published", fastest_published(), lambda q: q.workload, lambda q: q.machine, _published_point, note, missing
    )


def _published_point(row: FastestBackward) -> Point | None:
    try:
        found = forecast_published(row, "short")
    except ValueError:
        return None
    flop = backward_flops(row.workload)
    return Point(
        row.machine, row.kernel, row.workload.label(), flop / row.measured_ms / 1e9, flop / found.predicted_ms / 1e9,
        row.source,
    )  # fmt: skip


def _measured(p: Explained, table: Path | None) -> Region:
    path = table or PASSES
    missing = f"No backward pass of ours was measured on a GPU with {p.machine.name}'s kind of tensor core: tools/compare_backward.py on such a GPU would change that."
    best: tuple[MeasuredPass, ...] = ()
    if table is None and not path.is_file():
        missing = "This installation has no table of measurements."
    else:
        best = fastest_passes(path)
    note = (
        f"Our fastest pass of every shape in {path.name}, forecast with the variant that ran, at the clock it ran at."
    )
    return region(p, "own kernels", best, lambda m: m.workload, lambda m: m.machine, _measured_point, note, missing)


def _measured_point(row: MeasuredPass) -> Point | None:
    found = forecast_pass(row, load_machine(row.machine))
    if isinstance(found, str):
        return None
    flop = backward_flops(row.workload)
    return Point(
        row.machine, row.kernel, row.workload.label(), flop / found.measured_ms / 1e9, flop / found.predicted_ms / 1e9,
        f"{row.date}, driver {row.driver}, {found.clock_mhz:.0f} MHz",
    )  # fmt: skip


REVIEWED = Reviewed(
    BACKWARD, _predict, _what_if, _sensitivities, _space, _refusal, _unwritten, _shipped, _others, _native, loop_work, _launches, regions,
    fastest_passes,
    "every knob of the chosen kernel changed alone, and the best of every other class that runs the shape",
    "TFLOP/s count 2.5 times the forward pass, five products against two, whatever is computed again; the time is that of all launches.",
)  # fmt: skip
