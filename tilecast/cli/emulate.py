"""The verb emulate: a Gluon kernel on the CPU."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilecast.cli.workload_options import AsJson, in_options

if TYPE_CHECKING:
    from tilecast.codegen.compiler.complaints import Complaint

app = typer.Typer()


@app.command(
    rich_help_panel="Kernels",
    epilog="Example: tilecast emulate hopper_ws_d64_full",
)
def emulate(
    file: Annotated[
        str,
        typer.Argument(help="A generated Gluon kernel or the name of a shipped one; with --call or --main any file."),
    ],
    call: Annotated[
        str | None,
        typer.Option("--call", help="Evaluate this in any author's FILE with launches emulated, as in 'test_add(64)'."),
    ] = None,
    main: Annotated[
        bool, typer.Option("--main", help="Run any author's FILE as a script with launches emulated.")
    ] = False,
    whole: Annotated[
        bool,
        typer.Option(
            "--whole", help="With --call: print all that it returns, not just shape, type and range of its tensors."
        ),
    ] = False,
    largest: Annotated[
        str | None,
        typer.Option(
            "--largest",
            help="With --call or --main: numbers a kernel must take, as in 'M=65536,N=8192'; no 32-bit integer may overflow below.",
        ),
    ] = None,
    machine: Annotated[
        str | None, typer.Option("--machine", help="Machine name or file (default: the kernel's own).")
    ] = None,
    batch: Annotated[int | None, typer.Option("--batch", help="Sequences (default 1).")] = None,
    heads: Annotated[int | None, typer.Option("--heads", help="Query heads (default 1).")] = None,
    heads_kv: Annotated[int | None, typer.Option("--heads-kv", help="Key/value heads (default: as --heads).")] = None,
    seqlen: Annotated[int | None, typer.Option("--seqlen", help="Query length (default 512).")] = None,
    seqlen_k: Annotated[int | None, typer.Option("--seqlen-k", help="Key length (default: as --seqlen).")] = None,
    window: Annotated[str | None, typer.Option("--window", help="Sliding window 'left,right' (or 'left').")] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="bf16 or fp16 (default: the kernel's own).")] = None,
    mode: Annotated[
        str | None,
        typer.Option(
            "--mode",
            help="When asynchronous operations take effect. late (default): as late as possible; random: at any legal moment.",
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", min=0, help="Seed of the inputs and of --mode random (default 0).")
    ] = None,
    sms: Annotated[
        int | None,
        typer.Option("--sms", help="Number of SMs to pretend: with few, persistent programs run several tiles."),
    ] = None,
    trace: Annotated[str | None, typer.Option("--trace", help="Write the timeline to FILE (ui.perfetto.dev).")] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="One problem instead of the battery (six for kernels other than 16-bit forward passes)."
        ),
    ] = False,
    case: Annotated[
        str | None, typer.Option("--case", help="Only the problems of the battery whose label contains this.")
    ] = None,
    keep_going: Annotated[bool, typer.Option("--keep-going", help="Continue after a problem with findings.")] = False,
    superfluous: Annotated[
        bool,
        typer.Option(
            "--superfluous", help="After the battery, remove one wait at a time and report those that are not needed."
        ),
    ] = False,
    routes: Annotated[
        bool,
        typer.Option(
            "--routes",
            help="Only the time of one tile, by three models: its source, the pipeline simulation, its machine code.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run a Gluon kernel on the CPU: correctness, races, deadlocks, what was not reached.

    A generated kernel gets a battery of problems.  Options that describe a problem, or --quick, run one, with cycles of
    the executed source.
    """
    from tilecast.emulator.call import need_packages

    # Before anything loads numpy.
    need_packages()
    from tilecast.base.files import check_writable
    from tilecast.cli.progress import Screen
    from tilecast.cli.tables import show
    from tilecast.emulator.report import is_forward, kernel_workload, run_emulate
    from tilecast.model.kernel.workload import WorkloadError

    shape = (batch, heads, heads_kv, seqlen, seqlen_k, window, dtype, trace)
    one_problem = quick or any(option is not None for option in (*shape, mode, seed, sms))
    of_battery = case is not None or keep_going or superfluous
    _check_together(one_problem, of_battery, call is not None, main, whole, largest is not None, routes)
    if routes:
        _routes(file, machine, as_json)
        return
    if call is not None or main:
        _emulate_any(
            file,
            call,
            machine,
            mode or "late",
            seed or 0,
            sms,
            shape[:-1],
            trace,
            whole,
            largest,
            as_json,
        )
        return
    alone = quick and sum(option is not None for option in (*shape, mode, seed, sms)) == 0
    if not one_problem or (alone and not is_forward(file)):
        _battery(file, machine, case, keep_going, superfluous, quick, as_json)
        return
    mode, seed = mode or "late", seed or 0
    if trace is not None:
        check_writable(trace)
    try:
        work, limits = kernel_workload(file, batch, heads, heads_kv, seqlen, seqlen_k, window, dtype)
    except WorkloadError as error:
        raise WorkloadError(in_options(str(error))) from None
    with Screen() as screen:
        screen("emulate", 0, 0, work.label())
        found = run_emulate(file, work, machine, limits, mode, seed, sms, trace)
    figures = {f.name: getattr(found, f.name) for f in dataclasses.fields(found) if f.name != "text"}
    show(found.text, {"file": file, "workload": work.as_dict(), "mode": mode, "seed": seed, **figures}, as_json)
    if not found.right:
        raise typer.Exit(1)


def _check_together(
    one_problem: bool, of_battery: bool, call: bool, main: bool, whole: bool, largest: bool, routes: bool
) -> None:
    """Refuse options that do not go together, by which of them were given."""
    if of_battery and (one_problem or call or main):
        raise typer.BadParameter(
            "--case, --keep-going and --superfluous are for the battery: without --quick and without a problem"
        )
    if call and main:
        raise typer.BadParameter("--call evaluates an expression and --main runs the whole script: give one of the two")
    if whole and not call:
        raise typer.BadParameter("--whole is about what --call returns", param_hint="'--whole'")
    if largest and not call and not main:
        raise typer.BadParameter(
            "--largest is about any author's kernels: with --call or --main", param_hint="'--largest'"
        )
    if routes and (one_problem or of_battery or call or main):
        raise typer.BadParameter(
            "--routes takes a tile of its own: only --machine goes with it", param_hint="'--routes'"
        )


def _routes(file: str, machine: str | None, as_json: bool) -> None:
    """emulate --routes: a tile by its source, by the pipeline and by its machine code."""
    from tilecast.cli.tables import show
    from tilecast.codegen.compiler.kept import compiled_variant
    from tilecast.emulator.routes import as_text, by_all_routes
    from tilecast.emulator.run import kernel_path
    from tilecast.model.compiled.loops.shelf import loop_at_hand

    found = by_all_routes(
        str(kernel_path(file)), machine,
        lambda work, chip, variant: loop_at_hand(work, chip, variant) or compiled_variant(work, chip, variant),
    )  # fmt: skip
    show(as_text(file, found), {"file": file, **found.as_dict()}, as_json)


def _battery(
    file: str, machine: str | None, case: str | None, keep_going: bool, superfluous: bool, quick: bool, as_json: bool
) -> None:
    """emulate without a problem: all of the battery, or (``quick``) its first problems."""
    from tilecast.cli.progress import Screen
    from tilecast.cli.tables import show
    from tilecast.codegen.compiler.complaints import REFUSED, as_lines
    from tilecast.emulator.battery.report import run_report

    with Screen() as screen:
        found = run_report(file, machine, case, keep_going, superfluous, screen, quick)
    partial = quick or case is not None
    said = [] if partial else _compiler(file)
    right = found.right and not any(one.severity == REFUSED for one in said)
    figures = {**found.figures, "compiler": [dataclasses.asdict(one) for one in said]}
    text = "\n".join([found.text, *([] if partial else as_lines(said))])
    show(text, {"file": file, "right": right, "wrong": found.wrong, **figures}, as_json)
    if not right:
        raise typer.Exit(1)


def _compiler(file: str) -> list[Complaint]:
    """What the compiler says of the kernel that the battery ran."""
    from tilecast.cli.progress import Screen
    from tilecast.codegen.compiler.complaints import checked_by_compiler
    from tilecast.emulator.run import kernel_path

    with Screen() as screen:
        screen("compile", 0, 0, file)
        return checked_by_compiler(kernel_path(file))


def _emulate_any(
    file: str, call: str | None, machine: str | None, mode: str, seed: int, sms: int | None, shape: tuple[Any, ...],
    trace: str | None, whole: bool, largest: str | None, as_json: bool,
) -> None:  # fmt: skip
    """emulate --call and --main: any author's file."""
    from tilecast.cli.tables import show
    from tilecast.emulator.call import read_largest, run_call
    from tilecast.emulator.errors import RequestError

    if any(option is not None for option in shape):
        raise RequestError(
            "--call and --main run the file's own code: shapes, --window and --dtype are for generated kernels"
        )
    found = run_call(file, call, machine, mode, seed, sms, whole, read_largest(largest), trace)
    show(found.text, {"file": file, "call": call, "mode": mode, "seed": seed, **dataclasses.asdict(found)}, as_json)
    if not found.right:
        raise typer.Exit(1)
