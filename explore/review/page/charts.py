"""The charts as plain descriptions, which `plots` turns interactive and `drawings` into static SVG.

Three kinds cover the report: bars on rows (waterfall, roofline, tornado, timeline), a scatter, a map.  ``kind`` of a
mark is a key of `COLOURS`; the palette is Okabe and Ito's, which people with colour-blindness tell apart.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilecast.base.words import significant
from tilecast.explore.map_picture import cell_style
from tilecast.explore.review.content.content import (
    Ceiling,
    Change,
    Point,
    Regime,
    Region,
    ReviewContent,
    Timeline,
    Tornado,
)
from tilecast.model.forecast.answer import WaterfallStep
from tilecast.model.whatif.asymmetry import AsymmetryMap, MapPoint

#: kind -> (fill, text on the fill with a contrast of at least 4.5).
COLOURS: dict[str, tuple[str, str]] = {
    "blue": ("#0072B2", "#ffffff"),
    "orange": ("#E69F00", "#000000"),
    "sky": ("#56B4E9", "#000000"),
    "green": ("#009E73", "#000000"),
    "yellow": ("#F0E442", "#000000"),
    "vermillion": ("#D55E00", "#000000"),
    "purple": ("#CC79A7", "#000000"),
    "grey": ("#999999", "#000000"),
    "dark": ("#5A5A5A", "#ffffff"),
    "wait": ("#D9D9D9", "#000000"),
    "unit": ("#7F9DB9", "#000000"),
}
#: Colour of an operation's kind on the timeline.
_OPERATIONS = {
    "qk": "blue", "pv": "sky", "mma": "blue", "row max": "yellow", "exp": "vermillion", "p": "vermillion", "row sum": "orange", "rescale": "green",
    "correction": "green", "s": "blue", "dp": "sky", "dv": "green", "dk": "yellow", "dq": "orange", "ds": "dark", "load": "purple", "store": "dark", "barrier": "grey", "wait": "wait", "unit": "unit",
}  # fmt: skip
_LEGEND = {
    "unit": "unit busy", "qk": "Q·Kᵀ", "pv": "P·V", "s": "S = Q·Kᵀ", "dp": "dP = dO·Vᵀ", "dv": "dV", "dk": "dK", "dq": "dQ", "ds": "dS", "p": "P",
}  # fmt: skip
#: Rows of the tornado; the table has the rest.
MOST_DRAWN = 14


@dataclass(frozen=True, slots=True)
class Mark:
    """One bar: its row, where it begins, how long it is, and what a reader gets to see of it."""

    row: int
    start: float
    length: float
    kind: str
    #: Drawn on the bar ("inside", where it fits) or after its end.
    text: str = ""
    hover: str = ""
    inside: bool = False
    #: Share of the row's height; bars stand on the bottom of their row.
    height: float = 1.0
    #: Entry of the legend; "" shows none.
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Bars:
    """Bars on named rows, first row on top."""

    ident: str
    title: str
    caption: str
    rows: tuple[str, ...]
    marks: tuple[Mark, ...]
    x_title: str
    log: bool = False
    percent: bool = False
    #: (position, text) of vertical lines.
    lines: tuple[tuple[float, str], ...] = ()
    #: The part of the axis shown first; the rest is reached by zooming.
    view: tuple[float, float] | None = None
    zoom: bool = False


@dataclass(frozen=True, slots=True)
class Dot:
    """One point of a scatter or map."""

    x: float
    y: float
    group: str
    hover: str
    text: str = ""


@dataclass(frozen=True, slots=True)
class Scatter:
    """Points around the diagonal, both axes logarithmic; ``band`` is the relative width that is shaded."""

    ident: str
    title: str
    caption: str
    dots: tuple[Dot, ...]
    x_title: str
    y_title: str
    band: float


@dataclass(frozen=True, slots=True)
class Field:
    """A map: a category and a value for every (x, y), iso-lines of the value, points on top; log2 axes."""

    ident: str
    title: str
    caption: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    values: tuple[tuple[float, ...], ...]
    categories: tuple[tuple[str, ...], ...]
    levels: tuple[float, ...]
    dots: tuple[Dot, ...]
    x_title: str
    y_title: str


Chart = Bars | Scatter | Field


def forecast_chart(regimes: tuple[Regime, ...]) -> Bars:
    """Interval of every clock regime with the value in it."""
    marks = []
    for i, r in enumerate(regimes):
        hover = f"{r.name}: {significant(r.tflops)} TFLOP/s, interval {significant(r.low)} to {significant(r.high)}, {r.time_ms:.4g} ms at {r.clock_mhz:.0f} MHz"
        marks.append(Mark(i, 0.0, r.tflops, "blue", "", hover, legend="forecast", height=0.9))
        marks.append(
            Mark(
                i,
                r.low,
                r.high - r.low,
                "orange",
                f"{significant(r.tflops)} ({significant(r.low)} to {significant(r.high)})",
                hover,
                legend="interval",
                height=0.35,
            )
        )
    caption = "Forecast and its interval, from the ranges of the machine facts, at each clock regime."
    return Bars(
        "forecast",
        "Forecast with interval",
        caption,
        tuple(f"{r.name} clock" for r in regimes),
        tuple(marks),
        "TFLOP/s",
    )


def waterfall_chart(steps: tuple[WaterfallStep, ...], whole: str = "time of the kernel") -> Bars:
    """Where the time goes; the steps add up to 100 %."""
    marks: list[Mark] = []
    rows: list[str] = []
    at = 0.0
    for step in steps:
        if abs(step.share) >= 0.0005:
            kind = "green" if not rows else "orange"
            text = f"{step.share:.1%}"
            marks.append(
                Mark(
                    len(rows),
                    at,
                    step.share,
                    kind,
                    text,
                    f"{step.cause}: {step.share:.2%} of the time, {step.cycles:.0f} cycles per SM",
                )
            )
            rows.append(step.cause)
        at += step.share
    marks.append(Mark(len(rows), 0.0, at, "blue", f"{at:.0%}", f"the whole {whole}"))
    caption = "From the tensor cores' peak to the forecast: share of the time by cause."
    return Bars(
        "waterfall",
        "From peak to achieved",
        caption,
        (*rows, whole),
        tuple(marks),
        "share of the time",
        percent=True,
    )


def roofline_chart(ceilings: tuple[Ceiling, ...], tflops: float) -> Bars:
    """Every unit's ceiling on a logarithmic axis, with the forecast as a line."""
    marks = []
    for i, c in enumerate(ceilings):
        cycles = f"{c.cycles:.0f} cycles per iteration, " if c.cycles is not None else ""
        hover = f"{c.unit}: ceiling {significant(c.tflops)} TFLOP/s; {cycles}busy {c.busy:.0%} of the time; {c.about}"
        kind = "vermillion" if i == 0 else "sky"
        marks.append(Mark(i, tflops, c.tflops - tflops, kind, f"{significant(c.tflops)}", hover))
    caption = "TFLOP/s the workload would reach if the unit alone set the pace, at the forecast's clock. Bars begin at the forecast: their length is headroom."
    return Bars(
        "roofline", "Ceiling of every unit", caption, tuple(c.unit for c in ceilings), tuple(marks), "TFLOP/s (logarithmic)", log=True,
        lines=((tflops, f"forecast {significant(tflops)}"),),
    )  # fmt: skip


def timeline_chart(t: Timeline, ident: str) -> Bars:
    """Roles and engines above, units below; drawn whole, shown from the steady state."""
    lanes = (*t.lanes, *t.unit_lanes)
    row = {lane: i for i, lane in enumerate(lanes)}
    marks = tuple(
        Mark(
            row[b.lane],
            b.start,
            b.cycles,
            _OPERATIONS.get(b.kind, "grey"),
            b.name,
            "<br>".join(b.lines),
            True,
            b.share,
            _legend(b.kind),
        )
        for b in t.bars
    )
    caption = (
        f"Two periods of {t.ii_cycles:.0f} cycles in the steady state; roles and engines above, below how busy each unit is. "
        "Hatched is waiting."
    )
    return Bars(ident, f"Schedule: {t.title}", caption, lanes, marks, "SM cycles", view=t.view, zoom=True)


def _legend(kind: str) -> str:
    return _LEGEND.get(kind, kind)


def tornado_chart(t: Tornado) -> Bars:
    """Percent of time per percent, kernel kept (wide bar) and chosen again (narrow bar)."""
    marks: list[Mark] = []
    shown = t.rows[:MOST_DRAWN]
    for i, r in enumerate(shown):
        hover = (
            f"{r.fact} = {r.value:g} {r.unit}: {r.fixed:+.3f} % time per % with the kernel kept, {r.reoptimised:+.3f} chosen again; "
            f"{r.low_ms:.4g} ms at {r.low:g}, {r.high_ms:.4g} ms at {r.high:g}"
        )
        marks += _pair(
            i, (r.fixed, "kernel kept"), (r.reoptimised, "kernel chosen again"), signed(r.reoptimised, 2), hover
        )
    caption = "Percent of time per percent of each fact: left of zero, more of it is faster."
    return Bars(
        "tornado",
        "Sensitivity",
        caption,
        tuple(r.fact for r in shown),
        tuple(marks),
        "% of time per %",
        lines=((0.0, ""),),
    )


def _pair(row: int, wide: tuple[float, str], narrow: tuple[float, str], text: str, hover: str) -> list[Mark]:
    """A narrow bar on a wide one; the text stands after the longer of the two, so that it covers neither."""
    on_wide = wide[0] * narrow[0] >= 0 and abs(wide[0]) > abs(narrow[0])
    return [
        Mark(row, 0.0, wide[0], "sky", text if on_wide else "", hover, height=0.95, legend=wide[1]),
        Mark(row, 0.0, narrow[0], "blue", "" if on_wide else text, hover, height=0.5, legend=narrow[1]),
    ]


def signed(value: float, digits: int) -> str:
    """The value with its sign; nothing is plus or minus zero."""
    text = f"{value:+.{digits}f}"
    return text if float(text) else f"{0:.{digits}f}"


def accuracy_chart(regions: tuple[Region, ...]) -> Scatter | None:
    """Predicted over measured, near the question; None without a point."""
    dots = tuple(
        Dot(q.measured, q.predicted, f"{region.kind} ({region.count})", _point_hover(q))
        for region in regions
        for q in region.points
    )
    if not dots:
        return None
    caption = "Forecast against measurement for the points nearest to the question; the band is ±10 %."
    return Scatter(
        "accuracy", "Accuracy near this question", caption, dots, "measured TFLOP/s", "predicted TFLOP/s", 0.10
    )


def _point_hover(q: Point) -> str:
    return f"{q.machine}, {q.kernel}: {q.shape}<br>measured {significant(q.measured)}, predicted {significant(q.predicted)} TFLOP/s ({q.error:+.1%})<br>{q.source}"


def map_chart(m: AsymmetryMap) -> Field:
    """What binds and how fast, over two rates, with GPUs on it."""
    places: dict[tuple[float, float], list[MapPoint]] = {}
    for point in m.points:
        places.setdefault((point.x, point.y), []).append(point)
    dots = tuple(
        Dot(
            x, y, "GPU", "<br>".join(f"{q.label}: {q.kind}; {q.source}" for q in here), ", ".join(q.label for q in here)
        )
        for (x, y), here in places.items()
    )
    low, high = min(map(min, m.tflops)), max(map(max, m.tflops))
    levels = tuple(level for level in m.levels if low < level < high)
    caption = "Colour: the full unit, or the unit that the binding recurrence spends most cycles on. Lines: TFLOP/s. Points: where GPUs lie by these two rates."
    return Field(
        "map",
        "Map of asymmetric machines",
        caption,
        m.x,
        m.y,
        m.tflops,
        tuple(
            tuple(cell_style(bound_by, lap)[0] for bound_by, lap in zip(*rows, strict=True))
            for rows in zip(m.bound_by, m.lap, strict=True)
        ),
        levels,
        dots,
        f"{m.x_fact} ({m.x_unit})",
        f"{m.y_fact} ({m.y_unit})",
    )


def change_chart(change: Change, whole: str) -> Bars:
    """Milliseconds by cause, before (wide bar) and after (narrow bar)."""
    rows: list[str] = []
    marks: list[Mark] = []
    for cause, before, after in milliseconds(change, whole):
        hover = f"{cause}: {before:.4g} ms before, {after:.4g} ms after ({after - before:+.3g})"
        marks += _pair(len(rows), (before, "before"), (after, "after"), signed(after - before, 3), hover)
        rows.append(cause)
    caption = (
        "Milliseconds by cause before and after the change, the kernel chosen again; the number is the difference."
    )
    return Bars("change", "Before and after", caption, tuple(rows), tuple(marks), "milliseconds")


def milliseconds(change: Change, whole: str) -> list[tuple[str, float, float]]:
    """(cause, before, after) of every cause that either side spends time on, and the whole time last."""
    sides = [{s.cause: s.share * side.time_ms for s in side.waterfall} for side in (change.before, change.after)]
    causes = [
        c
        for c in dict.fromkeys((*sides[0], *sides[1]))
        if max(side.get(c, 0.0) for side in sides) > 5e-4 * change.before.time_ms
    ]
    rows = [(cause, sides[0].get(cause, 0.0), sides[1].get(cause, 0.0)) for cause in causes]
    return [*rows, (whole, change.before.time_ms, change.after.time_ms)]


def charts(c: ReviewContent) -> dict[str, Chart]:
    """Every chart of the review by its identifier."""
    found: list[Chart | None] = [
        forecast_chart(c.regimes),
        waterfall_chart(c.waterfall, c.whole),
        roofline_chart(c.ceilings, c.regimes[0].tflops),
        tornado_chart(c.tornado),
        map_chart(c.map),
        accuracy_chart(c.regions),
    ]
    if c.change is None:
        found.append(timeline_chart(c.timeline, "timeline"))
    else:
        # The timeline of before is that of the report: drawn once, beside the one of after.
        found.append(change_chart(c.change, c.whole))
        found += [timeline_chart(t, t.title) for t in (c.change.before.timeline, c.change.after.timeline)]
    found += [timeline_chart(t, f"timeline-{i}") for i, t in enumerate(c.other_timelines, 2)]
    return {chart.ident: chart for chart in found if chart is not None}
