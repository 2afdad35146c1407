"""Predict every published forward row and every cycle-level row, and say how far off the forecast is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from tilecast.base.pool import spread
from tilecast.base.progress import Progress, reported, silent
from tilecast.model.chip.evaluate import REGIMES, evaluate, evaluate_seconds
from tilecast.model.compiled.evaluate import evaluate_loop
from tilecast.model.families import build_pipeline, loop_shape, native_family, near_published, published_variant
from tilecast.model.forecast.answer import BEFORE, COMPILED, pipe_shares
from tilecast.model.forecast.interval import fact_effects, interval
from tilecast.model.forecast.predict import choose
from tilecast.model.kernel.variant import Variant, with_emulated_share
from tilecast.model.kernel.variants.fa3 import published_by_fa4
from tilecast.model.kernel.variants.fa4 import Fa4Variant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine, load_machine
from tilecast.model.pipeline.graph import Pipeline
from tilecast.model.sm.simulate import steady_state
from tilecast.validation.published.harness import RUN, clock_of
from tilecast.validation.published.loops import LATEST, loop_for, loop_of, read_loops, release_of, simulated
from tilecast.validation.published.points import (
    FA4_ON_HOPPER,
    MMA_SYNC_FAMILY,
    CyclePoint,
    Excluded,
    PublishedPoint,
    best_per_shape,
    load_cycles,
    load_points,
)
from tilecast.validation.statistics import ErrorSummary, HeldOut, grouped, held_out, rank_correlation, summarise

#: Kernels that exist to teach a language, not to win: reported, but no peers in "best kernel per shape".
EXAMPLES = ("triton", "gluon", "tlx", "tilelang")
_BLACKWELL = ("gb200", "gb300", "b200")
_HOPPER = ("h100-sxm", "h200-sxm")
#: Rows from which on it pays to start processes.
_MANY = 200
Predictor = Callable[[PublishedPoint, str], Any]


@dataclass(frozen=True, slots=True)
class Row:
    """One prediction beside its measurement; TFLOP/s in the row's own FLOP convention."""

    point: PublishedPoint
    tflops: float
    time_ms: float
    clock_mhz: float
    kernel: str
    refused: str = ""
    #: `BEFORE` compilation, or `COMPILED`: from the kernel's own machine code.
    level: str = BEFORE
    #: The forecast's interval; both ends are ``tflops`` where none was asked for.
    ends: tuple[float, float] = (0.0, 0.0)

    @property
    def held(self) -> bool:
        """Whether the measurement lies inside the interval."""
        return self.ends[0] <= self.point.tflops <= self.ends[1]

    @property
    def error(self) -> float:
        """Signed relative error of throughput."""
        return self.tflops / self.point.tflops - 1.0


@dataclass(frozen=True, slots=True)
class CycleRow:
    """One cycle-level comparison; share differences in points (percent)."""

    point: CyclePoint
    cycles: float
    share_differences: dict[str, float]

    @property
    def error(self) -> float:
        """Signed relative error of cycles per tile."""
        return self.cycles / self.point.cycles - 1.0


@dataclass(frozen=True, slots=True)
class SpeedUp:
    """GB300 over GB200 for one shape, predicted and measured."""

    workload: Workload
    dtype: str
    predicted: float
    measured: float


@dataclass(frozen=True, slots=True)
class PublishedReport:
    """Everything `validate published` shows."""

    regime: str
    rows: tuple[Row, ...]
    refused: tuple[Row, ...]
    excluded: tuple[Excluded, ...]
    headline: dict[str, ErrorSummary]
    groups: dict[str, dict[str, ErrorSummary]]
    speed_ups: tuple[SpeedUp, ...]
    cycles: tuple[CycleRow, ...]
    #: Those of the cells whose machine code is at hand, from it.
    loops: tuple[CycleRow, ...]
    tau: float
    #: Share of rows whose measurement lies in the forecast's interval, by set; empty where no intervals were asked for.
    coverage: dict[str, float]
    #: The 80 % interval of past errors, by set, tried on other shapes.
    held_out: dict[str, HeldOut]


@dataclass(frozen=True, slots=True)
class Answer:
    """A forecast as far as it is compared."""

    time_ms: float
    clock_mhz: float
    pipeline: Pipeline
    level: str = BEFORE
    #: Ends of the forecast's interval over its TFLOP/s; 1 where none was asked for.
    low: float = 1.0
    high: float = 1.0


@lru_cache(maxsize=4096)
def published_kernel(
    workload: Workload, machine: Machine, family: str, share: float | None, clock: str | float
) -> Variant:
    """The kernel of a published row: as the authors of ``family`` ship it, with the emulated share that its source states.

    The knobs of a closed kernel (``family`` "") are unknown: a library tunes, so it is taken for the open kernel of the
    machine's own family or for the fastest that differs from it in one knob.
    """
    if family == FA4_ON_HOPPER:
        return published_by_fa4(workload)
    if family or share is not None:
        variant = published_variant(family or native_family(machine).name, workload, machine)
        return variant if share is None else with_emulated_share(variant, share)
    work = workload.reduced()
    return min(near_published(work, machine), key=lambda variant: evaluate_seconds(work, machine, variant, clock))


@lru_cache(maxsize=64)
def _board(machine: str, watts: float | None) -> Machine:
    chip = load_machine(machine)
    return chip if watts is None else chip.at_power(watts)


def _running(chip: Machine, family: str) -> Machine:
    """``chip`` as kernels of ``family`` use it: FlashAttention-2's own multiply by mma.sync, where there is wgmma, too."""
    if family != MMA_SYNC_FAMILY or chip.tensor_kind != "wgmma":
        return chip
    return replace(chip, name=f"{chip.name}, mma.sync", tensor_kind="mma_sync")


@lru_cache(maxsize=8192)
def _forecast(
    workload: Workload, machine: str, watts: float | None, family: str, share: float | None, clock: str | float,
    ends: bool = False, code: bool = True, release: str = LATEST,
) -> Answer:  # fmt: skip
    chip, work = _running(_board(machine, watts), family), workload.reduced()
    variant, _ = choose(work, chip, published_kernel(workload, chip, family, share, clock), clock=clock)
    answer = evaluate(work, chip, variant, clock)
    # Facts move both levels alike.
    low, high = (
        end / answer.tflops
        for end in interval(answer.tflops, fact_effects(work, chip, variant, clock, answer) if ends else ())
    )
    roles = loop_for(work, chip, variant, share, release) if code and family else None
    if roles is not None:
        answer = evaluate_loop(roles, work, chip, variant, clock)
    level = BEFORE if roles is None else COMPILED
    return Answer(answer.seconds * 1e3, answer.clock.mhz, answer.pipeline, level, low, high)


def fluid_predictor(point: PublishedPoint, regime: str) -> Answer:
    """`default_predictor` before compilation, whatever machine code is at hand."""
    return default_predictor(point, regime, code=False)


def interval_predictor(point: PublishedPoint, regime: str) -> Answer:
    """`default_predictor` with the interval, which takes several times as long."""
    return default_predictor(point, regime, True)


def default_predictor(point: PublishedPoint, regime: str, ends: bool = False, code: bool = True) -> Answer:
    """The row's kernel (`published_kernel`) at the clock of ``regime`` ("sustained", "short", or `RUN`: by how long its harness
    keeps launching), on a board of the power that the row states: from its machine code where that is at hand and ``code`` is set,
    otherwise before compilation.

    A locked clock is a ceiling: the power limit still holds below it.
    """
    what = point.workload, point.machine, point.board_power_w, point.family, point.emulated_share
    release = release_of(point.source, point.workload.dtype)
    if regime == RUN:
        launch = _forecast(*what, "short", code=code, release=release).time_ms * 1e-3
        regime = clock_of(point.source, _board(point.machine, point.board_power_w), launch)
    answer = _forecast(*what, regime, ends, code, release)
    if point.clock_mhz is not None and answer.clock_mhz > point.clock_mhz:
        answer = _forecast(*what, point.clock_mhz, ends, code, release)
    return answer


def run_published(
    regime: str = "sustained", predictor: Predictor = default_predictor, points: list[PublishedPoint] | None = None,
    progress: Progress = silent,
) -> PublishedReport:  # fmt: skip
    """Predict all rows at the clock of ``regime`` and summarise."""
    return run_regimes((regime,), predictor, points, progress)[0]


def run_regimes(
    regimes: tuple[str, ...] = REGIMES, predictor: Predictor = default_predictor,
    points: list[PublishedPoint] | None = None, progress: Progress = silent, table: Path | None = None,
) -> tuple[PublishedReport, ...]:  # fmt: skip
    """`run_published` at several clocks at once, on all cores where many rows are forecast.

    The rows are ``points``, else those of ``table``, else ours; the hardware counters stand beside ours alone.
    """
    excluded: list[Excluded] = []
    cycles = load_cycles() if table is None else []
    if points is None:
        points, excluded = load_points(table)
    # Rows with one machine and one loop go to one process, which learns their loops once.
    groups: dict[object, list[PublishedPoint]] = {}
    for point in points:
        groups.setdefault((point.machine, loop_shape(point.workload)), []).append(point)
    jobs = sorted(groups.values(), key=len, reverse=True)
    many = predictor in (default_predictor, fluid_predictor, interval_predictor) and len(points) >= _MANY
    made = spread(partial(_rows, regimes, predictor), jobs, 0 if many else 1)
    stage = f"forecast, {' and '.join(regimes)} clock"
    by_row = {rows[0].point.row: rows for job in reported(made, stage, len(jobs), progress) for rows in job}
    # Cycles do not depend on the clock.
    cells = tuple(map(_cycle_row, cycles)), _loop_rows(cycles)
    return tuple(
        _report(regime, points, excluded, [by_row[point.row][i] for point in points], *cells)
        for i, regime in enumerate(regimes)
    )


def _report(
    regime: str, points: list[PublishedPoint], excluded: list[Excluded], rows: list[Row], cycles: tuple[CycleRow, ...],
    loops: tuple[CycleRow, ...],
) -> PublishedReport:  # fmt: skip
    usable = tuple(row for row in rows if not row.refused)
    by_row = {row.point.row: row for row in usable}
    return PublishedReport(
        regime=regime,
        rows=usable,
        refused=tuple(row for row in rows if row.refused),
        excluded=tuple(excluded),
        headline=_headline(points, by_row),
        groups=_groups(usable),
        speed_ups=tuple(_speed_ups(points, by_row)),
        cycles=cycles,
        loops=loops,
        coverage=_coverage(points, by_row) if any(row.ends[0] < row.ends[1] for row in usable) else {},
        held_out=_held_out(points, by_row),
        tau=rank_correlation([r.tflops for r in usable], [r.point.tflops for r in usable]),
    )


def _rows(regimes: tuple[str, ...], predictor: Predictor, points: list[PublishedPoint]) -> list[tuple[Row, ...]]:
    """The rows of each point, one a regime."""
    return [tuple(_row(point, regime, predictor) for regime in regimes) for point in points]


def _row(point: PublishedPoint, regime: str, predictor: Predictor) -> Row:
    try:
        answer = predictor(point, regime)
    except ValueError as error:
        return Row(point, 0.0, 0.0, 0.0, "", str(error))
    tflops = point.flop / (answer.time_ms * 1e9)
    ends = (tflops * getattr(answer, "low", 1.0), tflops * getattr(answer, "high", 1.0))
    level = getattr(answer, "level", BEFORE)
    return Row(point, tflops, answer.time_ms, answer.clock_mhz, answer.pipeline.name, level=level, ends=ends)


def headline_points(
    points: list[PublishedPoint], machines: tuple[str, ...], dtypes: tuple[str, ...]
) -> list[PublishedPoint]:
    """Best kernel per shape at seqlen >= 2048, among kernels written to be fast."""
    long = [p for p in points if p.machine in machines and p.workload.seqlen_q >= 2048 and p.kernel not in EXAMPLES]
    return [p for p in best_per_shape(long) if p.family != "fa2" and p.dtype_class in dtypes]


def _headline(points: list[PublishedPoint], by_row: dict[int, Row]) -> dict[str, ErrorSummary]:
    return {
        name: summarise(by_row[p.row].error for p in chosen if p.row in by_row)
        for name, chosen in _headline_sets(points).items()
    }


def _coverage(points: list[PublishedPoint], by_row: dict[int, Row]) -> dict[str, float]:
    """Share of rows inside their intervals, for the sets of the headline that have rows."""
    sets = {
        name: [by_row[p.row].held for p in chosen if p.row in by_row] for name, chosen in _headline_sets(points).items()
    }
    return {name: sum(held) / len(held) for name, held in sets.items() if held}


def _held_out(points: list[PublishedPoint], by_row: dict[int, Row]) -> dict[str, HeldOut]:
    """For the sets of the headline that hold several machines of a kind."""
    sets = {name: [by_row[p.row] for p in chosen if p.row in by_row] for name, chosen in _headline_sets(points).items()}
    found = {
        name: held_out([row.point.tflops / row.tflops for row in rows], [row.point.workload for row in rows])
        for name, rows in sets.items()
        if not name.startswith(" ")
    }
    return {name: one for name, one in found.items() if one.count}


def _headline_sets(points: list[PublishedPoint]) -> dict[str, list[PublishedPoint]]:
    both = ("16 bit", "fp8")
    return {
        "Blackwell, best kernel per shape, 16 bit and fp8, seqlen >= 2048": headline_points(points, _BLACKWELL, both),
        **{f"  {m}": headline_points(points, (m,), both) for m in _BLACKWELL},
        **{f"  {d}": headline_points(points, _BLACKWELL, (d,)) for d in both},
        "Blackwell, mxfp8 (block scales are not modelled)": headline_points(points, _BLACKWELL, ("mxfp8",)),
        "H100 and H200, best of peers per shape": headline_points(points, _HOPPER, both),
        **{f"  {m}": headline_points(points, (m,), both) for m in _HOPPER},
        **{f"  H100 and H200, {d}": headline_points(points, _HOPPER, (d,)) for d in both},
    }


def length_bucket(seqlen: int) -> str:
    """Powers of four, as text that sorts."""
    for top in (1024, 4096, 16384, 65536):
        if seqlen <= top:
            return f"{top:6d} or less"
    return " above 65536"


def _groups(rows: tuple[Row, ...]) -> dict[str, dict[str, ErrorSummary]]:
    def error(row: Row) -> float:
        return row.error

    return {
        "GPU": grouped(rows, lambda r: r.point.machine, error),
        "kernel": grouped(rows, lambda r: r.point.kernel, error),
        "dtype": grouped(rows, lambda r: r.point.dtype_as_written, error),
        "mask": grouped(rows, lambda r: r.point.workload.mask, error),
        "head_dim": grouped(rows, lambda r: f"{r.point.workload.head_dim_qk:3d}/{r.point.workload.head_dim_v}", error),
        "seqlen": grouped(rows, lambda r: length_bucket(r.point.workload.seqlen_q), error),
    }


def _speed_ups(points: list[PublishedPoint], by_row: dict[int, Row]) -> list[SpeedUp]:
    """Shapes that both machines ran; the same kernel on both where it is the best of either."""
    new = {(p.dtype_class, p.workload): p for p in headline_points(points, ("gb300",), ("16 bit", "fp8"))}
    old = {(p.dtype_class, p.workload): p for p in headline_points(points, ("gb200",), ("16 bit", "fp8"))}
    out = []
    for key in new.keys() & old.keys():
        a, b = by_row.get(new[key].row), by_row.get(old[key].row)
        if a and b:
            out.append(SpeedUp(key[1], key[0], a.tflops / b.tflops, a.point.tflops / b.point.tflops))
    return sorted(out, key=lambda s: (s.dtype, s.workload.label()))


def share_within(speed_ups: tuple[SpeedUp, ...], points: float) -> float:
    """Share of shapes whose predicted speed-up lies within ``points`` percentage points of the measured one."""
    if not speed_ups:
        return 0.0
    return sum(abs(s.predicted - s.measured) * 100 <= points for s in speed_ups) / len(speed_ups)


def _cycle_row(point: CyclePoint) -> CycleRow:
    machine = load_machine(point.machine)
    pipeline = _cycle_pipeline(point, machine)
    shares = pipe_shares(pipeline, steady_state(pipeline), machine)
    differences = {k: 100 * shares[k] - v for k, v in point.shares.items()}
    return CycleRow(point, cycles_of(point, machine), differences)


def _loop_rows(points: list[CyclePoint]) -> tuple[CycleRow, ...]:
    if not points:
        return ()
    loops = read_loops()
    return tuple(
        CycleRow(point, *simulated(point, kernel)) for point in points if (kernel := loop_of(point, loops)) is not None
    )


def cycles_of(point: CyclePoint, machine: Machine) -> float:
    """Predicted cycles of a 128 x 128 tile of the row's kernel on ``machine``."""
    pipeline = _cycle_pipeline(point, machine)
    return steady_state(pipeline).ii_cycles / (pipeline.rows_per_cta * pipeline.keys_per_iteration / (128 * 128))


def _cycle_pipeline(point: CyclePoint, machine: Machine) -> Pipeline:
    wide = point.head_dim == 256
    variant = Fa4Variant(cta_group=2, split="k" if wide else "q", emulated_share=point.emulated_share)
    workload = loop_shape(
        Workload(head_dim_qk=point.head_dim, head_dim_v=point.head_dim, mask=point.mask, dtype=point.dtype)
    )
    return build_pipeline(workload, variant, machine)
