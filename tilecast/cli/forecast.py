"""Verbs that answer how fast a kernel will be, and why: predict, report, sweep, demand, schedule."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilecast.cli.step import BatchFile, Page
from tilecast.cli.training import Pass, PassOrBoth, asked, is_forward
from tilecast.cli.workload_options import (
    AsJson,
    Changes,
    Clock,
    Kernel,
    Level,
    LevelAtHand,
    Machines,
    NamedMachine,
    Shapes,
    takes_workload,
)
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine

if TYPE_CHECKING:
    from tilecast.explore.sweep.table import SweepTable
    from tilecast.model.forecast.predict import Prediction

app = typer.Typer()
_PANEL = "Forecast"


@app.command(rich_help_panel=_PANEL, epilog="Example: tilecast predict b200,h200 --preset llama3-8b --seqlen 8192")
@takes_workload
def predict(
    work: Shapes,
    machine: Machines,
    kernel: Kernel,
    clock: Clock,
    level: Level,
    measured: Annotated[
        str | None, typer.Option("--measured", help="Your own number (0.95ms, 950us, 600TFLOP/s): where it lies, and what explains it.")
    ] = None,
    as_json: AsJson = False,
    trace: Annotated[str | None, typer.Option("--trace", help="Write a Perfetto trace of one tile of every kernel to FILE.")] = None,
    batch_file: BatchFile = None,
    page: Page = 64,
    direction: PassOrBoth = "fwd",
) -> None:  # fmt: skip
    """Forecast time, TFLOP/s, what binds, and where the time goes; several machines (a,b,c) make one table."""
    from tilecast.base.files import check_writable, write_text_atomically
    from tilecast.cli.progress import Screen
    from tilecast.cli.tables import predictions_table, shape_name, show
    from tilecast.model.chip.evaluate import PredictError
    from tilecast.model.forecast.predict import predict as forecast
    from tilecast.model.whatif.placed import parse_measured, placed

    if not is_forward(direction, both=True):
        from tilecast.cli.training import predict_pass

        others = {"--measured": measured, "--batch-file": batch_file}
        predict_pass(direction, work, machine, kernel, clock, level, as_json, trace, others)
        return
    if batch_file is not None:
        _predict_batch(work, machine, clock, batch_file, page, as_json, {"--trace": trace, "--measured": measured})
        return
    if page != 64:
        raise PredictError(f"--page {page} goes with --batch-file, and none is given")
    one = len(work.works) == len(machine) == 1
    for option, value in (("--trace", trace), ("--measured", measured)):
        if value is not None and not one:
            raise PredictError(
                f"{option} goes with one shape and one machine, got {len(work.works) * len(machine)} forecasts"
            )
    if trace is not None:
        check_writable(trace)
    seconds = parse_measured(measured, work.works[0].flops) if measured is not None else None
    answers: list[Prediction | str] = []
    questions = [(chip, w) for chip in machine for w in work.works]
    with Screen() as screen:
        for done, (chip, w) in enumerate(questions):
            screen("forecast", done, len(questions), f"{chip.name} {w.label()}")
            try:
                family, variant = kernel.on(chip)
                answers.append(forecast(w, chip, variant, family=family, clock=clock.value, compiler=level.compiler()))
            except PredictError as error:
                # In a comparison of machines, one that cannot run the kernel is a line of the table.
                if len(machine) == 1:
                    raise
                answers.append(str(error))
    if all(isinstance(a, str) for a in answers):
        raise PredictError(str(answers[0]))
    first = answers[0]
    found = placed(first, seconds) if seconds is not None and not isinstance(first, str) else None
    if trace is not None and not isinstance(first, str):
        write_text_atomically(trace, first.trace_json())
    if work.listed or len(machine) > 1:
        names = [" ".join(filter(None, (chip.name if len(machine) > 1 else "", shape_name(w) if work.listed else "")))
                 for chip, w in questions]  # fmt: skip
        data = [{"machine": chip.name, "workload": w.as_dict(), "refused": a} if isinstance(a, str) else a.to_dict()
                for (chip, w), a in zip(questions, answers, strict=True)]  # fmt: skip
        head = "" if work.listed else f"{work.works[0].label()}, {clock.words()} clock\n\n"
        show(head + predictions_table(answers, names), data, as_json)
        return
    assert not isinstance(first, str)
    text, one_answer = first.text(), first.to_dict()
    if found is not None:
        text, one_answer = f"{text}\n\n{found.text()}", {**one_answer, "measured": found.to_dict()}
    show(text, one_answer, as_json)


@app.command(
    rich_help_panel=_PANEL,
    epilog="Example: tilecast report b200 --seqlen 8192 --causal --set mufu.ex2=32 -o review.html",
)
@takes_workload
def report(
    work: Workload,
    machine: NamedMachine,
    kernel: Kernel,
    changes: Changes,
    clock: Clock,
    level: LevelAtHand,
    output: Annotated[
        str, typer.Option("-o", "--output", help="FILE.html, or FILE.md with its charts beside it.")
    ] = "review.html",
    markdown: Annotated[
        str | None, typer.Option("--markdown", help="Also write the report as Markdown into this folder.")
    ] = None,
    measured: Annotated[
        str | None, typer.Option("--measured", help="Table of tilecast measure to compare with (default: the H200's).")
    ] = None,
    date: Annotated[
        str, typer.Option("--date", help="Date to print (default: none, so that the same input gives the same bytes).")
    ] = "",
    as_json: AsJson = False,
    direction: Pass = "fwd",
) -> None:
    """Write the design review: verdict, forecast, roofline, schedule, sensitivities, alternatives, accuracy, risks."""
    from tilecast.base.files import write_text_atomically
    from tilecast.cli.progress import Screen
    from tilecast.cli.tables import show
    from tilecast.explore.review.build import report as review
    from tilecast.explore.review.page.render import check_installed

    # Everything is checked before anything is computed, and everything computed before anything is written.
    target, folder = _review_targets(output, markdown)
    check_installed(page=target.suffix == ".html")
    of = asked(direction, kernel, work, machine.chip, level)
    with Screen() as screen:
        content = review(
            work, machine.chip, of.variant, family=of.family, clock=clock.value, changes=changes.values, scales=changes.factors,
            measured=measured, date=date, machine_name=machine.name, compiler=of.compiler, progress=screen,
            asked_pass=of.asked_pass,
        )  # fmt: skip
        screen("draw", 0, 1)
        files: dict[Path, str] = {target: content.page()} if target.suffix == ".html" else {}
        if folder is not None:
            files |= {folder / part: text for part, text in content.markdown(target.stem).items()}
        screen("draw", 1, 1)
    # The page or the text comes last: where it is, its charts are.
    for path, text in sorted(files.items(), key=lambda item: item[0].suffix != ".svg"):
        write_text_atomically(path, text)
    lines = [f"{path}: {_size(files, path)}" for path in files if path.suffix != ".svg"]
    show("\n".join([*content.verdict, *lines]), {**content.to_dict(), "files": [str(path) for path in files]}, as_json)


def _predict_batch(
    work: Shapes, machine: Machines, clock: Clock, file: str, page: int, as_json: bool, others: dict[str, str | None]
) -> None:
    """Attention of the sequences of a file, as the serving kernels run it."""
    from tilecast.cli.tables import show
    from tilecast.model.kernel.workload import WorkloadError
    from tilecast.model.step.batch import Batch, read_batch
    from tilecast.model.step.forecast import forecast_step

    clash = [name for name, value in {**others, "--shapes": "" if work.listed else None}.items() if value is not None]
    if clash:
        raise WorkloadError(f"--batch-file forecasts one layer's attention of a serving step: drop {clash[0]}")
    heads = replace(work.works[0], batch=1, seqlen_q=1, seqlen_k=1)
    batch = Batch(read_batch(file), heads if heads.mask != "none" else replace(heads, mask="causal"), page)
    answers = [forecast_step(batch, chip, clock=clock.value) for chip in machine]
    data = [answer.to_dict() for answer in answers]
    show("\n\n".join(answer.text() for answer in answers), data if len(data) > 1 else data[0], as_json)


def _review_targets(output: str, markdown: str | None) -> tuple[Path, Path | None]:
    """The file asked for and the folder of the Markdown twin, both known to be writable."""
    from tilecast.base.files import OutputError, check_writable

    target = Path(output)
    if target.suffix not in (".html", ".md"):
        raise OutputError(
            f"-o: expected a name that ends in .html (one page) or .md (Markdown with SVGs), got '{output}'"
        )
    if target.suffix == ".md" and markdown is not None:
        raise OutputError(
            f"--markdown {markdown}: {output} is Markdown already, with its charts beside it: give one of the two"
        )
    check_writable(target)
    if markdown is None:
        return target, target.parent if target.suffix == ".md" else None
    check_writable(Path(markdown) / f"{target.stem}.md")
    return target, Path(markdown)


def _size(files: dict[Path, str], path: Path) -> str:
    size = len(files[path].encode()) / 1e6
    if path.suffix == ".html":
        return f"{size:.2f} MB, opens offline"
    charts = [text for name, text in files.items() if name.suffix == ".svg"]
    return f"{size * 1e3:.0f} kB and {len(charts)} charts, {sum(len(c.encode()) for c in charts) / 1e3:.0f} kB"


@app.command(rich_help_panel=_PANEL, epilog="Example: tilecast sweep sweep.toml --export table.csv")
def sweep(
    spec: Annotated[str, typer.Argument(help="Specification (.toml): machines, workloads, variants, clocks.")],
    store: Annotated[
        str | None, typer.Option("--store", help="File that keeps results (default: SPEC's name with .db, here).")
    ] = None,
    export: Annotated[
        list[str] | None, typer.Option("--export", help="Write the table to FILE.csv, .json or .parquet.")
    ] = None,
    engine: Annotated[str, typer.Option("--engine", help="local (processes) or ray.")] = "local",
    workers: Annotated[
        int, typer.Option("--workers", min=0, max=4096, help="Processes or actors (0: one a core).")
    ] = 0,
    ray_address: Annotated[
        str | None, typer.Option("--ray-address", help="A running Ray cluster, or auto (default: a new one here).")
    ] = None,
    run: Annotated[bool, typer.Option("--run/--no-run", help="--no-run: show and export what the store has.")] = True,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Retry items whose worker process died or failed.")
    ] = False,
    level: Annotated[
        str | None, typer.Option("--level", help="fluid, auto or kept: in place of the specification's level.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compute machines x workloads x variants, or time kernels on this host's GPUs; an interrupted sweep is resumed."""
    from tilecast.base.files import write_bytes_atomically
    from tilecast.cli.progress import Screen
    from tilecast.explore.sweep.api import sweep as compute

    exports = _sweep_exports(export or [])
    kept = Path(store) if store is not None else Path(Path(spec).with_suffix(".db").name)
    try:
        with Screen() as screen:
            table = compute(
                spec, store=kept, engine=engine, workers=workers, ray_address=ray_address, run=run,
                retry_failed=retry_failed, level=level, progress=screen, command=command_line(),
            )  # fmt: skip
    except KeyboardInterrupt:
        print(f"tilecast: stopped: results so far are kept in {kept}; run the same command to go on", file=sys.stderr)
        raise
    lines = [table.text(), "", f"store: {kept}"]
    for name in exports:
        write_bytes_atomically(name, table.encoded(Path(name).suffix))
        lines.append(f"table: {name} ({len(table)} rows, {len(table.columns)} columns)")
    typer.echo(_sweep_json(table) if as_json else "\n".join(lines))
    raise typer.Exit(1 if table.count("failed") else 0)


def _sweep_exports(names: list[str]) -> list[str]:
    """The files to export to, refused before hours of work and not after."""
    from importlib.util import find_spec

    from tilecast.base.files import OutputError, check_writable
    from tilecast.explore.sweep.table import FORMATS

    for name in names:
        if Path(name).suffix not in FORMATS:
            raise OutputError(f"--export: expected a file ending in {', '.join(FORMATS)}, got '{name}'")
        check_writable(name)
        missing = [p for p in ("pandas", "pyarrow") if Path(name).suffix == ".parquet" and find_spec(p) is None]
        if missing:
            raise OutputError(f"--export: Parquet needs {missing[0]}: pip install 'tilecast[report]', or export .csv")
    return names


def _sweep_json(table: SweepTable) -> str:
    return table.encoded(".json").decode().rstrip("\n")


def command_line() -> str:
    """The command being run, for the records of what it makes."""
    return "tilecast " + " ".join(shlex.quote(argument) for argument in sys.argv[1:])


@app.command(rich_help_panel=_PANEL, epilog="Example: tilecast demand b200 --head-dim 128")
@takes_workload(machine="b200")
def demand(
    work: Workload,
    machine: Machine,
    tile_m: Annotated[
        int | None, typer.Option("--tile-m", min=1, max=4096, help="Query rows of a tile (default 128; of the backward pass the kernels' own).")
    ] = None,
    tile_n: Annotated[
        int | None, typer.Option("--tile-n", min=1, max=4096, help="Keys of a tile (default as for --tile-m).")
    ] = None,
    as_json: AsJson = False,
    direction: Pass = "fwd",
) -> None:  # fmt: skip
    """Closed forms: cycles per unit and tile, forward and backward, and HBM traffic fused and unfused."""
    from tilecast.cli.tables import show, width
    from tilecast.model.closed_forms import demand_dict, demand_report
    from tilecast.model.training.closed_forms import backward_demand_dict, backward_demand_report

    if is_forward(direction):
        m, n = tile_m or 128, tile_n or 128
        data: Any = demand_dict(machine, work, m, n) if as_json else None
        show("" if as_json else demand_report(machine, work, m, n, width()), data, as_json)
        return
    found = backward_demand_dict(machine, work, tile_m, tile_n)
    show("" if as_json else backward_demand_report(machine, work, found, width()), found, as_json)


@app.command(rich_help_panel=_PANEL, epilog="Example: tilecast schedule h200 --head-dim 128 --causal")
@takes_workload(machine="b200")
def schedule(
    work: Workload,
    machine: Machine,
    kernel: Kernel,
    clock: Clock,
    level: LevelAtHand,
    time_limit: Annotated[float, typer.Option("--time-limit", help="Solver seconds.")] = 10.0,
    as_json: AsJson = False,
    direction: Pass = "fwd",
) -> None:
    """Lower bounds and the proven-optimal modulo schedule of the kernel's loop (default: of the best kernel)."""
    from tilecast.cli.progress import Screen
    from tilecast.cli.tables import show, width
    from tilecast.model.chip.evaluate import PredictError
    from tilecast.model.schedule.report import schedule_kernel

    # Also refuses NaN, which compares with nothing.
    if not 0 < time_limit < float("inf"):
        raise PredictError(f"--time-limit: expected seconds above 0, got {time_limit:g}")
    if not is_forward(direction):
        from tilecast.cli.training import schedule_pass

        schedule_pass(work, machine, kernel, clock, level, time_limit, as_json)
        return
    family, variant = kernel.on(machine)
    with Screen() as screen:
        found = schedule_kernel(work, machine, variant, family, clock.value, time_limit, level.compiler(), screen)
    show("" if as_json else found.text(width()), found.to_dict() if as_json else None, as_json)
