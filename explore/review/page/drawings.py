"""Chart descriptions as static SVG for paper, Markdown and readers without scripts; same input, same bytes."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from tilecast.explore.map_picture import mark_points
from tilecast.explore.review.page.charts import COLOURS, Bars, Chart, Field, Mark, Scatter
from tilecast.explore.review.page.plots import CYCLE, lines_of, nice_ticks

_WIDTH = 7.2
#: Hundredths of a point are finer than any paper.
_LONG_NUMBER = re.compile(r"(?<![\w#])-?\d+\.\d{3,}")
_STYLE = {
    "svg.hashsalt": "tilecast", "svg.fonttype": "none", "font.family": "DejaVu Sans", "font.size": 9, "axes.spines.top": False,
    "axes.spines.right": False, "axes.axisbelow": True, "axes.grid": True, "grid.color": "#e3e3e3", "grid.linewidth": 0.6, "path.simplify": True,
    "hatch.linewidth": 0.4, "figure.facecolor": "white", "axes.facecolor": "white",
}  # fmt: skip


#: Only inside tags: numbers that people read stay as they are.
_TAG = re.compile(r"<[^>]+>")


def _rounded(found: re.Match[str]) -> str:
    return f"{float(found[0]):.2f}".rstrip("0").rstrip(".")


@lru_cache(maxsize=32)
def svg(chart: Chart) -> str:
    """The chart as an SVG document; needs matplotlib."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        # Not pyplot: no backend is chosen and no figure stays open.
        figure = Figure(layout="constrained")
        if isinstance(chart, Bars):
            _bars(chart, figure)
        elif isinstance(chart, Scatter):
            _scatter(chart, figure)
        else:
            _field(chart, figure)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    # Readers without matplotlib's own font take one of theirs.
    text = out.getvalue().replace("'DejaVu Sans'", "'DejaVu Sans', Verdana, Arial, sans-serif")
    text = _TAG.sub(lambda tag: _LONG_NUMBER.sub(_rounded, tag[0]), text)
    lines = (line.strip() for line in text.splitlines())
    return "\n".join(lines) + "\n"


def _bars(chart: Bars, figure: Any) -> None:
    legends = {m.legend: m.kind for m in chart.marks if m.legend}
    row = 0.24 if chart.zoom else 0.30
    figure.set_size_inches(_WIDTH, 0.85 + row * len(chart.rows) + 0.22 * (1 + len(legends) // 5 if legends else 0))
    axis = figure.add_subplot()
    low, high = chart.view or _span(chart)
    shown = [m for m in chart.marks if m.start < high and m.start + m.length > low]
    if chart.log:
        axis.set_xscale("log")
        axis.minorticks_off()
        ticks = nice_ticks(low, high, (1, 2, 5))
        axis.set_xticks(ticks, [f"{v:g}" for v in ticks])
    alike: dict[tuple[str, float, float], list[tuple[float, float]]] = {}
    for mark in shown:
        # Bars of a timeline stand on the bottom of their row, others lie in its middle.
        height = round(0.86 * mark.height, 2)
        bottom = mark.row + 0.43 - height if chart.zoom else mark.row - height / 2
        if height > 0:
            alike.setdefault((mark.kind, bottom, height), []).append((mark.start, mark.length))
            _label(axis, mark, low, high, COLOURS[mark.kind][1], bottom + height / 2)
    for (kind, bottom, height), spans in alike.items():
        hatch = "////" if kind == "wait" else None
        axis.broken_barh(
            spans, (bottom, height), facecolors=COLOURS[kind][0], edgecolors="white", linewidth=0.4, hatch=hatch
        )
    for at, text in chart.lines:
        axis.axvline(at, color="#1a1a1a", linewidth=1, linestyle="--" if text else "-")
        if text:
            axis.text(at, -0.55, text, fontsize=8, va="bottom")
    axis.set(xlim=(low, high), ylim=(len(chart.rows) - 0.5, -0.5), xlabel=chart.x_title)
    axis.set_yticks(range(len(chart.rows)), ["\n".join(lines_of(name, 34)) for name in chart.rows])
    axis.grid(axis="y", visible=False)
    axis.tick_params(axis="y", length=0)
    if chart.percent:
        axis.xaxis.set_major_formatter(_percent())
    if legends:
        _legend(figure, [(name, COLOURS[kind][0]) for name, kind in legends.items()])


def _span(chart: Bars) -> tuple[float, float]:
    starts = [min(m.start, m.start + m.length) for m in chart.marks]
    ends = [max(m.start, m.start + m.length) for m in chart.marks]
    if chart.log:
        return min(starts) * 0.9, max(ends) * (max(ends) / min(starts)) ** 0.12
    low, high = min([0.0, *starts]), max([0.0, *ends])
    if chart.percent:
        return low, 1.1
    room = 0.14 * (high - low)
    return (low - room if low < 0 else low), high + room


def _label(axis: Any, mark: Mark, low: float, high: float, ink: str, middle: float) -> None:
    """Inside where it fits (about 1.9 % of the width a letter), else after the end of the bar."""
    if not mark.text:
        return
    start, end = max(mark.start, low), min(mark.start + mark.length, high)
    if mark.inside:
        if mark.height > 0.6 and (end - start) / (high - low) > 0.014 * len(mark.text):
            axis.text(
                (start + end) / 2, middle, mark.text, ha="center", va="center", fontsize=6.5, color=ink, clip_on=True
            )
        return
    left = mark.length < 0
    axis.text(
        mark.start + mark.length,
        middle,
        f"{mark.text} " if left else f" {mark.text}",
        va="center",
        ha="right" if left else "left",
        fontsize=8,
    )


def _percent() -> Any:
    from matplotlib.ticker import PercentFormatter

    return PercentFormatter(1.0, decimals=0)


def _legend(figure: Any, entries: list[tuple[str, str]]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=colour, label=name) for name, colour in entries]
    longest = max(len(name) for name, _ in entries)
    columns = min(len(entries), 2 if longest > 28 else 6)
    figure.legend(
        handles=handles,
        loc="outside upper left",
        ncols=columns,
        frameon=False,
        fontsize=8,
        handlelength=1.2,
        columnspacing=1.2,
    )


def _scatter(chart: Scatter, figure: Any) -> None:
    figure.set_size_inches(5.2, 4.2)
    axis = figure.add_subplot()
    values = [v for d in chart.dots for v in (d.x, d.y)]
    low, high = min(values) / 1.15, max(values) * 1.15
    ends = [low, high]
    axis.fill_between(
        ends, [v * (1 - chart.band) for v in ends], [v * (1 + chart.band) for v in ends], color="#dddddd", linewidth=0
    )
    axis.plot(ends, ends, color="#7a7a7a", linewidth=0.8)
    for i, group in enumerate(dict.fromkeys(d.group for d in chart.dots)):
        mine = [d for d in chart.dots if d.group == group]
        axis.scatter(
            [d.x for d in mine],
            [d.y for d in mine],
            s=26,
            marker="oDs"[i % 3],
            color=COLOURS[CYCLE[i % len(CYCLE)]][0],
            edgecolors="white",
            linewidths=0.4,
            label=group,
        )
    axis.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel=chart.x_title, ylabel=chart.y_title)
    _plain_ticks(axis, nice_ticks(low, high), nice_ticks(low, high))
    axis.legend(frameon=False, fontsize=8, loc="upper left")


def _plain_ticks(axis: Any, xs: list[float], ys: list[float]) -> None:
    axis.minorticks_off()
    axis.set_xticks(xs, [f"{v:g}" for v in xs])
    axis.set_yticks(ys, [f"{v:g}" for v in ys])


def _field(chart: Field, figure: Any) -> None:
    from matplotlib.colors import BoundaryNorm, ListedColormap

    figure.set_size_inches(_WIDTH, 4.8)
    axis = figure.add_subplot()
    names = list(dict.fromkeys(name for row in chart.categories for name in row))
    colours = [COLOURS[CYCLE[i % len(CYCLE)]][0] for i in range(len(names))]
    codes = [[names.index(name) for name in row] for row in chart.categories]
    norm = BoundaryNorm([i - 0.5 for i in range(len(names) + 1)], max(1, len(names)))
    axis.set(xscale="log", yscale="log")
    axis.pcolormesh(
        chart.x,
        chart.y,
        codes,
        cmap=ListedColormap(colours),
        norm=norm,
        alpha=0.55,
        shading="nearest",
        rasterized=False,
        linewidth=0,
        edgecolors="none",
    )
    lines = axis.contour(chart.x, chart.y, chart.values, levels=chart.levels, colors="#1a1a1a", linewidths=0.9)
    axis.set(xlim=(chart.x[0], chart.x[-1]), ylim=(chart.y[0], chart.y[-1]), xlabel=chart.x_title, ylabel=chart.y_title)
    _plain_ticks(axis, list(_doublings(chart.x)), list(_doublings(chart.y)))
    axis.grid(visible=False)
    _legend(figure, list(zip(names, colours, strict=True)))
    mark_points(axis, {(dot.x, dot.y): dot.text for dot in chart.dots}, lines)


def _doublings(values: tuple[float, ...]) -> Iterator[float]:
    at = values[0]
    while at <= values[-1] * 1.001:
        yield at
        at *= 2
