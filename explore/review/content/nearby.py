"""How well the model does near the question: the closest published and measured points, predicted like any other.

Nearness is a ladder of plain conditions, not a score: the first rung with enough points is taken and named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from math import log2
from pathlib import Path
from typing import TypeVar

from tilecast.base.data import MEASURED
from tilecast.explore.review.content.content import Point, Region
from tilecast.model.chip.evaluate import PredictError
from tilecast.model.families import parse_variant
from tilecast.model.forecast.predict import Prediction, predict
from tilecast.model.kernel.verdict import VariantError
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine, load_machine, machine_names
from tilecast.validation.lab.measure.records import Measured, read
from tilecast.validation.measured.recorded import generated_runs
from tilecast.validation.published.points import PublishedPoint, best_per_shape, load_points
from tilecast.validation.published.run import EXAMPLES, default_predictor
from tilecast.validation.statistics import summarise

T = TypeVar("T")
#: Points a rung must have, and points that are predicted and shown at most.
_ENOUGH, _MOST, _SHOWN = 5, 40, 8
_16_BIT = ("bf16", "fp16")


def regions(p: Prediction, table: Path | None = None) -> tuple[Region, ...]:
    """Accuracy near ``p``'s question: against published rows, and against measured kernels of ours.

    ``table`` is a file of `tilecast measure`; default: the H200's, where the installation has it.  RecordError for a
    table that is something else.
    """
    return _published(p), _measured(p, table)


def _rungs(work: Workload, machine: Machine) -> list[tuple[str, Callable[[Workload, str], bool]]]:
    """(how near, condition on workload and machine name), nearest first; a later rung contains the earlier ones."""

    def same_dims(w: Workload) -> bool:
        return (w.head_dim_qk, w.head_dim_v) == (work.head_dim_qk, work.head_dim_v) and _dtype(w) == _dtype(work)

    def length(w: Workload) -> float:
        return max(abs(log2(w.seqlen_q / work.seqlen_q)), abs(log2(w.seqlen_k / work.seqlen_k)))

    kin = {name for name in machine_names() if load_machine(name).tensor_kind == machine.tensor_kind}
    own = machine.name
    dims = (
        f"head_dim {work.head_dim_qk}"
        if work.head_dim_qk == work.head_dim_v
        else f"head_dim {work.head_dim_qk}/{work.head_dim_v}"
    )
    what = f"{_dtype(work)}, {dims}"
    return [
        (f"on {own}, {what}, same mask, length within a factor of 2", lambda w, m: m == own and same_dims(w) and w.mask == work.mask and length(w) <= 1),
        (f"on {own}, {what}, any mask, length within a factor of 4", lambda w, m: m == own and same_dims(w) and length(w) <= 2),
        (f"on {own}, {what}, any mask and length", lambda w, m: m == own and same_dims(w)),
        (f"on {own}, {_dtype(work)}, any shape", lambda w, m: m == own and _dtype(w) == _dtype(work)),
        (f"on GPUs with the same kind of tensor core ({', '.join(sorted(kin))}), {what}", lambda w, m: m in kin and same_dims(w)),
        (f"on GPUs with the same kind of tensor core ({', '.join(sorted(kin))}), any shape and dtype", lambda w, m: m in kin),
    ]  # fmt: skip


def _dtype(work: Workload) -> str:
    """bf16 and fp16 run alike."""
    return "16 bit" if work.dtype in _16_BIT else work.dtype


def distance(a: Workload, b: Workload) -> float:
    """How far two shapes are apart: doublings of length, of heads and of head dimension, and one for another mask."""
    sizes = ("seqlen_q", "seqlen_k", "head_dim_qk", "head_dim_v")
    doublings = sum(abs(log2(getattr(a, name) / getattr(b, name))) for name in sizes)
    work = abs(log2(a.batch * a.heads_q / (b.batch * b.heads_q)))
    return doublings + 0.25 * work + (a.mask != b.mask) + (_dtype(a) != _dtype(b))


def nearest(
    work: Workload, machine: Machine, items: Sequence[T], shape: Callable[[T], Workload], place: Callable[[T], str]
) -> tuple[str, list[T], int]:
    """(how near, at most `_MOST` items of that rung by distance, how many it has); ("", [], 0) when none has any."""
    widest: tuple[str, list[T]] = ("", [])
    for name, condition in _rungs(work, machine):
        here = [item for item in items if condition(shape(item), place(item))]
        if len(here) > len(widest[1]):
            widest = (name, here)
        if len(here) >= _ENOUGH:
            break
    name, here = widest
    order = sorted(range(len(here)), key=lambda i: (place(here[i]) != machine.name, distance(shape(here[i]), work), i))
    return name, [here[i] for i in order[:_MOST]], len(here)


def _published(p: Prediction) -> Region:
    points, _ = load_points()
    fast = best_per_shape([q for q in points if q.kernel not in EXAMPLES and q.dtype_as_written != "mxfp8"])
    name, near, found = nearest(p.workload, p.machine, fast, lambda q: q.workload, lambda q: q.machine)
    rows = []
    for point in near:
        made = _published_point(point)
        if made is not None:
            rows.append(made)
    note = (
        "Best published kernel of every shape against the forecast at short-run clock (tables are runs of tens of "
        "milliseconds); no constant was fitted on these rows."
    )
    missing = (
        f"No published attention row was taken on a GPU with {p.machine.name}'s kind of tensor core: "
        "nothing here says how far off the forecast is."
    )
    return _region("published", name, found, rows, note, missing)


def _published_point(point: PublishedPoint) -> Point | None:
    try:
        answer = default_predictor(point, "short")
    except ValueError:
        return None
    predicted = point.flop / (answer.time_ms * 1e9)
    return Point(point.machine, point.kernel, point.workload.label(), point.tflops, predicted, point.source)


def _measured(p: Prediction, table: Path | None) -> Region:
    path = table or MEASURED / "h200_points.csv"
    if table is None and not path.is_file():
        return _region("own kernels", "", 0, [], "", "This installation has no table of measurements.")
    ours = generated_runs(read(path))
    best = _best_of_shape(ours)
    name, near, found = nearest(p.workload, p.machine, best, lambda m: m.workload(), lambda m: m.machine)
    rows = [made for row in near if (made := _measured_point(row)) is not None]
    note = f"Fastest generated kernel of every shape in {path.name}, forecast with the variant that ran, at the clock it ran at."
    missing = (
        f"No kernel of ours was measured on a GPU with {p.machine.name}'s kind of tensor core: "
        "tilecast bundle on such a GPU would change that."
    )
    return _region("own kernels", name, found, rows, note, missing)


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
        row.machine,
        row.kernel,
        work.label(),
        measured,
        answer.tflops,
        f"{row.date}, driver {row.driver}, {row.effective_mhz:.0f} MHz",
    )


def _region(kind: str, name: str, found: int, rows: list[Point], note: str, missing: str) -> Region:
    errors = asdict(summarise(row.error for row in rows))
    if not rows:
        return Region(**errors, kind=kind, nearness="", points=(), note=missing)
    if found > len(rows):
        name = f"{name}; the {len(rows)} nearest of {found}"
    return Region(**errors, kind=kind, nearness=name, points=tuple(rows), note=note)


def shown(region: Region) -> Region:
    """The region with only the points a table has room for; its statistics are those of all."""
    return replace(region, points=region.points[:_SHOWN])
