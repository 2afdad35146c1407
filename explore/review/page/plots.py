"""Chart descriptions as Plotly figures: plain dictionaries, so that no plotting package is loaded to write a page."""

from __future__ import annotations

import re
from itertools import groupby
from math import log10
from typing import Any

from tilecast.explore.review.page.charts import COLOURS, Bars, Chart, Field, Mark, Scatter

_ROW, _FRAME, _LEGEND = 30, 78, 26
_TIMELINE_ROW = 26
_LABEL = 20
#: Colours of groups and categories, in the order they come.
CYCLE = ("blue", "orange", "green", "vermillion", "purple", "sky", "yellow", "dark", "grey")


def figure(chart: Chart) -> dict[str, Any]:
    """{"data": [...], "layout": {...}} for ``Plotly.newPlot``; ink and grid colours come from the page."""
    if isinstance(chart, Bars):
        return _bars(chart)
    return _scatter(chart) if isinstance(chart, Scatter) else _field(chart)


def wrapped(label: str, width: int = _LABEL) -> str:
    """A row's label on several lines."""
    return "<br>".join(lines_of(label, width))


def lines_of(label: str, width: int) -> list[str]:
    """Lines of at most ``width`` characters, broken after spaces, dots and underscores."""
    lines = [""]
    for part in re.findall(r"[^ ._]*[ ._]?", label):
        if len(lines[-1]) + len(part.rstrip()) > width and lines[-1]:
            lines.append("")
        lines[-1] += part
    return [line.rstrip() for line in lines]


def _layout(height: int, x: dict[str, Any], y: dict[str, Any], legend: bool, zoom: bool) -> dict[str, Any]:
    return {
        "height": height,
        "margin": {"l": 8, "r": 12, "t": 34 if legend else 24, "b": 8, "autoexpand": True},
        "font": {"family": "system-ui, -apple-system, 'Segoe UI', Roboto, Arial, sans-serif", "size": 13},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "barmode": "overlay",
        "bargap": 0,
        "showlegend": legend,
        "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom", "font": {"size": 12}},
        "hovermode": "closest",
        "hoverlabel": {
            "align": "left",
            "bgcolor": "#ffffff",
            "bordercolor": "#5a5a5a",
            "font": {"color": "#1a1a1a", "size": 13},
        },
        "dragmode": "zoom" if zoom else False,
        "xaxis": {"automargin": True, "zeroline": False, "fixedrange": not zoom, **x},
        "yaxis": {"automargin": True, "zeroline": False, "fixedrange": True, **y},
    }


def _bars(chart: Bars) -> dict[str, Any]:
    names = [mark.legend for mark in chart.marks if mark.legend]
    legend = bool(names)
    most = max(len(lines_of(name, _LABEL)) for name in chart.rows)
    row = _TIMELINE_ROW if chart.zoom else max(_ROW, 16 * most + 6)
    height = _FRAME + row * len(chart.rows) + (_LEGEND * (1 + len(set(names)) // 4) if legend else 0)
    data = [_trace(kind, text, list(group), chart) for (kind, text), group in _by_kind(chart.marks)]
    x: dict[str, Any] = {"title": {"text": chart.x_title}}
    ends = [mark.start + mark.length for mark in chart.marks]
    if chart.log:
        low, high = min(m.start for m in chart.marks), max(ends)
        x |= {
            "type": "log",
            "range": [log10(low * 0.9), log10(high) + 0.3 * log10(high / low)],
            **_ticks(low, high, (1, 2, 5)),
        }
    elif chart.view is not None:
        x["range"] = list(chart.view)
    elif not chart.percent:
        # Room for the numbers after the ends of bars, on a phone too.
        low, high = min([0.0, *(m.start for m in chart.marks), *ends]), max([0.0, *ends])
        room = 0.3 * (high - low)
        x["range"] = [low - room if low < 0 else 0.0, high + room]
    else:
        x |= {"tickformat": ".0%", "range": [min(0.0, *(m.start for m in chart.marks)), 1.24]}
    y = {
        "tickvals": list(range(len(chart.rows))),
        "ticktext": [wrapped(name) for name in chart.rows],
        "range": [len(chart.rows) - 0.5, -0.5],
        "showgrid": False,
    }
    layout = _layout(height, x, y, legend, chart.zoom)
    layout["shapes"] = [
        {
            "type": "line",
            "x0": at,
            "x1": at,
            "xref": "x",
            "yref": "paper",
            "y0": 0,
            "y1": 1,
            "line": {"width": 1.5, "dash": "dash" if text else "solid"},
        }
        for at, text in chart.lines
    ]
    layout["annotations"] = [
        {"x": log10(at) if chart.log else at, "y": 1, "yref": "paper", "yanchor": "bottom", "xanchor": "left", "text": text, "showarrow": False}
        for at, text in chart.lines
        if text
    ]  # fmt: skip
    return {"data": data, "layout": layout}


def _by_kind(marks: tuple[Mark, ...]) -> list[tuple[tuple[str, str], list[Mark]]]:
    """Marks of one colour and legend entry together, in order of their first appearance."""
    order = {key: i for i, key in reversed(list(enumerate((m.kind, m.legend) for m in marks)))}
    ordered = sorted(marks, key=lambda m: order[(m.kind, m.legend)])
    return [(key, list(group)) for key, group in groupby(ordered, key=lambda m: (m.kind, m.legend))]


def _trace(kind: str, legend: str, marks: list[Mark], chart: Bars) -> dict[str, Any]:
    fill, ink = COLOURS[kind]
    share = 0.86
    inside = marks[0].inside
    return {
        "type": "bar",
        "orientation": "h",
        "name": legend or kind,
        "showlegend": bool(legend),
        "y": [m.row for m in marks],
        "base": [_round(m.start) for m in marks],
        "x": [_round(m.length) for m in marks],
        # Rows are drawn downwards: a bar stands on the bottom of its row; a lower one lies in the middle unless it is a level.
        "width": [round(share * m.height, 4) for m in marks],
        "offset": [round(share * (0.5 - m.height if chart.zoom else -0.5 * m.height), 4) for m in marks],
        "marker": {"color": fill, "line": {"width": 0.5, "color": "#ffffff"}, **({"pattern": {"shape": "/", "fgcolor": "#7a7a7a", "size": 6, "solidity": 0.15}} if kind == "wait" else {})},
        "text": [m.text for m in marks],
        "textposition": "inside" if inside else "outside",
        "insidetextanchor": "middle",
        "constraintext": "inside" if inside else "none",
        "textangle": 0,
        "cliponaxis": inside,
        **({"insidetextfont": {"color": ink, "size": 11}} if inside else {}),
        "hoverinfo": "text",
        "hovertext": [m.hover for m in marks],
    }  # fmt: skip


def _round(value: float) -> float:
    return float(f"{value:.7g}")


def _scatter(chart: Scatter) -> dict[str, Any]:
    values = [v for d in chart.dots for v in (d.x, d.y)]
    low, high = min(values) / 1.15, max(values) * 1.15
    wide, narrow = 1 + chart.band, 1 - chart.band
    data: list[dict[str, Any]] = [
        {"type": "scatter", "mode": "lines", "x": [low, high], "y": [low * narrow, high * narrow], "line": {"width": 0}, "hoverinfo": "skip", "showlegend": False},
        {"type": "scatter", "mode": "lines", "x": [low, high], "y": [low * wide, high * wide], "line": {"width": 0}, "fill": "tonexty",
         "fillcolor": "rgba(128,128,128,0.22)", "hoverinfo": "skip", "showlegend": False},
        {"type": "scatter", "mode": "lines", "x": [low, high], "y": [low, high], "line": {"width": 1, "color": "#7a7a7a"}, "hoverinfo": "skip", "showlegend": False},
    ]  # fmt: skip
    for i, group in enumerate(dict.fromkeys(d.group for d in chart.dots)):
        mine = [d for d in chart.dots if d.group == group]
        data.append(
            {"type": "scatter", "mode": "markers", "name": group, "x": [_round(d.x) for d in mine], "y": [_round(d.y) for d in mine],
             "marker": {"size": 9, "color": COLOURS[CYCLE[i % len(CYCLE)]][0], "symbol": ("circle", "diamond", "square")[i % 3], "line": {"width": 0.5, "color": "#ffffff"}},
             "hoverinfo": "text", "hovertext": [d.hover for d in mine]}
        )  # fmt: skip
    layout = _layout(420, {"title": {"text": chart.x_title}, "type": "log", "range": _exponents(low, high), **_ticks(low, high)},
                     {"title": {"text": chart.y_title}, "type": "log", "range": _exponents(low, high), **_ticks(low, high)}, True, False)  # fmt: skip
    return {"data": data, "layout": layout}


def _exponents(low: float, high: float) -> list[float]:
    return [log10(low), log10(high)]


def _ticks(low: float, high: float, digits: tuple[float, ...] = (1, 1.5, 2, 3, 4, 5, 6, 8)) -> dict[str, Any]:
    values = nice_ticks(low, high, digits)
    return {"tickvals": values, "ticktext": [f"{v:g}" for v in values]}


def nice_ticks(low: float, high: float, digits: tuple[float, ...] = (1, 1.5, 2, 3, 4, 5, 6, 8)) -> list[float]:
    """Round numbers for a short logarithmic axis."""
    steps = [m * 10.0**e for e in range(-3, 8) for m in digits]
    inside = [s for s in steps if low <= s <= high]
    return inside[:: max(1, len(inside) // 8)]


def _field(chart: Field) -> dict[str, Any]:
    names = list(dict.fromkeys(name for row in chart.categories for name in row))
    index = {name: i for i, name in enumerate(names)}
    colours = [COLOURS[CYCLE[i % len(CYCLE)]][0] for i in range(len(names))]
    count = len(names)
    scale = [[edge / count, colours[i]] for i in range(count) for edge in (i, i + 1)]
    hover = [
        [f"{chart.x_title}: {x:g}<br>{chart.y_title}: {y:g}<br>{chart.values[j][i]:.0f} TFLOP/s, bound by {chart.categories[j][i]}" for i, x in enumerate(chart.x)]
        for j, y in enumerate(chart.y)
    ]  # fmt: skip
    data: list[dict[str, Any]] = [
        {"type": "heatmap", "x": list(chart.x), "y": list(chart.y), "z": [[index[name] for name in row] for row in chart.categories], "zmin": -0.5,
         "zmax": count - 0.5, "colorscale": scale, "showscale": False, "opacity": 0.55, "hoverinfo": "text", "text": hover},
    ]  # fmt: skip
    # Plotly spaces the levels of one trace evenly; a trace a level places them freely.
    data += [
        {"type": "contour", "x": list(chart.x), "y": list(chart.y), "z": [[_round(v) for v in row] for row in chart.values], "showscale": False,
         "contours": {"coloring": "none", "showlabels": True, "start": level, "end": level, "size": 1, "labelformat": ".0f", "labelfont": {"size": 12}},
         "line": {"width": 1.2}, "hoverinfo": "skip", "showlegend": False}
        for level in chart.levels
    ]  # fmt: skip
    data += [
        {
            "type": "scatter",
            "mode": "markers",
            "x": [None],
            "y": [None],
            "name": name,
            "marker": {"symbol": "square", "size": 12, "color": colours[i]},
            "hoverinfo": "skip",
        }
        for name, i in index.items()
    ]
    data.append(
        {"type": "scatter", "mode": "markers+text", "x": [d.x for d in chart.dots], "y": [d.y for d in chart.dots], "text": [d.text for d in chart.dots], "textposition": [("top center", "bottom center")[i % 2] for i in range(len(chart.dots))],
         "textfont": {"size": 13}, "marker": {"size": 11, "color": "#ffffff", "line": {"width": 2, "color": "#000000"}}, "showlegend": False, "hoverinfo": "text", "hovertext": [d.hover for d in chart.dots]}
    )  # fmt: skip
    layout = _layout(
        480, {"title": {"text": chart.x_title}, "type": "log", **_ticks_of(chart.x), "range": _edges(chart.x)},
        {"title": {"text": chart.y_title}, "type": "log", **_ticks_of(chart.y), "range": _edges(chart.y)}, True, False,
    )  # fmt: skip
    return {"data": data, "layout": layout}


def _edges(values: tuple[float, ...]) -> list[float]:
    return [log10(values[0]), log10(values[-1])]


def _ticks_of(values: tuple[float, ...]) -> dict[str, Any]:
    doubling, at = [], values[0]
    while at <= values[-1] * 1.001:
        doubling.append(at)
        at *= 2
    return {"tickvals": doubling, "ticktext": [f"{v:g}" for v in doubling]}
