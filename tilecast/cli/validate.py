"""Forecasts held against reality, from the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tilecast.cli.workload_options import AsJson

app = typer.Typer(
    no_args_is_help=True,
    help="Compare forecasts with reality: published tables, measurements, counters, pairs of similar GPUs.",
    epilog="Example: tilecast validate published --clock short",
)
_Table = Annotated[str | None, typer.Argument(help="A table of tilecast measure (default: the H200's).")]
_Codes = Annotated[str | None, typer.Option("--code", help="Profiles of tilecast profile (default: the H200's).")]
_Machine = Annotated[str | None, typer.Option("--machine", help="Machine name or file (default: the table's).")]
_Picture = Annotated[str | None, typer.Option("--picture", help="Write the scatter plot to FILE.png or .svg.")]
_Rows = Annotated[bool, typer.Option("--rows", help="Print every row, worst first, not only the summaries.")]
_Regime = Annotated[str, typer.Option("--clock", help="sustained or short.")]


class CheckError(ValueError):
    """A wrong option of a validation verb; one sentence."""


def _check_picture(picture: str | None) -> None:
    """Refuse before minutes of work what could not be drawn or written after them."""
    from tilecast.explore.map_picture import check_picture

    if picture is not None:
        check_picture(picture, "--picture")


def _check_regime(clock: str, *, run: bool = False) -> None:
    if clock not in ("sustained", "short", *(["run"] if run else [])):
        expected = "sustained, short or run" if run else "sustained or short"
        raise CheckError(f"--clock: expected {expected}, got '{clock}'")


@app.command("published", epilog="Example: tilecast validate published --clock short")
def validate_published(
    table: Annotated[str | None, typer.Argument(help="A table of published points (default: ours).")] = None,
    as_json: AsJson = False, rows: _Rows = False, picture: _Picture = None,
    clock: Annotated[str, typer.Option("--clock", help="run: by how long a row's harness keeps launching; or its bounds, short and sustained.")] = "run",
    interval: Annotated[bool, typer.Option("--interval", help="Count how often the interval contains the measurement.")] = False,
) -> None:  # fmt: skip
    """Predicted against published for every forward row, and the cycle-level rows."""
    from tilecast.cli.progress import Screen
    from tilecast.cli.tables import show
    from tilecast.validation.published.harness import CLOCKS
    from tilecast.validation.published.run import default_predictor, interval_predictor, run_regimes
    from tilecast.validation.published.text import report_dict, report_text, write_scatter

    _check_regime(clock, run=True)
    _check_picture(picture)
    with Screen() as screen:
        report, *others = run_regimes(
            (clock,) if as_json else (clock, *(one for one in CLOCKS if one != clock)), interval_predictor if interval else default_predictor,
            progress=screen, table=Path(table) if table else None,
        )  # fmt: skip
        if picture is not None:
            write_scatter(report, picture)
        text = "" if as_json else report_text(report, rows, *others)
    show(text, report_dict(report) if as_json else None, as_json)


@app.command("measured", epilog="Example: tilecast validate measured mytable.csv --machine mygpu.toml")
def validate_measured(
    table: _Table = None, codes: _Codes = None, machine: _Machine = None, as_json: AsJson = False, rows: _Rows = False,
    picture: _Picture = None,
    kept: Annotated[bool, typer.Option("--kept", help="Forecast from stored loops (--level kept), not from profiles.")] = False,
) -> None:  # fmt: skip
    """Predicted against measured cycles, kernel by kernel and shape by shape; needs no GPU."""
    from tilecast.cli.progress import Screen
    from tilecast.cli.tables import show
    from tilecast.validation.lab.measure.records import RecordError
    from tilecast.validation.measured.run import CODES, SUSTAINED, TABLE, run_measured
    from tilecast.validation.measured.text import report_dict, report_text, write_scatter

    _check_picture(picture)
    if kept and codes is not None:
        raise RecordError(f"--kept takes the loops at hand and --code {codes} profiles: give one of the two")
    with Screen() as screen:
        report = run_measured(
            Path(table) if table else TABLE,
            Path(codes) if codes else CODES,
            machine,
            None if table else SUSTAINED,
            kept,
            screen,
        )
    if picture is not None:
        write_scatter(report, picture)
    show("" if as_json else report_text(report, rows), report_dict(report) if as_json else None, as_json)


@app.command(
    "ablations", epilog="Example: tilecast validate ablations mytable.csv --code codes.txt --picture pairs.svg"
)
def validate_ablations(
    table: _Table = None, codes: _Codes = None, machine: _Machine = None, as_json: AsJson = False,
    rows: Annotated[bool, typer.Option("--rows", help="Print every shape and pair, largest effects first.")] = False,
    picture: _Picture = None,
    clock: Annotated[str, typer.Option("--clock", help="Of the published cases: sustained or short.")] = "short",
) -> None:  # fmt: skip
    """What one change is worth, forecast against measured: kernels that differ in one knob, and published ablations."""
    from tilecast.cli.progress import Screen
    from tilecast.cli.tables import show
    from tilecast.validation.ablations.run import run_ablations
    from tilecast.validation.ablations.text import report_dict, report_text, write_picture
    from tilecast.validation.measured.run import CODES

    _check_regime(clock)
    _check_picture(picture)
    with Screen() as screen:
        report = run_ablations(
            Path(table) if table else None, Path(codes) if codes else CODES, machine, clock, progress=screen
        )
    if picture is not None:
        write_picture(report, picture)
    show("" if as_json else report_text(report, rows), report_dict(report) if as_json else None, as_json)


@app.command("foreign", epilog="Example: tilecast validate foreign --json")
def validate_foreign(
    table: Annotated[str | None, typer.Argument(help="A table of launches (default: the H200's).")] = None,
    loops: Annotated[str | None, typer.Option("--loops", help="The kernels' loops (default: the H200's).")] = None,
    machine: Annotated[str, typer.Option("--machine", help="Machine name or file.")] = "h200-sxm",
    as_json: AsJson = False,
) -> None:
    """Kernels that are not ours, forecast from their machine code, against their cycles and busy units as counted."""
    from tilecast.cli.progress import Screen
    from tilecast.cli.tables import show
    from tilecast.validation.foreign.run import LOOPS, TABLE, run_foreign
    from tilecast.validation.foreign.text import report_dict, report_text

    with Screen() as screen:
        screen("forecast", 0, 0, "loops")
        found = run_foreign(Path(table) if table else TABLE, Path(loops) if loops else LOOPS, machine)
    show(report_text(found, machine), report_dict(found, machine), as_json)


@app.command("counters", epilog="Example: tilecast validate counters --rows")
def validate_counters(
    table: Annotated[str | None, typer.Argument(help="A table of hardware counters (default: the H200's).")] = None,
    codes: _Codes = None,
    as_json: AsJson = False,
    rows: _Rows = False,
) -> None:
    """Busy share of every unit, predicted against hardware counters; says which units disagree."""
    from tilecast.cli.progress import Screen
    from tilecast.cli.tables import show
    from tilecast.validation import counters as compare

    with Screen() as screen:
        found = compare.load(Path(table) if table else compare.TABLE, Path(codes) if codes else compare.CODES, screen)
    show(compare.report_text(found, rows), compare.report_dict(found), as_json)


@app.command("compare", epilog="Example: tilecast validate compare mygpu.zip")
def validate_compare(
    bundle: Annotated[str, typer.Argument(help="A zip of tilecast bundle.")],
    machine: Annotated[
        str | None, typer.Option("--machine", help="Machine to compare with (default: its own).")
    ] = None,
    as_json: AsJson = False,
    rows: _Rows = False,
) -> None:
    """A bundle's facts and measurements against the forecasts; needs no GPU."""
    from tilecast.cli.progress import Screen
    from tilecast.cli.tables import show
    from tilecast.validation.bundle.compare import compare
    from tilecast.validation.bundle.text import report_dict, report_text
    from tilecast.validation.lab.bundle.archive import read_bundle

    with Screen() as screen:
        screen("compare", 0, 0, bundle)
        report = compare(read_bundle(Path(bundle)), machine)
    show("" if as_json else report_text(report, rows), report_dict(report) if as_json else None, as_json)


@app.command("serving", epilog="Example: tilecast validate serving --rows")
def validate_serving(
    table: Annotated[str | None, typer.Argument(help="A table of tools/time_batches.py (default: the H200's).")] = None,
    machine: _Machine = None,
    as_json: AsJson = False,
    rows: _Rows = False,
) -> None:
    """Serving steps: predicted against measured times, and the split that the forecast would choose; needs no GPU."""
    from tilecast.cli.progress import Screen
    from tilecast.cli.tables import show
    from tilecast.validation.measured.serving import TABLE, as_dict, as_text, run_serving

    with Screen() as screen:
        report = run_serving(Path(table) if table else TABLE, machine, screen)
    show("" if as_json else as_text(report, rows), as_dict(report) if as_json else None, as_json)


@app.command("backward", epilog="Example: tilecast validate backward --rows")
def validate_backward(as_json: AsJson = False, rows: _Rows = False) -> None:
    """Backward passes: ours as timed on an H200, whole and loop by loop, and the fastest published kernel of each shape."""
    from tilecast.cli.progress import Screen
    from tilecast.cli.tables import show
    from tilecast.validation.measured.backward import run_backward
    from tilecast.validation.measured.backward_text import as_dict, as_text
    from tilecast.validation.published.backward import run_published_backward

    with Screen() as screen:
        report = run_backward(progress=screen)
        published = {clock: run_published_backward(clock, screen) for clock in ("short", "sustained")}
    show("" if as_json else as_text(report, published, rows), as_dict(report, published) if as_json else None, as_json)


@app.command("experiments", epilog="Example: tilecast validate experiments --clock sustained")
def validate_experiments(as_json: AsJson = False, rows: _Rows = False, clock: _Regime = "short") -> None:
    """GB200 to GB300, B200 to B300, H100 to H200: the what-if's ratio against the measured one."""
    from tilecast.cli.progress import Screen
    from tilecast.cli.tables import show
    from tilecast.validation.experiments.run import cycle_ratios, run_experiments
    from tilecast.validation.experiments.text import report_dict, report_text

    _check_regime(clock)
    with Screen() as screen:
        reports, cycles = run_experiments(clock, progress=screen), cycle_ratios()
    show(report_text(reports, cycles, rows), report_dict(reports, cycles) if as_json else None, as_json)


@app.command("tuner", epilog="Example: tilecast validate tuner --rows")
def validate_tuner(
    table: _Table = None,
    codes: _Codes = None,
    machine: _Machine = None,
    least: Annotated[
        int, typer.Option("--least", min=2, help="Only shapes with at least so many variants of a family.")
    ] = 8,
    as_json: AsJson = False,
    rows: _Rows = False,
) -> None:
    """Speed of the tuner's first 1, 3 or 5 candidates, as a share of the best of all variants; needs no GPU."""
    from tilecast.cli.progress import Screen
    from tilecast.cli.tables import show
    from tilecast.validation.measured import tuner as tuner_run
    from tilecast.validation.measured.run import CODES, TABLE

    with Screen() as screen:
        found = tuner_run.run_tuner(
            Path(table) if table else TABLE, Path(codes) if codes else CODES, machine, least, progress=screen
        )
    show(tuner_run.report_text(found, rows), tuner_run.report_dict(found), as_json)


@app.command("gemm", epilog="Example: tilecast validate gemm")
def validate_gemm(table: _Table = None, machine: _Machine = None, as_json: AsJson = False) -> None:
    """Forecasts of GEMM kernels against measured ones; needs no GPU."""
    from tilecast.cli.progress import Screen
    from tilecast.cli.tables import show
    from tilecast.validation.measured import gemm

    with Screen() as screen:
        found = gemm.run_gemm(Path(table) if table else gemm.TABLE, machine, progress=screen)
    show(gemm.report_text(found), gemm.report_dict(found) if as_json else None, as_json)
