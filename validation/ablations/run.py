"""Published and measured ablations against their forecasts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tilecast.base.progress import Progress, silent
from tilecast.model.families import parse_variant
from tilecast.model.kernel.verdict import VariantError
from tilecast.validation.ablations.effects import Score, score
from tilecast.validation.ablations.pairs import Pair, paired, pairs
from tilecast.validation.ablations.published import Case, Excluded, forecast_cases, load
from tilecast.validation.lab.measure.records import Measured, RecordError, read
from tilecast.validation.measured.kept import AGAIN, kept_profiles
from tilecast.validation.measured.recorded import generated_runs, read_profiles
from tilecast.validation.measured.run import CODES, TABLE, forecast_rows


@dataclass(frozen=True, slots=True)
class AblationReport:
    """Everything `validate ablations` shows; ``cases`` are empty where a table of the user's is looked at."""

    regime: str
    cases: tuple[Case, ...]
    excluded: tuple[Excluded, ...]
    #: Name of the table of measurements, GPUs in it.
    table: str
    gpus: tuple[str, ...]
    pairs: tuple[Pair, ...]
    #: How many of ``pairs`` were measured again as their kernels are written now, forecast from the loops at hand.
    again: int
    #: Rows that have no forecast, with the reason of the first.
    refused: int
    refusal: str


def run_ablations(
    table: Path | None = None, codes: Path = CODES, machine: str | None = None, regime: str = "short",
    progress: Progress = silent,
) -> AblationReport:  # fmt: skip
    """Forecast every pair of ``table`` (default: the H200's, and the published cases), each row once.

    Raises RecordError, CodeError and AblationError for files that are something else, RecordError without pairs.
    """
    path = table or TABLE
    runs = generated_runs(read(path))
    points, refusals = _readable(path, runs)
    found = paired(points)
    if not found:
        raise RecordError(
            f"{path}: no two short runs of generated kernels at one shape differ in exactly one knob: measure some with "
            "tilecast measure PLAN.toml"
        )
    lines, excluded = load() if table is None else ([], [])
    profiles = read_profiles(codes)
    cases = forecast_cases(lines, regime, progress) if lines else ()
    needed = sorted({i for one, other, _ in found for i in (one, other)})
    rows = forecast_rows([points[i] for i in needed], profiles, machine, progress)
    first = pairs(rows)
    made = first if table else measured_again(first, machine, progress)
    again = sum(now is not then for now, then in zip(made, first, strict=True))
    refusals += [row.refused for row in rows if row.refused]
    return AblationReport(
        regime, cases, tuple(excluded), str(path), tuple(sorted({points[i].gpu for i in needed})), made, again,
        len(refusals),
        refusals[0] if refusals else "",
    )  # fmt: skip


def measured_again(found: Sequence[Pair], machine: str | None = None, progress: Progress = silent) -> tuple[Pair, ...]:
    """``found``, where both kernels of a pair were measured again (`AGAIN`) that of what they are by now, from the loops at hand.

    So both are always of one generator.
    """
    wanted = {end for pair in found for end in _ends(pair)}
    points = [point for point in read(AGAIN) if point.key() in wanted]
    now = {
        _ends(pair): pair for pair in pairs(forecast_rows(points, kept_profiles(points, machine), machine, progress))
    }
    return tuple(now.get(_ends(pair), pair) for pair in found)


def _ends(pair: Pair) -> tuple[tuple[object, ...], tuple[object, ...]]:
    return pair.row_from.point.key(), pair.row_to.point.key()


def _readable(path: Path, runs: Sequence[Measured]) -> tuple[list[Measured], list[str]]:
    """The rows whose variants are known, and why others are not; RecordError where cycles are no number above 0."""
    points, refusals = [], []
    for run in runs:
        if not 0.0 < run.cycles < math.inf:
            raise RecordError(
                f"{path}: cycles of {run.kernel} at {run.workload().label()}: expected a number above 0, got {run.cycles:g}"
            )
        try:
            parse_variant(run.variant)
        except VariantError as error:
            refusals.append(str(error))
        else:
            points.append(run)
    return points, refusals


def by_knob(found: Sequence[Pair], level: str) -> dict[str, Score]:
    """Scores of the pairs by knob, in alphabetical order."""
    groups: dict[str, list[Pair]] = {}
    for pair in found:
        groups.setdefault(pair.knob, []).append(pair)
    return {name: score((pair.effect for pair in groups[name]), level) for name in sorted(groups)}
