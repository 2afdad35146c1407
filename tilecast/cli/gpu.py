"""Verbs that measure the GPU at hand, and those that prepare for it: measure, calibrate, counters, profile, bundle."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilecast.cli.workload_options import AsJson, Kernel, takes_workload
from tilecast.model.kernel.workload import Workload

if TYPE_CHECKING:
    from tilecast.cli.progress import Screen
    from tilecast.model.machine.machine import Machine
    from tilecast.validation.lab.measure.plan import Item

app = typer.Typer()
_PANEL = "On a GPU"
_MachineHere = Annotated[str | None, typer.Option("--machine", help="Machine name or file (default: the GPU here).")]


def _gpu_machine(name: str | None, verb: str) -> Machine:
    """The machine of ``name``, or of the GPU at hand; PlanError for ``verb`` with what to do when there is none."""
    from tilecast.model.machine.machine import load_machine

    if name is not None:
        return load_machine(name)
    from tilecast.validation.lab.measure.detect import machine_here

    return machine_here(verb)


@app.command(
    rich_help_panel=_PANEL, epilog="Example: tilecast measure --variant fa3 --kernel cudnn --seqlen 8192 --causal"
)
@takes_workload
def measure(
    work: Workload,
    plan: Annotated[
        str | None, typer.Argument(help="A plan (.toml) or one kernel file (.py); default: --variant or --kernel.")
    ] = None,
    output: Annotated[str, typer.Option("-o", "--output", help="Table to append to.")] = "measured.csv",
    machine: _MachineHere = None,
    family: Annotated[str | None, typer.Option("--family", help="Kernel family of --variant (default: the machine's own).")] = None,
    variant: Annotated[
        list[str] | None,
        typer.Option("--variant", help="family:knob=value,...: knobs not named have the family's defaults; none: the best of --family. Repeat for more."),
    ] = None,
    kernel: Annotated[
        list[str] | None, typer.Option("--kernel", help="A peer: cudnn, flash-attn-2, flash-attn-4 or flex.")
    ] = None,
    mode: Annotated[str, typer.Option("--mode", help="short, or sustained (settled clock and power).")] = "short",
    rounds: Annotated[int, typer.Option("--rounds", min=3, max=1000, help="Samples of each kernel; the kernels alternate.")] = 15,
    role: Annotated[str | None, typer.Option("--role", help="Only a plan's items of this role.")] = None,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Time kernels on this host's GPU: cycles, time, clock, power, appended to a table; an interrupted run is resumed."""
    from tilecast import __version__
    from tilecast.base.files import OutputError, check_writable
    from tilecast.cli.forecast import command_line
    from tilecast.cli.progress import Screen
    from tilecast.cli.tables import show
    from tilecast.validation.lab.measure.plan import Options, PlanError
    from tilecast.validation.lab.measure.records import MODES, read

    if mode not in MODES:
        raise PlanError(f"--mode takes {' or '.join(MODES)}, got '{mode}'")
    table = Path(output)
    if table.exists():
        read(table)  # refuses a file that is something else before the GPU is touched
    check_writable(table)
    chip = _gpu_machine(machine, "tilecast measure")
    items, left_out = _items(plan, work, chip, kernel or [], family, variant or [], role)
    from tilecast.validation.lab.measure.run import measure as measure_items

    options = Options(rounds=rounds, mode=mode, command=command_line(), version=__version__)
    with Screen() as screen:
        failures = measure_items(items, table, options, _counted(screen, "measure", len(items)))
    for line in left_out:
        print(f"left out: {line}", file=sys.stderr)
    for failure in failures:
        print(f"failed: {failure.sentence()}", file=sys.stderr)
    if not table.exists():
        raise OutputError(f"{output}: nothing was measured: {failures[0].sentence() if failures else 'no items'}")
    rows = read(table)
    text = f"{table}: {len(rows)} rows ({len(items)} asked for, {len(failures)} failed, {len(left_out)} left out)"
    new = rows[-len(items) :] if plan is None else []
    data = [{name: getattr(row, name) for name in row.__dataclass_fields__} for row in (new or rows)]
    show(f"{text}\n{_rows_table(new)}" if new else text, data, as_json)
    raise typer.Exit(1 if failures else 0)


def _counted(screen: Screen, stage: str, total: int) -> Callable[[int, str], None]:
    """A progress that is told of steps one after the other, on ``screen``."""
    done = 0

    def tell(more: int, text: str) -> None:
        nonlocal done
        done += more
        screen(stage, done, total, text)

    return tell


def _items(
    plan: str | None, work: Workload, chip: Machine, kernels: list[str], family: str | None, variants: list[str],
    role: str | None,
) -> tuple[list[Item], tuple[str, ...]]:  # fmt: skip
    """What to measure, and sentences on what a plan leaves out for ``chip``."""
    from tilecast.validation.lab.measure.plan import EXTERNAL, Item, PlanError, load_plan

    if plan is not None and not plan.endswith(".py"):
        if kernels or variants or family is not None:
            raise PlanError(f"{plan}: a plan names its kernels: drop --kernel, --family and --variant")
        loaded = load_plan(Path(plan), chip)
        chosen = [item for item in loaded.items if role is None or item.role == role]
        if not chosen:
            raise PlanError(f"{plan}: has no items{f' of role {role}' if role else ''} for {chip.name}")
        return chosen, loaded.left_out
    items = [Item("file", plan, work, chip.name)] if plan is not None else []
    items += [measured_item(work, chip, Kernel(family, text)) for text in variants]
    for name in kernels:
        if name not in EXTERNAL:
            raise PlanError(f"--kernel takes {', '.join(EXTERNAL)}, got '{name}'")
        items.append(Item(name, "", work, chip.name))
    return items or [measured_item(work, chip, Kernel(family, None))], ()


def measured_item(work: Workload, chip: Machine, kernel: Kernel) -> Item:
    """The kernel to time for ``kernel``: its variant, or the best by forecast."""
    from tilecast.model.families import find_family
    from tilecast.model.forecast.level import at_hand, search_of
    from tilecast.model.kernel.variant import variant_text
    from tilecast.validation.lab.measure.plan import Item, PlanError

    name, variant = kernel.on(chip)
    if not find_family(name).template:
        raise PlanError(f"--family {name}: tilecast writes no kernels of it: fa2, fa3 or fa4 can be measured")
    chosen = variant if variant is not None else search_of(at_hand)(work, chip, name, "sustained").variant
    return Item(find_family(name).template, variant_text(chosen), work, chip.name)


def _rows_table(rows: list[Any]) -> str:
    from tilecast.cli.tables import table

    header = ("kernel", "cycles", "95 %", "ms", "TFLOP/s", "MHz", "W", "error")
    return table(header, [
        [f"{row.kernel} {row.variant}", f"{row.cycles:.0f}", f"{row.cycles_low:.0f} to {row.cycles_high:.0f}",
         f"{row.ms:.4g}", f"{row.workload().flops / row.ms / 1e9:.0f}", f"{row.effective_mhz:.0f}", f"{row.power_w:.0f}",
         f"{row.error:.1e}"]
        for row in rows
    ])  # fmt: skip


@app.command(rich_help_panel=_PANEL, epilog="Example: tilecast calibrate --quick -o mygpu.toml")
def calibrate(
    output: Annotated[str, typer.Option("-o", "--output", help="Machine file to write.")] = "machine.toml",
    store: Annotated[
        str, typer.Option("--store", help="Table of results; rows it already has are not measured again.")
    ] = ("calibrate.csv"),
    only: Annotated[
        list[str] | None, typer.Option("--only", help="Only this group of benchmarks (may be repeated).")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="The main facts only, in under a minute.")] = False,
) -> None:
    """Measure this host's GPU with microbenchmarks and write its machine file."""
    from tilecast.base.files import check_writable, write_text_atomically
    from tilecast.cli.progress import Screen
    from tilecast.validation.lab.calibrate.groups import all_cases

    groups = tuple(only or ())
    wanted = all_cases(groups)
    for path in (output, store):
        check_writable(path)
    from tilecast.validation.lab.calibrate.gpu import Gpu
    from tilecast.validation.lab.calibrate.report import machine_text, report_text
    from tilecast.validation.lab.calibrate.run import chosen, run_cases
    from tilecast.validation.lab.measure.gpu_lock import timing_on

    gpu = Gpu()
    cases = chosen(wanted, gpu.identity.compute_capability, quick, gpu.identity.smem_per_cta)
    command = " ".join(["tilecast calibrate", *(["--quick"] if quick else []), *(f"--only {name}" for name in groups)])
    begin = time.perf_counter()
    with timing_on(gpu.uuid), Screen() as screen:
        outcome = run_cases(gpu, cases, store, command, screen)
    write_text_atomically(output, machine_text(outcome.rows, gpu.identity, Path(output).stem))
    lines = [report_text(outcome.rows, gpu.identity, output)]
    if outcome.failed:
        lines.append(f"{len(outcome.failed)} benchmarks failed:")
        lines += [f"  {label}: {reason}" for label, reason in outcome.failed]
    seconds = time.perf_counter() - begin
    lines.append(f"{outcome.measured} measured, {outcome.skipped} already in {store}, {seconds:.0f} s; wrote {output}")
    typer.echo("\n".join(lines))


@app.command(rich_help_panel=_PANEL, epilog="Example: tilecast profile plan.toml -o codes.txt")
def profile(
    plan: Annotated[str, typer.Argument(help="A plan of tilecast measure.")],
    output: Annotated[str, typer.Option("-o", "--output", help="File to write.")],
    machine: Annotated[str, typer.Option("--machine", help="Machine name or file.")] = "h200-sxm",
    workers: Annotated[int, typer.Option("--workers", min=1, max=256, help="Compilers that run at a time.")] = 2,
) -> None:
    """Compile a plan's kernels without a GPU and store the profiles that forecasts from machine code need."""
    from tilecast.base.files import OutputError, check_writable, write_text_atomically
    from tilecast.cli.progress import Screen
    from tilecast.codegen.compiler.compile import tool
    from tilecast.codegen.compiler.profile import profile_all
    from tilecast.model.compiled.code import dump_codes
    from tilecast.model.machine.machine import load_machine
    from tilecast.validation.lab.measure.plan import EXTERNAL, load_plan

    check_writable(output)
    tool("nvdisasm")  # refuses where there is no compiler
    items = load_plan(Path(plan), load_machine(machine)).items
    jobs = [(i.kernel, i.variant, i.workload, i.machine) for i in items if i.kernel not in EXTERNAL]
    with Screen() as screen:
        codes, failures = profile_all(jobs, workers, screen)
    for line in failures:
        print(f"failed: {line}", file=sys.stderr)
    if not codes:
        raise OutputError(
            f"{output}: nothing was profiled: {failures[0] if failures else f'{plan} has no kernels of ours'}"
        )
    write_text_atomically(output, dump_codes(codes))
    typer.echo(f"{output}: {len(codes)} kernels, {len(failures)} failed")


@app.command(rich_help_panel=_PANEL, epilog="Example: tilecast counters plan.toml --most 10 -o counters.csv")
def counters(
    plan: Annotated[str, typer.Argument(help="A plan of tilecast measure.")],
    output: Annotated[str, typer.Option("-o", "--output", help="Table to write.")] = "counters.csv",
    machine: _MachineHere = None,
    most: Annotated[
        int, typer.Option("--most", min=1, max=100000, help="Kernels to profile, spread over the plan.")
    ] = 40,
) -> None:
    """Read hardware counters of a plan's kernels with Nsight Compute (ncu)."""
    from tilecast import __version__
    from tilecast.base.files import OutputError, check_writable
    from tilecast.cli.progress import Screen
    from tilecast.validation.lab.counters.collect import collect, write
    from tilecast.validation.lab.measure.detect import gpu_here
    from tilecast.validation.lab.measure.plan import EXTERNAL, PlanError, load_plan

    target = check_writable(output)
    gpu_here("tilecast counters")
    loaded = load_plan(Path(plan), _gpu_machine(machine, "tilecast counters"))
    items = [i for i in loaded.items if i.kernel not in EXTERNAL]
    if not items:
        raise PlanError(f"{plan}: has no generated kernels to count")
    # Evenly spread over the plan, so that a few already show every family and shape.
    chosen = items[:: max(1, -(-len(items) // most))]
    with Screen() as screen:
        screen("count", 0, 0, f"{len(chosen)} kernels")
        rows, failures = collect(chosen, __version__)
    for failure in failures:
        print(f"failed: {failure.sentence()}", file=sys.stderr)
    if not rows:
        raise OutputError(f"{output}: nothing was counted: {failures[0].sentence()}")
    write(target, rows)
    typer.echo(f"{output}: {len(rows)} counters of {len(chosen) - len(failures)} kernels, {len(failures)} failed")


@app.command(rich_help_panel=_PANEL, epilog="Example: tilecast bundle --quick -o mygpu.zip")
def bundle(
    output: Annotated[str, typer.Option("-o", "--output", help="Zip to write.")] = "bundle.zip",
    quick: Annotated[bool, typer.Option("--quick", help="The main facts and about a dozen kernels.")] = False,
    plan: Annotated[str | None, typer.Option("--plan", help="A plan of tilecast measure (default: the GPU's).")] = None,
    resume: Annotated[
        str | None, typer.Option("--resume", help="Folder of unfinished work (default: beside the output).")
    ] = None,
) -> None:
    """Measure everything on this host's GPU and pack it into one zip; an interrupted run is resumed."""
    from tilecast import __version__
    from tilecast.base.files import check_writable
    from tilecast.cli.forecast import command_line
    from tilecast.cli.progress import StagesScreen
    from tilecast.validation.lab.bundle.create import Asked, create
    from tilecast.validation.lab.bundle.manifest import failure_lines

    target = check_writable(output)
    folder = Path(resume) if resume is not None else target.with_name(target.name + ".work")
    screen = StagesScreen()
    with screen:
        manifest = create(Asked(target, folder, quick, plan, command_line(), __version__), screen)
    size = target.stat().st_size / 1024
    lines = [f"{target}: {size:.0f} KB, {', '.join(manifest.files)}; {sum(manifest.seconds.values()):.0f} s"]
    lines += [f"failed: {line}" for line in failure_lines(manifest.failed)]
    lines.append(f"read it anywhere: tilecast validate compare {shlex.quote(str(target))}")
    typer.echo("\n".join(lines))
