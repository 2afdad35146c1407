"""Forecasts held against reality, from the command line."""

from __future__ import annotations

from typing import Annotated

import typer

from tilecast import options as opt

app = typer.Typer(no_args_is_help=True, help="Predictions against reality.")


@app.command("published")
def validate_published(
    as_json: opt.AsJson = False,
    rows: Annotated[bool, typer.Option("--rows", help="Print every row, not only the summaries.")] = False,
    picture: Annotated[
        str | None, typer.Option("--picture", help="Write the scatter plot to FILE.png or .svg.")
    ] = None,
    clock: Annotated[str, typer.Option("--clock", help="sustained or short.")] = "sustained",
) -> None:
    """Predicted against published for every forward row, and the cycle-level rows."""
    from tilecast.cmd_published import run

    typer.echo(run(as_json=as_json, rows=rows, picture=picture, clock=clock))


@app.command("measured")
def validate_measured(
    table: Annotated[str | None, typer.Argument(help="A table of tilecast measure (default: the H200's).")] = None,
    codes: Annotated[
        str | None, typer.Option("--code", help="Profiles of tilecast profile (default: the H200's).")
    ] = None,
    machine: Annotated[
        str | None, typer.Option("--machine", help="Machine name or file (default: the table's).")
    ] = None,
    as_json: opt.AsJson = False,
    rows: Annotated[bool, typer.Option("--rows", help="Print every row, worst first.")] = False,
    picture: Annotated[
        str | None, typer.Option("--picture", help="Write the scatter plot to FILE.png or .svg.")
    ] = None,
) -> None:
    """Predicted against measured cycles, kernel by kernel and shape by shape; needs no GPU."""
    from tilecast.cmd_measured import run

    typer.echo(run(table=table, codes=codes, machine=machine, as_json=as_json, rows=rows, picture=picture))


@app.command("counters")
def validate_counters(
    table: Annotated[str | None, typer.Argument(help="A table of hardware counters (default: the H200's).")] = None,
    codes: Annotated[
        str | None, typer.Option("--code", help="Profiles of tilecast profile (default: the H200's).")
    ] = None,
    as_json: opt.AsJson = False,
    rows: Annotated[bool, typer.Option("--rows", help="Print every kernel, not only disagreements.")] = False,
) -> None:
    """Busy share of every unit, predicted against hardware counters; the disagreements name the unit."""
    from pathlib import Path

    from tilecast.validation import counters as compare

    found = compare.load(Path(table) if table else compare.TABLE, Path(codes) if codes else compare.CODES)
    typer.echo(compare.report(found, as_json, rows))


@app.command("compare")
def validate_compare(
    bundle: Annotated[str, typer.Argument(help="A zip of tilecast bundle.")],
    machine: Annotated[
        str | None, typer.Option("--machine", help="Machine to hold it against (default: its own).")
    ] = None,
    as_json: opt.AsJson = False,
    rows: Annotated[bool, typer.Option("--rows", help="Print every point, worst first.")] = False,
) -> None:
    """A bundle's facts and measurements against the forecasts; needs no GPU."""
    from tilecast.cmd_bundle import run_compare

    typer.echo(run_compare(bundle=bundle, machine=machine, as_json=as_json, rows=rows))


@app.command("experiments")
def validate_experiments(
    as_json: opt.AsJson = False,
    rows: Annotated[bool, typer.Option("--rows", help="Print every row, worst first.")] = False,
    clock: Annotated[str, typer.Option("--clock", help="sustained or short.")] = "short",
) -> None:
    """GB200 to GB300, B200 to B300, H100 to H200: the what-if's ratio against the measured one."""
    import json

    from tilecast.cmd_published import CheckError
    from tilecast.validation.experiments.run import cycle_ratios, run_experiments
    from tilecast.validation.experiments.text import report_dict, report_text

    if clock not in ("sustained", "short"):
        raise CheckError(f"--clock: expected sustained or short, got '{clock}'")
    reports, cycles = run_experiments(clock), cycle_ratios()
    typer.echo(json.dumps(report_dict(reports, cycles), indent=2) if as_json else report_text(reports, cycles, rows))


@app.command("tuner")
def validate_tuner(
    table: Annotated[str | None, typer.Argument(help="A table of tilecast measure (default: the H200's).")] = None,
    codes: Annotated[
        str | None, typer.Option("--code", help="Profiles of tilecast profile (default: the H200's).")
    ] = None,
    machine: Annotated[
        str | None, typer.Option("--machine", help="Machine name or file (default: the table's).")
    ] = None,
    least: Annotated[int, typer.Option("--least", min=2, help="Only shapes with so many variants of a family.")] = 8,
    as_json: opt.AsJson = False,
    rows: Annotated[bool, typer.Option("--rows", help="Print every shape, worst first.")] = False,
) -> None:
    """What share of the exhaustive best a tuner reaches that times the first 1, 3 or 5; needs no GPU."""
    import json
    from pathlib import Path

    from tilecast.validation.measured import tuner as tuner_run
    from tilecast.validation.measured.run import CODES, TABLE

    found = tuner_run.run_tuner(Path(table) if table else TABLE, Path(codes) if codes else CODES, machine, least)
    typer.echo(json.dumps(tuner_run.report_dict(found), indent=2) if as_json else tuner_run.report_text(found, rows))
