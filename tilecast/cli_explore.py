"""Machines that do not exist: what-if, sensitivities, break-evens and the asymmetry map, from the command line."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from tilecast import options as opt

if TYPE_CHECKING:
    from tilecast.model.kernel.variant import Variant
    from tilecast.model.kernel.workload import Workload
    from tilecast.model.machine.machine import Machine

app = typer.Typer()

Set = Annotated[
    list[str] | None, typer.Option("--set", help="fact=value, e.g. mufu.ex2=32; repeat for more.", show_default=False)
]
Scale = Annotated[
    list[str] | None,
    typer.Option("--scale", help="fact=factor, or a section: smem=1.5 scales its rates; repeat for more."),
]


def _asked(
    machine: str, variant: str | None, set_: list[str] | None, scale: list[str] | None
) -> tuple[Machine, Variant | None, dict[str, float], dict[str, float]]:
    """The machine, the kernel before (None: the best) and the changes."""
    from tilecast.model.families import native_family, parse_variant
    from tilecast.model.machine.changes import parse_changes
    from tilecast.model.machine.machine import load_machine

    chip = load_machine(machine)
    changes, scales = parse_changes("--set", set_ or []), parse_changes("--scale", scale or [])
    knobs = parse_variant(variant, native_family(chip).variant()) if variant else None
    return chip, knobs, changes, scales


def _changed(chip: Machine, changes: dict[str, float], scales: dict[str, float]) -> Machine:
    """The machine with the changes, where a verb may do without any."""
    from tilecast.model.machine.changes import change_machine

    return change_machine(chip, changes, scales)[0] if changes or scales else chip


def _clock_word(clock: str) -> str:
    return clock if isinstance(opt.clock_value(clock), str) else f"{clock} MHz"


@app.command()
def whatif(
    machine: opt.MachineName,
    set_: Set = None,
    scale: Scale = None,
    batch: opt.Batch = None,
    heads: opt.Heads = None,
    heads_kv: opt.HeadsKv = None,
    seqlen: opt.Seqlen = None,
    seqlen_k: opt.SeqlenK = None,
    head_dim: opt.HeadDim = None,
    head_dim_v: opt.HeadDimV = None,
    causal: opt.Causal = None,
    window: opt.Window = None,
    dtype: opt.Dtype = None,
    preset: opt.PresetName = None,
    variant: opt.VariantText = None,
    family: Annotated[str | None, typer.Option("--family", help="Kernel family: fa4, fa3, fa2, unfused.")] = None,
    clock: opt.ClockText = "sustained",
    interval: Annotated[bool, typer.Option("--interval", help="Add the forecasts' intervals.")] = False,
    width: Annotated[int, typer.Option("--width", min=60, max=400, help="Columns of the timelines.")] = 120,
    as_json: opt.AsJson = False,
) -> None:
    """Change facts of a machine, choose the kernel again, and compare: time, binding unit, waterfall, timelines."""
    from tilecast.model.whatif.what_if import what_if

    (work,) = opt.workloads(
        batch=batch, heads=heads, heads_kv=heads_kv, seqlen=seqlen, seqlen_k=seqlen_k, head_dim=head_dim,
        head_dim_v=head_dim_v, causal=causal, window=window, dtype=dtype, preset=preset,
    )  # fmt: skip
    chip, knobs, changes, scales = _asked(machine, variant, set_, scale)
    found = what_if(
        work, chip, changes, scales, variant=knobs, family=family, clock=opt.clock_value(clock), interval=interval
    )
    typer.echo(json.dumps(found.to_dict(), indent=2) if as_json else found.text(width))


@app.command()
def sensitivity(
    machine: opt.MachineName,
    set_: Set = None,
    scale: Scale = None,
    batch: opt.Batch = None,
    heads: opt.Heads = None,
    heads_kv: opt.HeadsKv = None,
    seqlen: opt.Seqlen = None,
    seqlen_k: opt.SeqlenK = None,
    head_dim: opt.HeadDim = None,
    head_dim_v: opt.HeadDimV = None,
    causal: opt.Causal = None,
    window: opt.Window = None,
    dtype: opt.Dtype = None,
    preset: opt.PresetName = None,
    variant: opt.VariantText = None,
    clock: opt.ClockText = "sustained",
    step: Annotated[float, typer.Option("--step", help="How far each fact is moved, as a share.")] = 0.05,
    as_json: opt.AsJson = False,
) -> None:
    """Percent of time per percent of every fact, the kernel kept and chosen again, largest first."""
    from tilecast.explore_text import sensitivities_text
    from tilecast.model.whatif.sensitivity import sensitivities

    (work,) = opt.workloads(
        batch=batch, heads=heads, heads_kv=heads_kv, seqlen=seqlen, seqlen_k=seqlen_k, head_dim=head_dim,
        head_dim_v=head_dim_v, causal=causal, window=window, dtype=dtype, preset=preset,
    )  # fmt: skip
    chip, knobs, changes, scales = _asked(machine, variant, set_, scale)
    chip = _changed(chip, changes, scales)
    rows = sensitivities(work, chip, knobs, clock=opt.clock_value(clock), step=step)
    if as_json:
        typer.echo(json.dumps(_listing(chip, work, clock, "facts", [row.to_dict() for row in rows]), indent=2))
    else:
        typer.echo(sensitivities_text(rows, chip, work, _clock_word(clock)))


@app.command()
def breakeven(
    machine: opt.MachineName,
    fact: Annotated[
        list[str] | None, typer.Option("--fact", help="A rate or latency (default: the main rates); repeat for more.")
    ] = None,
    set_: Set = None,
    scale: Scale = None,
    batch: opt.Batch = None,
    heads: opt.Heads = None,
    heads_kv: opt.HeadsKv = None,
    seqlen: opt.Seqlen = None,
    seqlen_k: opt.SeqlenK = None,
    head_dim: opt.HeadDim = None,
    head_dim_v: opt.HeadDimV = None,
    causal: opt.Causal = None,
    window: opt.Window = None,
    dtype: opt.Dtype = None,
    preset: opt.PresetName = None,
    variant: opt.VariantText = None,
    clock: opt.ClockText = "sustained",
    as_json: opt.AsJson = False,
) -> None:
    """At which value of a fact does something else bind, and beyond which is more no use?"""
    from tilecast.explore_text import break_evens_text
    from tilecast.model.whatif.break_even import break_evens

    (work,) = opt.workloads(
        batch=batch, heads=heads, heads_kv=heads_kv, seqlen=seqlen, seqlen_k=seqlen_k, head_dim=head_dim,
        head_dim_v=head_dim_v, causal=causal, window=window, dtype=dtype, preset=preset,
    )  # fmt: skip
    chip, knobs, changes, scales = _asked(machine, variant, set_, scale)
    chip = _changed(chip, changes, scales)
    rows = break_evens(work, chip, knobs, facts=tuple(fact) if fact else None, clock=opt.clock_value(clock))
    if as_json:
        typer.echo(json.dumps(_listing(chip, work, clock, "facts", [row.to_dict() for row in rows]), indent=2))
    else:
        typer.echo(break_evens_text(rows, chip, work, _clock_word(clock)))


@app.command("map")
def asymmetry(
    machine: opt.MachineName,
    axes: Annotated[
        str | None, typer.Option("--axes", help="Two rates, 'x,y' (default: the dtype's matrix rate and mufu.ex2).")
    ] = None,
    grid: Annotated[int, typer.Option("--grid", help="Cells each way, odd.")] = 13,
    span: Annotated[float, typer.Option("--span", help="From value/SPAN to value*SPAN.")] = 4.0,
    show: Annotated[
        str | None, typer.Option("--show", help="Machines to place, comma between (default: H100 to Rubin).")
    ] = None,
    set_: Set = None,
    scale: Scale = None,
    batch: opt.Batch = None,
    heads: opt.Heads = None,
    heads_kv: opt.HeadsKv = None,
    seqlen: opt.Seqlen = None,
    seqlen_k: opt.SeqlenK = None,
    head_dim: opt.HeadDim = None,
    head_dim_v: opt.HeadDimV = None,
    causal: opt.Causal = None,
    window: opt.Window = None,
    dtype: opt.Dtype = None,
    preset: opt.PresetName = None,
    variant: opt.VariantText = None,
    clock: Annotated[
        str | None, typer.Option("--clock", help="One clock in MHz (default: the machine's own forecast), or a regime.")
    ] = None,
    output: Annotated[str | None, typer.Option("-o", "--output", help="Draw it to FILE.svg or FILE.png.")] = None,
    as_json: opt.AsJson = False,
) -> None:
    """Two rates along two axes: what binds and what is reached in every cell, with real GPUs placed on it."""
    from tilecast.base.files import OutputError, check_writable
    from tilecast.explore_text import map_text
    from tilecast.model.machine.machine import MachineError
    from tilecast.model.whatif.asymmetry import SHOWN, asymmetry_map

    (work,) = opt.workloads(
        batch=batch, heads=heads, heads_kv=heads_kv, seqlen=seqlen, seqlen_k=seqlen_k, head_dim=head_dim,
        head_dim_v=head_dim_v, causal=causal, window=window, dtype=dtype, preset=preset,
    )  # fmt: skip
    if output is not None and check_writable(output).suffix not in (".svg", ".png"):
        raise OutputError(f"-o: expected a name ending in .svg or .png, got '{output}'")
    pair = tuple(part.strip() for part in axes.split(",")) if axes else None
    if pair is not None and len(pair) != 2:
        raise MachineError(f"--axes: expected two facts with a comma between, got '{axes}'")
    chip, knobs, changes, scales = _asked(machine, variant, set_, scale)
    found = asymmetry_map(
        work, _changed(chip, changes, scales), axes=None if pair is None else (pair[0], pair[1]), grid=grid, span=span,
        clock=None if clock is None else opt.clock_value(clock), variant=knobs,
        shown=SHOWN if show is None else [part.strip() for part in show.split(",") if part.strip()],
    )  # fmt: skip
    if output is not None:
        from tilecast.map_picture import write_map

        write_map(found, output)
    typer.echo(json.dumps(found.to_dict(), indent=2) if as_json else map_text(found))


def _listing(chip: Machine, work: Workload, clock: str, name: str, rows: list[dict[str, object]]) -> dict[str, object]:
    return {"machine": chip.name, "workload": work.as_dict(), "clock": clock, name: rows}
