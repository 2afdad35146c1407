"""``tilecast measure``: time kernels on the GPU at hand and append what was found to a table."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tilecast import __version__
from tilecast.base.files import OutputError, check_writable

if TYPE_CHECKING:
    from tilecast.model.kernel.workload import Workload
    from tilecast.model.machine.machine import Machine
    from tilecast.validation.lab.measure.plan import Item


def gpu_machine(name: str | None, verb: str) -> Machine:
    """The machine file of ``name``, or of the GPU at hand; PlanError for ``verb`` with what to do when there is none."""
    from tilecast.model.machine.machine import load_machine

    if name is not None:
        return load_machine(name)
    from tilecast.validation.lab.measure.detect import machine_here

    return machine_here(verb)


def run_measure(
    plan: str | None, work: Workload, machine: str | None, output: str, mode: str, rounds: int, kernels: list[str],
    variants: list[str], role: str | None,
) -> int:  # fmt: skip
    """Measure; prints one line a shape on stderr and the table's new rows; returns the number of failures."""
    from tilecast.validation.lab.measure.plan import Options, PlanError
    from tilecast.validation.lab.measure.records import MODES, read

    if mode not in MODES:
        raise PlanError(f"--mode takes {' or '.join(MODES)}, got '{mode}'")
    table = Path(output)
    if table.exists():
        read(table)  # refuses a file that is something else before the GPU is touched
    check_writable(table)
    chip = gpu_machine(machine, "tilecast measure")
    items, left_out = _items(plan, work, chip, kernels, variants, role)
    from tilecast.validation.lab.measure.run import measure

    command = "tilecast " + " ".join(shlex.quote(a) for a in sys.argv[1:])
    options = Options(rounds=rounds, mode=mode, command=command, version=__version__)
    failures = _with_progress(items, lambda progress: measure(items, table, options, progress))
    for line in left_out:
        print(f"left out: {line}", file=sys.stderr)
    for failure in failures:
        print(f"failed: {failure.sentence()}", file=sys.stderr)
    if not table.exists():
        raise OutputError(f"{output}: nothing was measured: {failures[0].sentence() if failures else 'no items'}")
    rows = read(table)
    print(f"{table}: {len(rows)} rows ({len(items)} asked for, {len(failures)} failed, {len(left_out)} left out)")
    if plan is None:
        _print_rows(rows[-len(items) :])
    return len(failures)


def _items(
    plan: str | None, work: Workload, chip: Machine, kernels: list[str], variants: list[str], role: str | None
) -> tuple[list[Item], tuple[str, ...]]:
    from tilecast.model.families import find_family, native_family, parse_variant
    from tilecast.model.kernel.variant import variant_text
    from tilecast.model.search.best import best
    from tilecast.validation.lab.measure.plan import EXTERNAL, Item, PlanError, load_plan

    if plan is not None and not plan.endswith(".py"):
        loaded = load_plan(Path(plan), chip)
        chosen = [item for item in loaded.items if role is None or item.role == role]
        if not chosen:
            raise PlanError(f"{plan}: has no items{f' of role {role}' if role else ''} for {chip.name}")
        return chosen, loaded.left_out
    items = [Item("file", plan, work, chip.name)] if plan is not None else []
    for text in variants:
        name, _, knobs = text.partition(":")
        family = find_family(name)
        variant = parse_variant(f"family={family.name},{knobs}") if knobs else best(work, chip, family.name).variant
        items.append(Item(family.template, variant_text(variant), work, chip.name))
    for name in kernels:
        if name not in EXTERNAL:
            raise PlanError(f"--kernel takes {', '.join(EXTERNAL)}, got '{name}'")
        items.append(Item(name, "", work, chip.name))
    if not items:
        family = native_family(chip)
        items.append(Item(family.template, variant_text(best(work, chip, family.name).variant), work, chip.name))
    return [replace(item) for item in items], ()


def _with_progress(items: list[Item], run):  # type: ignore[no-untyped-def]
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=len(items))

        def progress(done: int, text: str) -> None:
            bar.update(task, advance=done, description=text)
            if not console.is_terminal:
                print(text, file=sys.stderr, flush=True)

        return run(progress)


def _print_rows(rows) -> None:  # type: ignore[no-untyped-def]
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for name in ("kernel", "cycles", "95 %", "ms", "TFLOP/s", "MHz", "W", "error"):
        table.add_column(name, justify="left" if name == "kernel" else "right")
    for row in rows:
        speed = row.workload().flops / row.ms / 1e9
        table.add_row(
            f"{row.kernel} {row.variant}", f"{row.cycles:.0f}", f"{row.cycles_low:.0f} to {row.cycles_high:.0f}",
            f"{row.ms:.4g}", f"{speed:.0f}", f"{row.effective_mhz:.0f}", f"{row.power_w:.0f}", f"{row.error:.1e}",
        )  # fmt: skip
    Console(width=160).print(table)


def run_profile(plan: str, output: str, machine: str, workers: int) -> str:
    """Profile the generated kernels of a plan; returns what to print."""
    from tilecast.base.files import write_text_atomically
    from tilecast.codegen.compiler.compile import tool
    from tilecast.codegen.compiler.profile import profile_all
    from tilecast.model.compiled.code import dump_codes
    from tilecast.model.machine.machine import load_machine
    from tilecast.validation.lab.measure.plan import EXTERNAL, load_plan

    check_writable(output)
    tool("nvdisasm")  # refuses where there is no compiler
    items = load_plan(Path(plan), load_machine(machine)).items
    jobs = [(i.kernel, i.variant, i.workload, i.machine) for i in items if i.kernel not in EXTERNAL]
    codes, failures = profile_all(jobs, workers, _count_kernels)
    for line in failures:
        print(f"failed: {line}", file=sys.stderr)
    if not codes:
        raise OutputError(
            f"{output}: nothing was profiled: {failures[0] if failures else f'{plan} has no kernels of ours'}"
        )
    write_text_atomically(output, dump_codes(codes))
    return f"{output}: {len(codes)} kernels, {len(failures)} failed"


def _count_kernels(_stage: str, done: float, of: float, _detail: str = "", /) -> None:
    """One line that counts up on a terminal; elsewhere a line of its own every twentieth kernel."""
    if sys.stderr.isatty():
        print(f"\r{done:.0f} of {of:.0f} kernels", end="\n" if done == of else "", file=sys.stderr, flush=True)
    elif done % 20 == 0 or done == of:
        print(f"{done:.0f} of {of:.0f} kernels", file=sys.stderr, flush=True)


def run_counters(plan: str, output: str, machine: str | None, most: int) -> str:
    """Collect hardware counters of a plan's generated kernels; returns what to print."""
    from tilecast.validation.lab.counters.collect import collect, write
    from tilecast.validation.lab.measure.detect import gpu_here
    from tilecast.validation.lab.measure.plan import EXTERNAL, PlanError, load_plan

    target = check_writable(output)
    gpu_here("tilecast counters")
    items = [
        i for i in load_plan(Path(plan), gpu_machine(machine, "tilecast counters")).items if i.kernel not in EXTERNAL
    ]
    if not items:
        raise PlanError(f"{plan}: has no generated kernels to count")
    # Evenly spread over the plan, so that a few already show every family and shape.
    chosen = items[:: max(1, -(-len(items) // most))]
    rows, failures = collect(chosen, __version__)
    for failure in failures:
        print(f"failed: {failure.sentence()}", file=sys.stderr)
    if not rows:
        raise OutputError(f"{output}: nothing was counted: {failures[0].sentence()}")
    write(target, rows)
    return f"{output}: {len(rows)} counters of {len(chosen) - len(failures)} kernels, {len(failures)} failed"
