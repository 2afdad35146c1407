"""Verbs for machines that do not exist: what-if, sensitivities, break-evens and the asymmetry map."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tilecast.cli.training import Pass, asked, is_forward
from tilecast.cli.workload_options import AsJson, Changes, Clock, Kernel, Level, LevelAtHand, Shapes, takes_workload
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine

app = typer.Typer()
_PANEL = "What if"


@app.command(rich_help_panel=_PANEL, epilog="Example: tilecast whatif b200 --set mufu.ex2=32 --seqlen 8192")
@takes_workload
def whatif(
    work: Shapes,
    machine: Machine,
    kernel: Kernel,
    changes: Changes,
    clock: Clock,
    level: Level,
    interval: Annotated[bool, typer.Option("--interval", help="Add the forecasts' intervals.")] = False,
    columns: Annotated[
        int | None, typer.Option("--width", min=60, max=400, help="Columns of the text (default: the terminal's).")
    ] = None,
    as_json: AsJson = False,
    direction: Pass = "fwd",
) -> None:
    """Change facts of a machine, select the best kernel again, and compare: time, binding unit, waterfall, timelines."""
    from tilecast.cli.progress import Screen
    from tilecast.cli.tables import shape_name, show, table, width
    from tilecast.model.whatif.what_if import what_if

    if not is_forward(direction):
        from tilecast.cli.training import whatif_pass

        whatif_pass(work, machine, kernel, changes, clock, level, interval, as_json)
        return
    family, variant = kernel.on(machine)
    found = []
    with Screen() as screen:
        for done, w in enumerate(work.works):
            screen("what if", done, len(work.works), w.label())
            found.append(
                what_if(w, machine, changes.values, changes.factors, variant=variant, family=family, clock=clock.value,
                        interval=interval, compiler=level.compiler())
            )  # fmt: skip
    if not work.listed:
        show(found[0].text(columns or width()), found[0].to_dict(), as_json)
        return
    rows = [
        [shape_name(w.workload), f"{w.before.time_ms:.4g}", f"{w.after.time_ms:.4g}", f"{w.speedup:.3f}x",
         f"{w.speedup_kept:.3f}x" if w.kept is not None else "-", w.before.binding.name, w.after.binding.name]
        for w in found
    ]  # fmt: skip
    header = ["shape", "before ms", "after ms", "speed-up", "kernel kept", "bound by before", "after"]
    show(table(header, rows, columns), [w.to_dict() for w in found], as_json)


@app.command(rich_help_panel=_PANEL, epilog="Example: tilecast sensitivity b200 --seqlen 8192 --head-dim 128")
@takes_workload
def sensitivity(
    work: Workload,
    machine: Machine,
    kernel: Kernel,
    changes: Changes,
    clock: Clock,
    level: LevelAtHand,
    step: Annotated[float, typer.Option("--step", help="How far each fact is moved, as a share.")] = 0.05,
    as_json: AsJson = False,
    direction: Pass = "fwd",
) -> None:
    """Change of time, in percent, per percent of every fact, with the same kernel and with the best one; largest first."""
    from tilecast.cli.progress import Screen
    from tilecast.cli.tables import show, width
    from tilecast.model.whatif.sensitivity import sensitivities

    if not is_forward(direction):
        from tilecast.cli.training import sensitivity_pass

        sensitivity_pass(work, changes.of(machine), kernel, clock, level, step, as_json)
        return
    family, variant = kernel.on(machine)
    with Screen() as screen:
        rows = sensitivities(
            work,
            changes.of(machine),
            variant,
            family=family,
            clock=clock.value,
            step=step,
            compiler=level.compiler(),
            progress=screen,
        )
    show(rows.text(width()), rows.to_dict(), as_json)


@app.command(rich_help_panel=_PANEL, epilog="Example: tilecast breakeven b200 --fact mufu.ex2 --fact smem")
@takes_workload
def breakeven(
    work: Workload,
    machine: Machine,
    kernel: Kernel,
    changes: Changes,
    clock: Clock,
    level: LevelAtHand,
    fact: Annotated[
        list[str] | None, typer.Option("--fact", help="A rate or latency (default: the main rates); repeat for more.")
    ] = None,
    as_json: AsJson = False,
    direction: Pass = "fwd",
) -> None:
    """At which value of a fact does another unit bind, and from which value on does more of it no longer help?"""
    from tilecast.cli.progress import Screen
    from tilecast.cli.tables import show, width
    from tilecast.model.whatif.break_even import break_evens

    of = asked(direction, kernel, work, machine, level)
    with Screen() as screen:
        rows = break_evens(
            work, changes.of(machine), of.variant, facts=tuple(fact) if fact else None, family=of.family,
            clock=clock.value, compiler=of.compiler, progress=screen, asked_pass=of.asked_pass,
        )  # fmt: skip
    show(rows.text(width()), rows.to_dict(), as_json)


@app.command("map", rich_help_panel=_PANEL, epilog="Example: tilecast map b200 --dtype fp8 -o map.svg")
@takes_workload(clock=None)
def asymmetry(
    work: Workload,
    machine: Machine,
    kernel: Kernel,
    changes: Changes,
    clock: Clock,
    level: LevelAtHand,
    axes: Annotated[
        str | None, typer.Option("--axes", help="Two rates, 'x,y' (default: the dtype's matrix rate and mufu.ex2).")
    ] = None,
    grid: Annotated[int, typer.Option("--grid", help="Cells along each axis, an odd number.")] = 13,
    span: Annotated[float, typer.Option("--span", help="Range of each axis: from value/SPAN to value*SPAN.")] = 4.0,
    shown: Annotated[
        str | None, typer.Option("--show", help="Machines to mark, separated by commas (default: H100 to Rubin).")
    ] = None,
    output: Annotated[str | None, typer.Option("-o", "--output", help="Draw it to FILE.svg or FILE.png.")] = None,
    as_json: AsJson = False,
    direction: Pass = "fwd",
) -> None:
    """Map over two rates: what binds and the TFLOP/s reached in every cell, with real GPUs marked.

    Without --clock all cells use the clock of the machine's own sustained forecast.
    """
    from tilecast.cli.progress import Screen
    from tilecast.cli.tables import show, width
    from tilecast.explore.map_picture import check_picture, write_map
    from tilecast.model.machine.machine import MachineError
    from tilecast.model.whatif.asymmetry import SHOWN, asymmetry_map
    from tilecast.model.whatif.render_rows import map_text

    if output is not None:
        check_picture(output, "-o")
    pair: Any = tuple(part.strip() for part in axes.split(",")) if axes is not None else None
    if pair is not None and len(pair) != 2:
        raise MachineError(f"--axes: expected two facts with a comma between, got '{axes}'")
    names = None if shown is None else [part.strip() for part in shown.split(",") if part.strip()]
    if names == []:
        raise MachineError(f"--show: expected machines with commas between, got '{shown}'")
    of = asked(direction, kernel, work, machine, level)
    with Screen() as screen:
        found = asymmetry_map(
            work, changes.of(machine), axes=pair, grid=grid, span=span, clock=clock.value, variant=of.variant, family=of.family,
            shown=SHOWN if names is None else names,
            compiler=of.compiler, progress=screen, asked_pass=of.asked_pass,
        )  # fmt: skip
        if output is not None:
            write_map(found, output)
    show(map_text(found, width()), found.to_dict(), as_json)
