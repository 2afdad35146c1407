"""A review of the forward pass: what it compares with, and which measurements it is held against."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from tilecast.base.data import MEASURED
from tilecast.explore.review.content.content import Launch, Point, Region
from tilecast.explore.review.content.nearby import region
from tilecast.explore.review.content.reviewed import Comparison, Reviewed, comparison
from tilecast.explore.review.content.roofline import loop_work
from tilecast.model.chip.evaluate import PredictError
from tilecast.model.families import (
    FAMILIES,
    family_of,
    knob_space,
    legality,
    native_family,
    parse_variant,
    published_variant,
)
from tilecast.model.forecast.answer import Explained
from tilecast.model.forecast.level import Compiler
from tilecast.model.forecast.predict import Prediction, predict
from tilecast.model.kernel.variant import Variant
from tilecast.model.kernel.verdict import VariantError
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.passes import FORWARD
from tilecast.model.pipeline import unfused
from tilecast.model.pipeline.graph import Pipeline
from tilecast.model.whatif.rows import Sensitivities
from tilecast.model.whatif.sensitivity import sensitivities
from tilecast.model.whatif.what_if import what_if
from tilecast.validation.lab.measure.records import Measured, read
from tilecast.validation.measured.recorded import generated_runs
from tilecast.validation.published.points import PublishedPoint, best_per_shape, load_points
from tilecast.validation.published.run import EXAMPLES, default_predictor


def _predict(
    workload: Workload, machine: Machine, variant: Variant | None, family: str | None, clock: str | float,
    interval: bool, level: Compiler | None,
) -> Prediction:  # fmt: skip
    return predict(workload, machine, variant, family=family, clock=clock, interval=interval, compiler=level)


def _what_if(
    workload: Workload, machine: Machine, changes: dict[str, float] | None, scales: dict[str, float] | None,
    variant: Variant | None, family: str | None, clock: str | float, level: Compiler | None,
) -> Comparison:  # fmt: skip
    return comparison(
        what_if(workload, machine, changes, scales, variant=variant, family=family, clock=clock, compiler=level)
    )


def _sensitivities(
    workload: Workload, machine: Machine, variant: Variant, clock: str | float, step: float, level: Compiler | None
) -> Sensitivities:
    return sensitivities(workload, machine, variant, clock=clock, step=step, compiler=level)


def _space(variant: Variant, workload: Workload, machine: Machine) -> tuple[Variant, ...]:
    return knob_space(variant.family, workload, machine)


def _refusal(variant: Variant, workload: Workload, machine: Machine) -> str:
    return legality(variant, workload, machine).sentence()


def _unwritten(variant: Variant, workload: Workload, machine: Machine) -> str:
    return family_of(variant).writable(variant, workload, machine).sentence()


def _shipped(variant: Variant, workload: Workload, machine: Machine) -> Variant:
    return published_variant(variant.family, workload, machine)


def _others(
    variant: Variant, workload: Workload, machine: Machine, clock: str | float
) -> Iterator[tuple[str, Variant]]:
    for family in FAMILIES:
        if family != variant.family:
            try:
                yield family, published_variant(family, workload, machine)
            except VariantError:
                continue


def _native(workload: Workload, machine: Machine) -> str:
    return native_family(machine).name


def _work(p: Prediction) -> list[tuple[Pipeline, float]]:
    if family_of(p.variant).fused:
        return loop_work(p)
    parts = unfused.kernels(p.workload, p.variant, p.machine)  # type: ignore[arg-type]
    return [(part.pipeline, part.iterations) for part in parts]


def _launches(p: Prediction) -> tuple[Launch, ...]:
    return ()


# --- measurements -----------------------------------------------------------------------------------------------------


def regions(p: Explained, table: Path | None = None) -> tuple[Region, ...]:
    """Accuracy near ``p``'s question: against published rows, and against measured kernels of ours.

    ``table`` is a file of `tilecast measure`; default: the H200's, where the installation has it.  RecordError for a
    table that is something else.
    """
    return _published(p), _measured(p, table)


def _published(p: Explained) -> Region:
    points, _ = load_points()
    fast = best_per_shape([q for q in points if q.kernel not in EXAMPLES and q.dtype_as_written != "mxfp8"])
    note = (
        "Best published kernel of every shape against the forecast at short-run clock (tables are runs of tens of "
        "milliseconds); no constant was fitted on these rows."
    )
    missing = (
        f"No published attention row was taken on a GPU with {p.machine.name}'s kind of tensor core: "
        "nothing here says how far off the forecast is."
    )
    return region(p, "published", fast, lambda q: q.workload, lambda q: q.machine, _published_point, note, missing)


def _published_point(point: PublishedPoint) -> Point | None:
    try:
        answer = default_predictor(point, "short")
    except ValueError:
        return None
    predicted = point.flop / (answer.time_ms * 1e9)
    return Point(point.machine, point.kernel, point.workload.label(), point.tflops, predicted, point.source)


def _measured(p: Explained, table: Path | None) -> Region:
    path = table or MEASURED / "h200_points.csv"
    missing = (
        f"No kernel of ours was measured on a GPU with {p.machine.name}'s kind of tensor core: "
        "tilecast bundle on such a GPU would change that."
    )
    best: list[Measured] = []
    if table is None and not path.is_file():
        missing = "This installation has no table of measurements."
    else:
        best = _best_of_shape(generated_runs(read(path)))
    note = f"Fastest generated kernel of every shape in {path.name}, forecast with the variant that ran, at the clock it ran at."
    return region(p, "own kernels", best, lambda m: m.workload(), lambda m: m.machine, _measured_point, note, missing)


def _best_of_shape(rows: Iterable[Measured]) -> list[Measured]:
    best: dict[tuple[str, Workload], Measured] = {}
    for row in rows:
        key = (row.machine, row.workload())
        if key not in best or row.cycles < best[key].cycles:
            best[key] = row
    return list(best.values())


def _measured_point(row: Measured) -> Point | None:
    work = row.workload()
    try:
        answer = predict(
            work, row.machine, parse_variant(row.variant), clock=row.effective_mhz, interval=False, compiler=None
        )
    except (PredictError, VariantError, ValueError):
        return None
    measured = work.flops / (row.cycles / (row.effective_mhz * 1e6)) / 1e12
    return Point(
        row.machine, row.kernel, work.label(), measured, answer.tflops,
        f"{row.date}, driver {row.driver}, {row.effective_mhz:.0f} MHz",
    )  # fmt: skip


REVIEWED = Reviewed(
    FORWARD, _predict, _what_if, _sensitivities, _space, _refusal, _unwritten, _shipped, _others, _native, _work, _launches, regions, read,
    "every knob of the chosen kernel changed alone, the authors' kernel and the other families",
    "TFLOP/s count 2 Sq Sk (Dqk + Dv) a head, half of it under a square causal mask, as the FlashAttention papers do.",
)  # fmt: skip
