"""The command line.  Every wrong input is one sentence on stderr, exit code 2, and nothing written."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from tilecast import cli_explore, cli_gpu, cli_machine, cli_report, cli_sweep, cli_tune, cli_validate
from tilecast import options as opt

if TYPE_CHECKING:
    from tilecast.model.kernel.variant import Variant
    from tilecast.model.machine.machine import Machine

app = typer.Typer(
    name="tilecast", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    help="Forecast what a tiled attention kernel will do on a GPU, and why.",
)  # fmt: skip
app.add_typer(cli_gpu.app)
app.add_typer(cli_sweep.app)
app.add_typer(cli_report.app)
app.add_typer(cli_explore.app)
app.add_typer(cli_tune.app)
app.add_typer(cli_machine.app, name="machine")
app.add_typer(cli_validate.app, name="validate")


def _version(wanted: bool) -> None:
    if wanted:
        from tilecast import __version__

        typer.echo(f"tilecast {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def _machine_and_variant(machine: str, variant: str | None) -> tuple[Machine, Variant | None]:
    from tilecast.model.families import native_family, parse_variant
    from tilecast.model.machine.machine import load_machine

    chip = load_machine(machine)
    if not variant:
        return chip, None
    return chip, parse_variant(variant, native_family(chip).variant())


@app.command()
def predict(
    machine: opt.MachineName,
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
    shapes: opt.Shapes = None,
    variant: opt.VariantText = None,
    family: Annotated[str | None, typer.Option("--family", help="Kernel family: fa4, fa3, fa2, unfused.")] = None,
    clock: opt.ClockText = "sustained",
    as_json: opt.AsJson = False,
    trace: Annotated[str | None, typer.Option("--trace", help="Write a Perfetto trace of one tile to FILE.")] = None,
) -> None:
    """Forecast time, TFLOP/s, what binds, and where the time goes."""
    from tilecast.base.files import check_writable, write_text_atomically
    from tilecast.model.chip.evaluate import PredictError
    from tilecast.model.forecast.predict import predict as forecast

    work = opt.workloads(
        batch=batch, heads=heads, heads_kv=heads_kv, seqlen=seqlen, seqlen_k=seqlen_k, head_dim=head_dim,
        head_dim_v=head_dim_v, causal=causal, window=window, dtype=dtype, preset=preset, shapes=shapes,
    )  # fmt: skip
    chip, knobs = _machine_and_variant(machine, variant)
    if trace is not None:
        check_writable(trace)
        if len(work) > 1:
            raise PredictError("--trace writes one tile: give one shape, not --shapes")
    answers = [forecast(w, chip, knobs, family=family, clock=opt.clock_value(clock)) for w in work]
    if trace is not None:
        write_text_atomically(trace, answers[0].trace_json())
    if as_json:
        out = [a.to_dict() for a in answers]
        typer.echo(json.dumps(out if shapes is not None else out[0], indent=2))
    elif shapes is not None:
        from tilecast.tables import shapes_table

        typer.echo(shapes_table(answers))
    else:
        typer.echo(answers[0].text())


@app.command()
def demand(
    machine: opt.MachineName = "b200",
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
    tile_m: Annotated[int, typer.Option("--tile-m", min=1, max=4096, help="Query rows of a tile.")] = 128,
    tile_n: Annotated[int, typer.Option("--tile-n", min=1, max=4096, help="Key rows of a tile.")] = 128,
    as_json: opt.AsJson = False,
) -> None:
    """Closed forms: cycles per unit and tile, forward and backward, and HBM traffic fused and unfused."""
    from tilecast.model.closed_forms import demand_dict, demand_report
    from tilecast.model.machine.machine import load_machine

    (work,) = opt.workloads(
        batch=batch, heads=heads, heads_kv=heads_kv, seqlen=seqlen, seqlen_k=seqlen_k, head_dim=head_dim,
        head_dim_v=head_dim_v, causal=causal, window=window, dtype=dtype, preset=preset,
    )  # fmt: skip
    chip = load_machine(machine)
    if as_json:
        typer.echo(json.dumps(demand_dict(chip, work, tile_m, tile_n), indent=2))
    else:
        typer.echo(demand_report(chip, work, tile_m, tile_n))


@app.command()
def schedule(
    machine: opt.MachineName = "b200",
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
    time_limit: Annotated[float, typer.Option("--time-limit", help="Solver seconds.")] = 10.0,
) -> None:
    """Lower bounds and the proven-optimal modulo schedule of the kernel's loop."""
    from tilecast.cmd_schedule import run_schedule
    from tilecast.model.chip.evaluate import PredictError
    from tilecast.model.families import build_pipeline, legality, loop_shape, native_family, published_variant

    # Also refuses NaN, which compares with nothing.
    if not time_limit > 0:
        raise PredictError(f"--time-limit: expected seconds above 0, got {time_limit:g}")
    (work,) = opt.workloads(
        batch=batch,
        heads=heads,
        heads_kv=heads_kv,
        seqlen=seqlen,
        seqlen_k=seqlen_k,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        causal=causal,
        window=window,
        dtype=dtype,
        preset=preset,
    )
    chip, knobs = _machine_and_variant(machine, variant)
    if knobs is None:
        knobs = published_variant(native_family(chip).name, work, chip)
    verdict = legality(knobs, work, chip)
    if not verdict.legal:
        raise PredictError(f"{knobs.family} cannot run {work.label()} on {chip.name}: {verdict.sentence()}")
    typer.echo(run_schedule(build_pipeline(loop_shape(work), knobs, chip), time_limit))


@app.command()
def generate(
    machine: opt.MachineName,
    family: Annotated[
        str | None, typer.Option("--family", help="triton, hopper_ws or blackwell_ws (default: the machine's own).")
    ] = None,
    variant: opt.VariantText = None,
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
    output: Annotated[str | None, typer.Option("-o", "--output", help="File to write (default: print).")] = None,
    list_variants: Annotated[
        bool, typer.Option("--list", help="List the family's variants by forecast instead of writing one.")
    ] = False,
) -> None:
    """Write an attention kernel: the variant given, or the best by forecast, as one self-contained file."""
    from tilecast.cmd_generate import run_generate, run_variants

    (work,) = opt.workloads(
        batch=batch, heads=heads, heads_kv=heads_kv, seqlen=seqlen, seqlen_k=seqlen_k, head_dim=head_dim,
        head_dim_v=head_dim_v, causal=causal, window=window, dtype=dtype, preset=preset,
    )  # fmt: skip
    if list_variants:
        typer.echo(run_variants(work, machine, family))
    else:
        typer.echo(run_generate(work, machine, family, variant, output))


@app.command()
def inspect(
    file: str,
    arch: Annotated[str, typer.Option("--arch", help="sm_80, sm_90a, sm_100a or sm_103a.")],
    dtype: Annotated[str, typer.Option("--dtype", help="bf16 or fp16.")] = "bf16",
    as_json: opt.AsJson = False,
) -> None:
    """Compile a generated kernel without a GPU: registers, spills, memory, instruction mix beside the forecast."""
    from tilecast.cmd_generate import run_inspect

    typer.echo(run_inspect(file, arch, dtype, as_json))


@app.command()
def emulate(
    file: str,
    machine: Annotated[
        str | None, typer.Option("--machine", help="Machine name or file (default: the kernel's own).")
    ] = None,
    batch: opt.Batch = None,
    heads: Annotated[int | None, typer.Option("--heads", help="Query heads (default 1).")] = None,
    heads_kv: opt.HeadsKv = None,
    seqlen: Annotated[int | None, typer.Option("--seqlen", help="Query length (default 512).")] = None,
    seqlen_k: opt.SeqlenK = None,
    window: opt.Window = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="bf16 or fp16 (default: the kernel's own).")] = None,
    mode: Annotated[
        str,
        typer.Option("--mode", help="late: asynchronous operations as late as possible; random: at any legal moment."),
    ] = "late",
    seed: Annotated[int, typer.Option("--seed", help="Of the inputs and of the random moments.")] = 0,
    sms: Annotated[
        int | None, typer.Option("--sms", help="As if the GPU had so few SMs: persistent programs run several tiles.")
    ] = None,
    trace: Annotated[str | None, typer.Option("--trace", help="Write the timeline to FILE (ui.perfetto.dev).")] = None,
) -> None:
    """Run a generated Gluon kernel on the CPU: correctness, races, deadlocks, and cycles of the executed source."""
    from tilecast.cmd_emulate import kernel_workload, run_emulate

    work, limits = kernel_workload(file, batch, heads, heads_kv, seqlen, seqlen_k, window, dtype)
    text, right = run_emulate(file, work, machine, limits, mode, seed, sms, trace)
    typer.echo(text)
    if not right:
        raise typer.Exit(1)


@app.command()
def ship() -> None:
    """Regenerate the kernels that ship from codegen/shipped.toml (in a source tree)."""
    from tilecast.cmd_generate import run_ship

    typer.echo(run_ship())


@app.command()
def presets() -> None:
    """Model shapes that --preset takes."""
    from tilecast.tables import presets_table

    typer.echo(presets_table())


@app.command()
def variants(machine: opt.MachineName = "b200") -> None:
    """Kernel families and the knobs that --variant takes."""
    from tilecast.model.machine.machine import load_machine
    from tilecast.tables import variants_table

    typer.echo(variants_table(load_machine(machine)))


def main(arguments: list[str] | None = None) -> NoReturn:
    """Entry point: errors of the user's making become one sentence and exit code 2."""
    try:
        code = app(args=arguments, standalone_mode=False)
    except (ValueError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            sys.exit(0)
        _fail(str(error))
    except Exception as error:
        # Typer ships its own copy of click from 0.27 on: recognise usage errors by what they can do, not by class.
        message = getattr(error, "format_message", None)
        if type(error).__name__ == "Abort":
            sys.exit(130)
        if message is None:
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            print(message())
            sys.exit(2)
        _fail(message())
    sys.exit(code if isinstance(code, int) else 0)


def _fail(sentence: str) -> NoReturn:
    print(f"tilecast: {' '.join(sentence.split())}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
