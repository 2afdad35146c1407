"""The asymmetry map as a picture (SVG or PNG): cells by what binds, iso-performance lines, GPUs placed on it."""

from __future__ import annotations

import io
import math
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilecast.base.files import OutputError, check_writable, write_bytes_atomically

if TYPE_CHECKING:
    from tilecast.model.whatif.asymmetry import AsymmetryMap, MapPoint

#: Okabe and Ito's palette for the units that meet on a map, told apart with any colour vision; one hue a unit.
COLOURS = {
    "tensor": "#0072B2", "mufu": "#E69F00", "fma": "#009E73", "alu": "#CC79A7", "issue": "#D55E00", "smem": "#882255",
    "regs": "#F0E442", "cvt": "#8C6D31", "tmem_read": "#7B4173", "tmem_write": "#9C9EDE", "tma": "#637939",
    "HBM bandwidth": "#393B79", "L2 bandwidth": "#6B6ECF", "hand-over": "#999999", "power limit": "#AD494A",
    "kernel launch": "#525252", "start, fill and end of tiles": "#BDBDBD", "idle SMs": "#D9D9D9",
}  # fmt: skip
#: How much of the hue is left where a unit is most of the critical lap but not full.
_TINT = 0.42


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
    if levels:
        lines = axes.contour(found.x, found.y, found.tflops, levels=levels, colors="black", linewidths=0.9)
        for text in axes.clabel(lines, fmt=lambda v: f"{v:.0f}", fontsize=8):
            # A number under a marker is not readable, and its line has others.
            text.set_visible(not any(_close(text.get_position(), point, found) for point in found.points))
    if low < found.base_tflops < high:
        axes.contour(found.x, found.y, found.tflops, levels=[found.base_tflops], colors="black", linewidths=2.2)
    _place(axes, found)
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
    return figure


def _edges(ticks: tuple[float, ...]) -> list[float]:
    """Borders of geometric cells around ``ticks``."""
    half = (ticks[1] / ticks[0]) ** 0.5
    return [ticks[0] / half, *(tick * half for tick in ticks)]


def _close(spot: tuple[float, float], point: MapPoint, found: AsymmetryMap) -> bool:
    """Whether ``spot`` lies within a tenth of the map of the marker and its label."""
    across = math.log(spot[0] / point.x) / math.log(found.x[-1] / found.x[0])
    up = math.log(spot[1] / point.y) / math.log(found.y[-1] / found.y[0])
    return abs(across) < 0.08 and abs(up) < 0.06


def _place(axes: Any, found: AsymmetryMap) -> None:
    """GPUs as markers; those on one spot share a label."""
    spots: dict[tuple[float, float], list[MapPoint]] = {}
    for point in found.points:
        spots.setdefault((point.x, point.y), []).append(point)
    for (x, y), here in spots.items():
        axes.plot([x], [y], marker="o", markersize=8, markerfacecolor="white", markeredgecolor="black", zorder=5)
        high = y >= found.y[len(found.y) * 3 // 4]
        right = x >= found.x[len(found.x) * 3 // 4]
        axes.annotate(
            ", ".join(point.label for point in here), (x, y), textcoords="offset points",
            xytext=(-9 if right else 9, -15 if high else 8), ha="right" if right else "left", fontsize=9, fontweight="bold",
            bbox={"boxstyle": "round,pad=0.2", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}, zorder=6,
        )  # fmt: skip
