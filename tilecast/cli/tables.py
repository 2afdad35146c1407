"""Tables and lines that fit the terminal."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import typer

from tilecast.base.words import fitted, significant

if TYPE_CHECKING:
    from tilecast.model.forecast.predict import Prediction
    from tilecast.model.kernel.workload import Workload
    from tilecast.model.machine.machine import Machine

#: Columns where the output is no terminal, so that what is written to files and documents is the same everywhere.
STABLE_WIDTH = 120


def width() -> int:
    """Columns to fill: the terminal's, or `STABLE_WIDTH` where stdout is none."""
    return max(60, shutil.get_terminal_size().columns) if sys.stdout.isatty() else STABLE_WIDTH


def show(text: str, data: object, as_json: bool) -> None:
    """Print ``data`` as JSON or ``text``, in a terminal in lines that fit."""
    if as_json:
        typer.echo(json.dumps(data, indent=2))
        return
    typer.echo(fitted(text, width()) if sys.stdout.isatty() else text)


def table(header: Sequence[str], rows: Sequence[Sequence[str]], columns: int | None = None) -> str:
    """Columns aligned, text left and numbers right, in ``columns`` characters (default: `width`): long texts wrap."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    out = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for i, name in enumerate(header):
        numeric = bool(rows) and all(_is_number(row[i]) for row in rows)
        out.add_column(name, justify="right" if numeric else "left", overflow="fold", no_wrap=numeric and len(name) < 8)
    for row in rows:
        out.add_row(*row)
    page = io.StringIO()
    Console(file=page, width=columns or width(), highlight=False, markup=False, emoji=False, color_system=None).print(
        out
    )
    return "\n".join(line.rstrip() for line in page.getvalue().rstrip().splitlines())


def _is_number(text: str) -> bool:
    try:
        float(text.rstrip("%x").replace(",", "") or "x")
    except ValueError:
        return text in ("", "-")
    return True


def shape_name(w: Workload) -> str:
    """A workload in one short column: dtype, mask, batch, heads, lengths, head dimensions."""
    heads = f"{w.heads_q}" if w.heads_q == w.heads_kv else f"{w.heads_q}/{w.heads_kv}"
    length = f"{w.seqlen_q}" if w.seqlen_q == w.seqlen_k else f"{w.seqlen_q}x{w.seqlen_k}"
    dims = f"{w.head_dim_qk}" if w.head_dim_qk == w.head_dim_v else f"{w.head_dim_qk}/{w.head_dim_v}"
    mask = {"none": "full", "causal": "causal"}.get(w.mask) or "window {},{}".format(*(w.window or ()))
    return f"{w.dtype} {mask} b{w.batch} h{heads} s{length} d{dims}"


def predictions_table(answers: Sequence[Prediction | str], names: Sequence[str]) -> str:
    """One line a forecast, under the name of its shape or machine; a text says why there is none."""
    rows = []
    for name, a in zip(names, answers, strict=True):
        if isinstance(a, str):
            rows.append([name, "-", "-", "-", "-", "-", a, "-"])
            continue
        low, high = a.tflops_interval
        rows.append(
            [name, f"{a.time_ms:.4g}", significant(a.tflops), f"{significant(low)}-{significant(high)}",
             f"{a.clock_mhz:.0f}", a.binding.name, a.pipeline.name,
             a.level]
        )  # fmt: skip
    header = ["", "time ms", "TFLOP/s", "interval", "MHz", "bound by", "kernel", "level"]
    # Where all are before compilation nothing is said.
    said = len(header) if any(not isinstance(a, str) and a.compiled is not None for a in answers) else -1
    return table(header[:said], [row[:said] for row in rows])


def machine_row(m: Machine) -> dict[str, Any]:
    """The numbers people compare, by the names that --json gives them."""
    peak = m["tensor.bf16_flop_per_clk"] * m["chip.sm_count"] * m["chip.clock_max_mhz"] / 1e6
    return {
        "name": m.name, "title": m.title, "arch": m.arch, "sm_count": m["chip.sm_count"],
        "clock_max_mhz": m["chip.clock_max_mhz"], "tdp_w": m["chip.tdp_w"],
        "bf16_flop_per_clk": m["tensor.bf16_flop_per_clk"],
        "fp8_flop_per_clk": m["tensor.fp8_flop_per_clk"] if m.has("tensor.fp8_flop_per_clk") else None,
        "ex2_per_clk": m["mufu.ex2_per_clk"], "bf16_tflops_at_max": peak, "hbm_tbps": m["hbm.tbps_achieved"],
    }  # fmt: skip


def machines_table(machines: Sequence[Machine]) -> str:
    """All shipped machines with the numbers people compare."""
    rows = []
    for m in machines:
        r = machine_row(m)
        rows.append(
            [r["name"], r["title"], r["arch"], f"{r['sm_count']:.0f}", f"{r['clock_max_mhz']:.0f}", f"{r['tdp_w']:.0f}",
             f"{r['bf16_flop_per_clk']:.0f}", "-" if r["fp8_flop_per_clk"] is None else f"{r['fp8_flop_per_clk']:.0f}",
             f"{r['ex2_per_clk']:.0f}", f"{r['bf16_tflops_at_max']:.0f}", f"{r['hbm_tbps']:.3g}"]
        )  # fmt: skip
    header = ["name", "machine", "arch", "SMs", "MHz max", "W", "bf16 FLOP/ clk/SM", "fp8", "ex2/ clk/SM",
              "bf16 TFLOP/s at max", "TB/s"]  # fmt: skip
    return table(header, rows)


def presets_table() -> str:
    """All presets."""
    from tilecast.model.kernel.presets import presets

    rows = [
        [p.name, str(p.heads_q), str(p.heads_kv), str(p.head_dim_qk), str(p.head_dim_v), str(p.seqlen),
         p.mask if p.window is None else f"window {p.window[0]},{p.window[1]}", p.source]
        for p in presets().values()
    ]  # fmt: skip
    return table(["preset", "heads", "kv", "d_qk", "d_v", "seqlen", "mask", "source"], rows)


def families() -> dict[str, dict[str, object]]:
    """Every family's aliases, what it is, and its knobs: their defaults, what they take and what they are."""
    from tilecast.cli.knob_words import MEANINGS
    from tilecast.model.families import FAMILIES, knob_takes

    out: dict[str, dict[str, object]] = {}
    for name, record in FAMILIES.items():
        default = record.variant()
        knobs = {f.name: getattr(default, f.name) for f in fields(default) if f.name != "family"}
        takes = {knob: knob_takes(name, knob, value) for knob, value in knobs.items()}
        meanings = {knob: MEANINGS[knob] for knob in knobs}
        out[name] = {
            "aliases": list(record.aliases), "about": record.about, "knobs": knobs, "takes": takes, "meanings": meanings,
        }  # fmt: skip
    return out


def variants_table(machine: Machine) -> str:
    """Every family with its knobs, their defaults, what they take and what they are; the machine's own family is marked."""
    from tilecast.model.families import native_family

    own = native_family(machine).name
    blocks = []
    for family, about in families().items():
        found: Any = about
        mark = f", the family of {machine.name}" if family == own else ""
        also = f" (also called {', '.join(found['aliases'])})" if found["aliases"] else ""
        rows = [
            [
                knob,
                str(value).lower() if isinstance(value, bool) else f"{value}",
                found["takes"][knob],
                found["meanings"][knob],
            ]
            for knob, value in found["knobs"].items()
        ]
        blocks.append(
            f"{family}{mark}: {found['about']}{also}\n" + table(["knob", "default", "takes", "what it is"], rows)
        )
    return "\n\n".join(blocks)
