"""The asymmetry map as a picture (SVG or PNG): cells by what binds, iso-performance lines, GPUs placed on it."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilecast.base.files import OutputError, check_writable, write_bytes_atomically

if TYPE_CHECKING:
    from tilecast.model.whatif.asymmetry import AsymmetryMap

#: Okabe and Ito's palette for the units that meet on a map, told apart with any colour vision; one hue a unit.
COLOURS = {
    "tensor": "#0072B2", "mufu": "#E69F00", "fma": "#009E73", "alu": "#CC79A7", "issue": "#D55E00", "smem": "#882255",
    "regs": "#F0E442", "cvt": "#8C6D31", "tmem_read": "#7B4173", "tmem_write": "#9C9EDE", "tma": "#637939",
    "HBM bandwidth": "#393B79", "L2 bandwidth": "#6B6ECF", "hand-over": "#999999", "power limit": "#AD494A",
    "kernel launch": "#525252", "start, fill and end of tiles": "#BDBDBD", "idle SMs": "#D9D9D9",
}  # fmt: skip
#: How much of the hue is left where a unit is most of the critical lap but not full.
_TINT = 0.42
#: Where a name may stand beside its marker, the best first: points to the right and up, and which of its ends is there.
_SIDES = ((9, 8, "left"), (9, -15, "left"), (-9, 8, "right"), (-9, -15, "right"), (0, 14, "center"), (0, -22, "center"))
#: Pixels that a number or a marker takes to each side, and parts of a straight piece of a line where a number may stand.
_ROOM = 18.0
_PARTS = 8


def check_picture(path: str | Path, option: str) -> Path:
    """The path, if a picture can be drawn and written there; OutputError in ``option``'s name otherwise."""
    if Path(path).suffix not in (".svg", ".png"):
        raise OutputError(f"{option}: expected a name ending in .svg or .png, got '{path}'")
    if find_spec("matplotlib") is None:
        raise OutputError(f"{option} {path}: drawing needs matplotlib: pip install 'tilecast[report]'")
    return check_writable(path)


def write_map(found: AsymmetryMap, path: str | Path) -> None:
    """Draw ``found`` to a name ending in .svg or .png, whole or not at all; OutputError on anything else."""
    target = check_picture(path, "-o")
    import matplotlib

    matplotlib.use("Agg")
    # Text stays text, and one input gives one file.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "tilecast", "font.size": 10})
    import matplotlib.pyplot as plt

    figure, picture = draw(found), io.BytesIO()
    try:
        figure.savefig(
            picture, format=target.suffix[1:], dpi=150, metadata={"Date": None} if target.suffix == ".svg" else None
        )
    finally:
        plt.close(figure)
    write_bytes_atomically(target, picture.getvalue())


def cell_style(bound_by: str, lap: str) -> tuple[str, str]:
    """(label, colour) of a cell: the unit's hue where it is full, its tint where it leads the critical lap."""
    if bound_by != "recurrence":
        return f"{bound_by} full", COLOURS.get(bound_by, "#999999")
    lap = lap or "hand-over"  # a loop that never repeats has no critical lap
    return f"recurrence, mostly {lap}", _tint(COLOURS.get(lap, "#999999"))


def _tint(colour: str) -> str:
    channels = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(255 - (255 - c) * _TINT):02x}" for c in channels)


def draw(found: AsymmetryMap) -> Any:
    """The matplotlib figure."""
    import matplotlib.pyplot as plt
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    styles = [
        [cell_style(b, lap) for b, lap in zip(*rows, strict=True)]
        for rows in zip(found.bound_by, found.lap, strict=True)
    ]
    known = list(dict.fromkeys(style for row in styles for style in row))
    figure, axes = plt.subplots(figsize=(9.0, 6.4), layout="constrained")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    index = [[known.index(style) for style in row] for row in styles]
    axes.pcolormesh(
        _edges(found.x), _edges(found.y), index, cmap=ListedColormap([colour for _, colour in known]), vmin=-0.5,
        vmax=len(known) - 0.5, edgecolors="white", linewidth=0.3,
    )  # fmt: skip
    low, high = min(map(min, found.tflops)), max(map(max, found.tflops))
    levels = [v for v in found.levels if low < v < high and abs(v / found.base_tflops - 1) > 1e-6]
    lines = (
        axes.contour(found.x, found.y, found.tflops, levels=levels, colors="black", linewidths=0.9) if levels else None
    )
    if low < found.base_tflops < high:
        axes.contour(found.x, found.y, found.tflops, levels=[found.base_tflops], colors="black", linewidths=2.2)
    axes.set_xlabel(f"{found.x_fact}  ({found.x_unit})")
    axes.set_ylabel(f"{found.y_fact}  ({found.y_unit})")
    axes.set_title(
        f"What binds as two rates scale: {found.workload.label()}\nall else as {found.machine}, {found.clock_mhz:.0f} MHz{found.level_note}; "
        f"lines: equal TFLOP/s (thick: {found.base_tflops:.0f}, as {found.machine})", fontsize=10,
    )  # fmt: skip
    for axis, ticks in ((axes.xaxis, found.x), (axes.yaxis, found.y)):
        chosen = ticks[:: max(1, len(ticks) // 6)]
        axis.set_ticks(list(chosen), [f"{tick:.0f}" if tick >= 10 else f"{tick:.3g}" for tick in chosen])
        axis.minorticks_off()
    figure.legend(
        handles=[Patch(color=colour, label=label) for label, colour in known], loc="outside lower center",
        ncols=min(3, len(known)), frameon=False, fontsize=9,
    )  # fmt: skip
    spots: dict[tuple[float, float], list[str]] = {}
    for point in found.points:
        spots.setdefault((point.x, point.y), []).append(point.label)
    mark_points(axes, {spot: ", ".join(labels) for spot, labels in spots.items()}, lines)
    return figure


def _edges(ticks: tuple[float, ...]) -> list[float]:
    """Borders of geometric cells around ``ticks``."""
    half = (ticks[1] / ticks[0]) ** 0.5
    return [ticks[0] / half, *(tick * half for tick in ticks)]


def mark_points(axes: Any, points: Mapping[tuple[float, float], str], lines: Any) -> None:
    """Markers at ``points`` with their names, and numbers on ``lines`` (a contour set, or None), none of them over another.

    For a figure that is otherwise done: where things lie decides on which side of its marker a name stands, and which numbers are left out.
    """
    figure = axes.figure
    for x, y in points:
        axes.plot([x], [y], marker="o", markersize=8, markerfacecolor="white", markeredgecolor="black", zorder=5)
    figure.draw_without_rendering()
    taken = [_around(axes.transData.transform(point)) for point in points]
    for (x, y), name in points.items():
        placed = [
            axes.annotate(
                name, (x, y), textcoords="offset points", xytext=(right, up), ha=side, fontsize=9, fontweight="bold",
                bbox={"boxstyle": "round,pad=0.2", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}, zorder=6,
            )
            for right, up, side in _SIDES
        ]  # fmt: skip
        covers = [_covered(text.get_window_extent(), taken, axes.bbox) for text in placed]
        kept = placed[covers.index(min(covers))]
        for text in placed:
            if text is not kept:
                text.remove()
        taken.append(kept.get_window_extent().padded(4))
    if lines is not None:
        _number(axes, lines, taken)


def _number(axes: Any, lines: Any, taken: Sequence[Any]) -> None:
    """The value of each line on the middlemost of its places that nothing else covers."""
    places = []
    for path in lines.get_paths():
        corners = [corner for polygon in path.to_polygons(closed_only=False) for corner in _between(polygon)]
        pixels = axes.transData.transform(corners) if corners else []
        free = [
            corner
            for corner, pixel in zip(corners, pixels, strict=True)
            if axes.bbox.padded(-_ROOM).contains(*pixel) and not any(box.overlaps(_around(pixel)) for box in taken)
        ]
        if free:
            places.append(free[len(free) // 2])
    if places:
        axes.clabel(lines, fmt=lambda v: f"{v:.0f}", fontsize=8, manual=places)


def _between(corners: Any) -> Iterator[tuple[float, float]]:
    """Points along a line: those of ``corners`` are few."""
    for (x, y), (to_x, to_y) in pairwise(corners):
        for part in range(_PARTS):
            yield x + (to_x - x) * part / _PARTS, y + (to_y - y) * part / _PARTS


def _around(pixel: Any) -> Any:
    """A box about a point that a number of four digits or a marker takes."""
    from matplotlib.transforms import Bbox

    return Bbox.from_bounds(pixel[0] - _ROOM, pixel[1] - _ROOM, 2 * _ROOM, 2 * _ROOM)


def _covered(box: Any, taken: Sequence[Any], whole: Any) -> float:
    """Area of ``box`` that lies over others or outside of ``whole``."""
    from matplotlib.transforms import Bbox

    def shared(other: Any) -> float:
        common = Bbox.intersection(box, other)
        return common.width * common.height if common is not None else 0.0

    covered: float = sum(map(shared, taken)) + box.width * box.height - shared(whole)
    return covered
