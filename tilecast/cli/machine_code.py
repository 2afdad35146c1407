"""Verbs that read machine code: inspect, forecast of any kernel, the loops that forecasts stand on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tilecast.cli.workload_options import AsJson, Changes, Kernel, takes_workload
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine

app = typer.Typer()
_PANEL = "Kernels"
#: What verbs about machine code take.
_CodeFile = Annotated[
    str,
    typer.Argument(
        help="A generated kernel file or the name of a shipped one, a cubin, a fatbin, a Triton cache folder or a listing."
    ),
]
_SourceDtype = Annotated[str, typer.Option("--dtype", help="Of a generated kernel: bf16 or fp16.")]
_OneKernel = Annotated[str | None, typer.Option("--kernel", help="Which kernel of several, by a part of its name.")]
_Warps = Annotated[
    int | None, typer.Option("--warps", min=1, help="Warps of a CTA (needed for a listing, which does not say).")
]


@app.command(rich_help_panel=_PANEL, epilog="Example: tilecast inspect kernel.cubin --kernel attention")
def inspect(
    file: _CodeFile,
    arch: Annotated[
        str | None,
        typer.Option(
            "--arch",
            help="sm_80, sm_90a, sm_100a or sm_103a: what to compile for (default: what the file is written for), or which code.",
        ),
    ] = None,
    dtype: _SourceDtype = "bf16",
    kernel: _OneKernel = None,
    warps: _Warps = None,
    as_json: AsJson = False,
) -> None:
    """Read machine code without a GPU: registers, roles, loops, barriers; for generated kernels beside the forecast."""
    from tilecast.cli.progress import Screen, quiet_at_exit
    from tilecast.cli.tables import show
    from tilecast.codegen.compiler.compile import CompileError
    from tilecast.codegen.compiler.inspection import as_dict, as_text, inspect_binary
    from tilecast.codegen.compiler.inspection import inspect as compile_and_read
    from tilecast.codegen.compiler.kernel_file import named_file, written_for

    quiet_at_exit()
    file = named_file(file)
    if file.endswith(".py"):
        if arch is None:
            arch, *others = written_for(file)
            if others:
                raise CompileError(f"{file}: written for {', '.join((arch, *others))}: pick one with --arch")
        with Screen() as screen:
            screen("compile", 0, 0, file)
            report = compile_and_read(file, arch, dtype, kernel)
    else:
        report = inspect_binary(file, arch, kernel, warps)
    show(as_text(report), as_dict(report), as_json)


@app.command(rich_help_panel=_PANEL, epilog="Example: tilecast forecast kernel.cubin --machine b200")
@takes_workload
def forecast(
    file: _CodeFile,
    changes: Changes,
    machine: Annotated[
        str | None,
        typer.Option("--machine", help="Machine name or file (default: h200-sxm, b200 or b300, as the code is for)."),
    ] = None,
    arch: Annotated[
        str | None, typer.Option("--arch", help="Target, where the file is or has code for several.")
    ] = None,
    kernel: _OneKernel = None,
    warps: _Warps = None,
    dtype: _SourceDtype = "bf16",
    ctas: Annotated[int | None, typer.Option("--ctas", min=1, help="CTAs of the launch: adds its time.")] = None,
    iterations: Annotated[
        str | None,
        typer.Option("--iterations", help="Iterations of a CTA, or of a tile: 128, or 1:128 as under a causal mask."),
    ] = None,
    tiles: Annotated[
        int | None, typer.Option("--tiles", min=1, help="Tiles of the launch, for persistent kernels.")
    ] = None,
    per_sm: Annotated[
        int | None,
        typer.Option(
            "--ctas-per-sm",
            min=1,
            help="CTAs that share an SM (default: as many as fit; 1 where FILE does not say what they take).",
        ),
    ] = None,
    call: Annotated[
        str | None,
        typer.Option(
            "--call",
            help="Evaluate this in any Python FILE and forecast the kernel that it launches, as in 'main(4096)'.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Forecast any kernel that has a loop from its machine code: cycles, busy units, where roles wait, time."""
    from tilecast.cli.progress import Screen, quiet_at_exit
    from tilecast.cli.tables import show
    from tilecast.codegen.compiler.binary import read_binary
    from tilecast.codegen.compiler.compile import CompileError
    from tilecast.codegen.compiler.kernel_file import named_file
    from tilecast.codegen.compiler.steady_answer import as_dict, as_text
    from tilecast.codegen.compiler.steady_forecast import MACHINES, Grid, forecast_binary, forecast_source
    from tilecast.model.machine.machine import load_machine

    quiet_at_exit()
    file = named_file(file)
    if call is not None and (ctas is not None or tiles is not None or not file.endswith(".py")):
        raise typer.BadParameter(
            "is for a Python file, whose launch says how many CTAs it has: drop --ctas and --tiles",
            param_hint="'--call'",
        )
    if call is None and (ctas is None) != (iterations is None):
        raise typer.BadParameter(
            "the time of a launch needs --ctas and --iterations: how many CTAs it has, and how often the loop goes round in one",
            param_hint="'--ctas'",
        )
    if tiles is not None and ctas is None:
        raise typer.BadParameter("says what the CTAs of a launch share: give --ctas, too", param_hint="'--tiles'")
    grid = Grid(ctas, iterations, tiles or 0) if ctas is not None and iterations is not None else None
    chip = changes.of(load_machine(machine)) if machine is not None else None
    with Screen() as screen:
        screen("forecast", 0, 0, file)
        if file.endswith(".py"):
            if chip is None:
                chip = changes.of(load_machine(_machine_of(file, call is not None, arch)))
            elif arch not in (None, chip.arch):
                raise CompileError(f"--arch: {machine} is {chip.arch}, got '{arch}'")
            if call is not None:
                _show_launch(file, call, chip, kernel, iterations, per_sm, as_json)
                return
            found = forecast_source(file, chip, dtype, per_sm, grid, kernel)
        else:
            binary = read_binary(file, arch, kernel)
            if chip is None and binary.target not in MACHINES:
                raise typer.BadParameter(
                    f"expected code for {' or '.join(MACHINES)}, got {binary.target}: steady loops of other code are not "
                    "simulated yet", param_hint="'FILE'",
                )  # fmt: skip
            chip = chip or changes.of(load_machine(MACHINES[binary.target]))
            found = forecast_binary(binary, chip, warps, per_sm=per_sm, grid=grid)
    show(as_text(found), as_dict(found), as_json)


def _machine_of(file: str, of_any_author: bool, arch: str | None) -> str:
    """The one machine for ``arch``, or for the target that a file is written for; CompileError, with those that there are, where it is not one."""
    from tilecast.codegen.compiler.compile import CompileError
    from tilecast.codegen.compiler.kernel_file import written_for
    from tilecast.codegen.compiler.steady_forecast import MACHINES

    targets = tuple(MACHINES) if of_any_author else written_for(file)
    if arch is not None:
        if arch not in targets:
            raise CompileError(f"--arch: expected {', '.join(targets)}, got '{arch}'")
        targets = (arch,)
    if len(targets) == 1:
        return MACHINES[targets[0]]
    names = ", ".join(MACHINES[target] for target in targets)
    raise CompileError(f"--machine: which machine? {names}, or a file of your own")


def _show_launch(
    file: str, call: str, chip: Machine, kernel: str | None, iterations: str | None, per_sm: int | None, as_json: bool
) -> None:
    """forecast --call: any Python file, whose launches are compiled and not run."""
    from tilecast.base.module_file import module_of
    from tilecast.cli.tables import show
    from tilecast.codegen.compiler.compile import CompileError
    from tilecast.codegen.compiler.steady_answer import as_dict, as_text
    from tilecast.codegen.compiler.steady_forecast import forecast_launch
    from tilecast.emulator.call import evaluated
    from tilecast.emulator.cuda_on_cpu import cuda_on_cpu

    def run() -> None:
        if not Path(file).is_file():
            raise CompileError(f"{file}: expected a Python file with a kernel, found none")
        module = module_of(file, f"tilecast_forecast_{Path(file).stem}", registered=True, beside=True)
        evaluated(call, vars(module), file)

    capability = {"sm_80": (8, 0), "sm_90a": (9, 0)}.get(chip.arch, (10, 0))
    with cuda_on_cpu(capability, int(chip["chip.sm_count"])):
        found, launched = forecast_launch(file, chip, run, kernel, iterations, per_sm)
    tuned = f", the first of its {launched.configurations} configurations" if launched.configurations > 1 else ""
    head = f"{call} launches {launched.ctas} CTAs of {launched.compiled.name}{tuned}; {found.per_sm} on an SM"
    data = {**as_dict(found), "call": call, "ctas": launched.ctas, "configurations": launched.configurations}
    show(f"{head}\n{as_text(found)}", data, as_json)


@app.command(rich_help_panel=_PANEL, epilog="Example: tilecast loops h200 --head-dim 160 --causal --most 4")
@takes_workload
def loops(
    work: Workload,
    machine: Machine,
    kernel: Kernel,
    most: Annotated[
        int, typer.Option("--most", min=1, max=300, help="How many loops to compile, best forecast first.")
    ] = 6,
    workers: Annotated[int, typer.Option("--workers", min=0, max=256, help="Compilers at a time (0: all cores).")] = 0,
    as_json: AsJson = False,
) -> None:
    """Compile more loops for --level kept and auto than those that ship; no GPU needed, seconds each.

    With --variant the loop of that kernel.
    """
    from tilecast.cli.progress import Screen, quiet_at_exit
    from tilecast.cli.tables import show
    from tilecast.codegen.compiler.compile import CompileError
    from tilecast.codegen.shipping.loops import add
    from tilecast.model.chip.evaluate import PredictError

    quiet_at_exit()
    family, variant = kernel.on(machine)
    try:
        with Screen() as screen:
            made, known, path = add(work, machine, family, most, variant, workers, screen)
    except CompileError as error:
        raise PredictError(f"no loop was compiled: {error}") from None
    lines = [f"{path}: {len(made)} loops compiled, {known} were at hand"]
    lines += [
        f"  {loop.code.registers:>4} registers  {loop.code.stack_bytes:>4} bytes spilled  {loop.code.variant}"
        for loop in made
    ]
    data = {
        "file": str(path), "at_hand": known,
        "compiled": [{"variant": loop.code.variant, "registers": loop.code.registers, "spill_bytes": loop.code.stack_bytes}
                     for loop in made],
    }  # fmt: skip
    show("\n".join(lines), data, as_json)
