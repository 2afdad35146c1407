"""Verbs about kernels: generate, tune, inspect, the lists of variants and presets."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilecast.cli.workload_options import AsJson, Clock, Kernel, LevelAtHand, Shapes, takes_workload
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine

if TYPE_CHECKING:
    from tilecast.codegen.tune.tuning import Tuning

app = typer.Typer()
_PANEL = "Kernels"


@app.command(rich_help_panel=_PANEL, epilog="Example: tilecast generate h200 --seqlen 8192 --causal -o kernel.py")
@takes_workload
def generate(
    work: Workload,
    machine: Machine,
    kernel: Kernel,
    clock: Clock,
    level: LevelAtHand,
    output: Annotated[str | None, typer.Option("-o", "--output", help="File to write (default: print).")] = None,
    list_variants: Annotated[
        bool, typer.Option("--list", help="List the family's variants by forecast instead of writing one.")
    ] = False,
    top: Annotated[int, typer.Option("--top", min=1, help="How many variants --list shows.")] = 20,
    direction: Annotated[
        str,
        typer.Option(
            "--pass",
            help="fwd; bwd: gradients of q, k, v; serve: paged and packed batches; append: new keys into a cache. The last two in plain Triton.",
        ),
    ] = "fwd",
    as_json: AsJson = False,
) -> None:
    """Write an attention kernel: the variant given, or the best by forecast, as one self-contained file."""
    from tilecast import __version__
    from tilecast.base.files import OutputError, check_writable, write_text_atomically
    from tilecast.cli.tables import show
    from tilecast.codegen.families import template_of
    from tilecast.codegen.generate import generate as write
    from tilecast.model.families import find_family
    from tilecast.model.kernel.verdict import VariantError

    if direction not in ("fwd", *_UNRANKED):
        raise VariantError(f"--pass: expected fwd, bwd, serve or append, got '{direction}'")
    if output is not None:
        check_writable(output)
    if direction != "fwd":
        if list_variants:
            raise OutputError(
                f"--list orders forward kernels by forecast, and {_UNRANKED[direction]} have no such list: drop --list"
            )
        _generate_unranked(direction, work, machine, kernel, output, as_json)
        return
    name, variant = kernel.on(machine)
    if list_variants:
        if output is not None or variant is not None:
            raise OutputError(
                f"--list lists the variants of {name}: drop {'-o' if output is not None else '--variant'}"
            )
        _list_variants(work, machine, name, clock, top, as_json)
        return
    family = find_family(name)
    made = write(work, machine, family, variant, __version__, clock=clock.value, compiler=level.compiler())
    if output is None:
        show(made.source.rstrip("\n"), {**made.header, "source": made.source}, as_json)
        return
    write_text_atomically(output, made.source)
    forecast = made.prediction
    targets = template_of(family).targets(made.variant, machine)
    text = (
        f"{output}: {name} for {work.label()} on {machine.name}\n"
        f"  variant   {made.header['variant']}\n"
        f"  forecast  {forecast.tflops:.0f} TFLOP/s, {forecast.time_ms:.4g} ms at {forecast.clock_mhz:.0f} MHz ({clock.words()}), "
        f"bound by {forecast.binding.name}\n"
        f"  targets   {', '.join(targets)}: tilecast inspect {shlex.quote(output)} --arch {targets[0]}"
    )
    show(text, {**made.header, "file": output}, as_json)


#: What kernels of the passes that are not written by rank are called.
_UNRANKED = {"bwd": "backward passes", "serve": "serving kernels", "append": "kernels that append"}
#: What is said of the forecast of those that have none of their own.
_NO_FORECAST = {
    "serve": "; forecast: of whole steps, tilecast step",
    "append": "; no forecast: kernels that append have none yet",
}


def _generate_unranked(
    direction: str, work: Workload, machine: Machine, kernel: Kernel, output: str | None, as_json: bool
) -> None:
    """Write a backward pass ("bwd"), a serving kernel ("serve") or what fills its cache ("append"): the variant given, or the one to
    start from."""
    from tilecast import __version__
    from tilecast.base.files import write_text_atomically
    from tilecast.cli.tables import show

    writers = {"bwd": _backward, "serve": _serving, "append": _append}
    made, targets = writers[direction](work, machine, kernel, __version__)
    if output is None:
        show(made.source.rstrip("\n"), {**made.header, "source": made.source}, as_json)
        return
    write_text_atomically(output, made.source)
    what = {"bwd": "backward pass of", "serve": "serving kernel for", "append": "append to the cache of"}[direction]
    text = (
        f"{output}: {what} {work.label()} for {machine.name}\n"
        f"  variant   {made.header['variant']}\n"
        f"  targets   {', '.join(targets)}{_NO_FORECAST.get(direction, '')}"
    )
    if direction == "bwd":
        text += f"\n  forecast  {_backward_forecast(made.variant, work, machine)} (tilecast predict --pass bwd)"
    show(text, {**made.header, "file": output}, as_json)


def _backward_forecast(variant: Any, work: Workload, machine: Machine) -> str:
    """Time and rate of a generated backward pass in a sustained run, before compilation."""
    from tilecast.model.training.evaluate import evaluate_backward

    run = evaluate_backward(work.reduced(), machine, variant, "sustained")
    return f"{run.seconds * 1e3:.4g} ms, {run.tflops:.0f} TFLOP/s"


def _backward(work: Workload, machine: Machine, kernel: Kernel, version: str) -> tuple[Any, tuple[str, ...]]:
    """A generated backward pass, and its targets."""
    from tilecast.codegen.backward import generate_backward, targets
    from tilecast.model.backward import (
        TRITON_BACKWARD,
        find_backward,
        named_in,
        native_backward,
        parse_backward,
        writable,
    )

    family = named_in(kernel.variant or "") if kernel.family is None else find_backward(kernel.family)
    if family is None:
        # The class built for the machine, where there is a template for it.
        own = native_backward(work.reduced(), machine)
        written = writable(own.chosen(work.reduced(), machine), work.reduced(), machine).legal
        family = own if written else TRITON_BACKWARD
    variant = family.chosen(work, machine)
    if kernel.variant is not None:
        variant = parse_backward(kernel.variant, variant)
    made = generate_backward(work, machine, variant, version)
    return made, targets(made.variant)


def _serving(work: Workload, machine: Machine, kernel: Kernel, version: str) -> tuple[Any, tuple[str, ...]]:
    """A generated serving kernel, and its targets."""
    from tilecast.codegen.serving import generate_serving
    from tilecast.model.kernel.knobs import family_named
    from tilecast.model.serving import TRITON_SERVING, find_serving, parse_serving

    named = family_named(kernel.variant or "") if kernel.family is None else kernel.family
    family = TRITON_SERVING if named is None else find_serving(named)
    variant = family.chosen(work, machine)
    if kernel.variant is not None:
        variant = parse_serving(kernel.variant, variant)
    made = generate_serving(work, machine, variant, version)
    return made, made.targets


def _append(work: Workload, machine: Machine, kernel: Kernel, version: str) -> tuple[Any, tuple[str, ...]]:
    """A generated kernel that appends to caches, and its targets."""
    from tilecast.codegen.portable.append import TARGETS, generate_append
    from tilecast.model.append import check_family, parse_append
    from tilecast.model.kernel.variants.append import AppendVariant

    if kernel.family is not None:
        check_family(kernel.family)
    variant = AppendVariant() if kernel.variant is None else parse_append(kernel.variant, AppendVariant())
    return generate_append(work, machine, variant, version), TARGETS


def _list_variants(work: Workload, machine: Machine, name: str, clock: Clock, top: int, as_json: bool) -> None:
    """The fastest variants that can be written, with their forecasts."""
    from tilecast.cli.tables import show, table
    from tilecast.model.chip.evaluate import PredictError
    from tilecast.model.kernel.variant import short_text, variant_text
    from tilecast.model.search.best import best, search_space
    from tilecast.model.search.rank import rank

    reduced = work.reduced()
    space = search_space(reduced, machine, name)
    if not space.written:
        raise PredictError(f"{name} cannot be written for {work.label()} on {machine.name}: {space.refusal}")
    times = {e.variant: e.seconds for e in rank(space.variants, reduced, machine, clock=clock.value, keep=top).best}
    chosen = best(work, machine, name, clock.value)
    # The search refines one knob beyond the steps of the space: its choice comes first.
    listed = sorted({**times, chosen.variant: chosen.seconds}.items(), key=lambda item: item[1] or 0.0)[:top]
    rows = [[f"{work.flops / s / 1e12:.0f}", f"{1e3 * s:.4g}", short_text(v)] for v, s in listed if s]
    head = f"The fastest {len(rows)} of {len(space.variants)} variants of {name} for {work.label()} on {machine.name}, by forecast\n\n"
    data = [{"variant": variant_text(v), "time_ms": 1e3 * s, "tflops": work.flops / s / 1e12} for v, s in listed if s]
    show(head + table(["TFLOP/s", "ms", "variant"], rows), data, as_json)


@app.command(rich_help_panel=_PANEL, epilog="Example: tilecast tune h200 --seqlen 8192 --causal -o kernel.py")
@takes_workload
def tune(
    work: Shapes,
    machine: Machine,
    kernel: Kernel,
    clock: Clock,
    level: LevelAtHand,
    budget: Annotated[int, typer.Option("--budget", min=0, max=1000, help="Kernels to time on the GPU here.")] = 5,
    compile: Annotated[
        bool,
        typer.Option(
            "--compile/--no-compile", help="Compile the best candidates and forecast from their machine code."
        ),
    ] = True,
    candidates: Annotated[int, typer.Option("--candidates", min=1, max=1000, help="Candidates to compile.")] = 24,
    output: Annotated[str | None, typer.Option("-o", "--output", help="Kernel file to write.")] = None,
    audit: Annotated[
        str | None, typer.Option("--audit", help="Every candidate and why it was kept or dropped: FILE.json or .csv.")
    ] = None,
    results: Annotated[
        str | None, typer.Option("--table", help="Table of timed kernels; kernels it already has are not timed again.")
    ] = None,
    workers: Annotated[int, typer.Option("--workers", min=0, max=256, help="Compilers at a time (0: all cores).")] = 0,
    as_json: AsJson = False,
    direction: Annotated[str, typer.Option("--pass", help="fwd; backward passes are not tuned.")] = "fwd",
) -> None:
    """Choose a kernel for a shape: forecast all variants, compile the best, time the very best on the GPU.

    With --variant those knobs are fixed and the others are chosen.
    """
    from tilecast import __version__
    from tilecast.base.files import OutputError, check_writable, write_text_atomically
    from tilecast.cli.forecast import command_line
    from tilecast.cli.progress import Screen
    from tilecast.cli.tables import shape_name, show, table
    from tilecast.codegen.tune.render import as_csv
    from tilecast.model.kernel.variant import short_text
    from tilecast.model.kernel.verdict import VariantError
    from tilecast.validation.lab.tuning import tune as choose

    if direction != "fwd":
        raise VariantError(
            f"--pass {direction}: tune compiles and times forward kernels: 'tilecast generate --pass bwd' writes a backward pass, 'tilecast sweep' with "
            'pass = "bwd" orders its variants by forecast, tools/sweep_backward.py times its loops on your GPU'
        )
    if audit is not None and Path(audit).suffix not in (".json", ".csv"):
        raise OutputError(f"--audit: expected a name ending in .json or .csv, got '{audit}'")
    for option, path in (("-o", output), ("--audit", audit), ("--table", results)):
        if path is not None:
            check_writable(path)
            if work.listed and option != "--table":
                raise OutputError(f"{option} {path}: one file for one shape: drop --shapes")
    family, _ = kernel.on(machine)
    rows = results or (str(Path(output).with_suffix(".csv")) if output else "tune.csv")
    found = []
    with Screen() as screen:
        for w in work.works:
            found.append(
                choose(w, machine, family=family, budget=budget, compile=compile, candidates=candidates,
                       clock=clock.value, table=rows, workers=workers, progress=screen, command=command_line(),
                       version=__version__, fixed=kernel.variant, compiler=level.compiler())
            )  # fmt: skip
    if work.listed:
        lines = [
            [shape_name(t.workload), f"{1e3 * (t.winner.best_guess_s or 0.0):.4g}",
             f"{t.workload.flops / (t.winner.best_guess_s or 1.0) / 1e12:.0f}", t.by, short_text(t.winner.variant)]
            for t in found
        ]  # fmt: skip
        show(table(["shape", "ms", "TFLOP/s", "chosen by", "variant"], lines), [t.to_dict() for t in found], as_json)
        return
    one = found[0]
    source = _tuned_source(one) if output is not None else ""
    if audit is not None:
        write_text_atomically(
            audit, as_csv(one) if audit.endswith(".csv") else json.dumps(one.to_dict(), indent=1) + "\n"
        )
    if output is not None:
        write_text_atomically(output, source)
    written = [f"{path}: {what}" for path, what in ((output, "the kernel"), (audit, "the audit trail")) if path]
    show("\n".join([one.text(), *written]), one.to_dict() if as_json else None, as_json)


def _tuned_source(found: Tuning) -> str:
    """The winner's file; its header says how it was chosen."""
    from tilecast import __version__
    from tilecast.codegen.generate import generate as write
    from tilecast.model.families import find_family

    chosen: dict[str, object] = {
        "by": found.by, "of": len(found.candidates), "budget": found.budget, "fates": found.counts(),
    }  # fmt: skip
    measured = found.winner.measured_s
    if measured is not None:
        chosen["measured_ms"] = float(f"{1e3 * measured:.4g}")
    extra = {"chosen": {**chosen, "reason": found.winner.reason}}
    return write(
        found.workload, found.machine, find_family(found.family), found.winner.variant, __version__, extra
    ).source


@app.command(rich_help_panel=_PANEL, epilog="Example: tilecast presets")
def presets(as_json: AsJson = False) -> None:
    """Model shapes that --preset takes."""
    from tilecast.cli.tables import presets_table, show
    from tilecast.model.kernel.presets import presets as known

    show(presets_table(), [dataclasses.asdict(preset) for preset in known().values()], as_json)


@app.command(rich_help_panel=_PANEL, epilog="Example: tilecast variants h200")
@takes_workload(machine="b200")
def variants(machine: Machine, as_json: AsJson = False) -> None:
    """Kernel families and the knobs that --variant takes."""
    from tilecast.cli.tables import families, show, variants_table

    data: Any = families()
    show(variants_table(machine), data, as_json)


@app.command(hidden=True, epilog="Example: tilecast ship")
def ship(
    loops: Annotated[bool, typer.Option("--loops", help="Compile the loops of data/loops again instead: half an hour.")] = False,
    hub: Annotated[str | None, typer.Option("--hub", metavar="FOLDER", help="Write them as a kernel of the Hugging Face Hub instead.")] = None,
) -> None:  # fmt: skip
    """Regenerate the kernels that ship from codegen/shipped.toml, or the loops that ship (in a source tree), or a folder for the Hub."""
    from pathlib import Path

    from tilecast import __version__
    from tilecast.base.data import LOOPS
    from tilecast.cli.progress import Screen
    from tilecast.codegen.shipping.loops import write as write_loops
    from tilecast.codegen.shipping.ship import KERNELS, write

    if hub is not None:
        from tilecast.codegen.shipping.hub import write_hub

        typer.echo(f"{hub}: wrote {write_hub(Path(hub), __version__)} files")
        return
    if loops:
        with Screen() as screen:
            typer.echo(f"{LOOPS}: wrote {write_loops(progress=screen)} loops")
        return
    changed = write(__version__)
    head = f"{KERNELS}: wrote {len(changed)} files" if changed else f"{KERNELS}: up to date"
    typer.echo("\n".join([head, *(f"  {path}" for path in changed)]))
