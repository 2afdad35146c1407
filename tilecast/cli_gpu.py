"""Verbs that measure the GPU at hand, and what prepares for it."""

from __future__ import annotations

from typing import Annotated

import typer

from tilecast import options as opt

app = typer.Typer()


@app.command()
def measure(
    plan: Annotated[
        str | None, typer.Argument(help="A plan (.toml) or one kernel file (.py); default: --variant or --kernel.")
    ] = None,
    output: Annotated[str, typer.Option("-o", "--output", help="Table to append to.")] = "measured.csv",
    machine: Annotated[
        str | None, typer.Option("--machine", help="Machine name or file (default: the GPU here).")
    ] = None,
    variant: Annotated[
        list[str] | None, typer.Option("--variant", help="family:knob=value,...; a family alone: its best by forecast.")
    ] = None,
    kernel: Annotated[
        list[str] | None, typer.Option("--kernel", help="A peer: cudnn, flash-attn-2, flash-attn-4 or flex.")
    ] = None,
    mode: Annotated[str, typer.Option("--mode", help="short, or sustained (settled clock and power).")] = "short",
    rounds: Annotated[int, typer.Option("--rounds", min=3, max=1000, help="Samples a kernel, taken in turns.")] = 15,
    role: Annotated[str | None, typer.Option("--role", help="Only a plan's items of this role.")] = None,
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
) -> None:
    """Time kernels on the GPU here: cycles, time, clock and power, appended to a table; goes on where it stopped."""
    from tilecast.cmd_measure import run_measure

    (work,) = opt.workloads(
        batch=batch, heads=heads, heads_kv=heads_kv, seqlen=seqlen, seqlen_k=seqlen_k, head_dim=head_dim,
        head_dim_v=head_dim_v, causal=causal, window=window, dtype=dtype, preset=preset,
    )  # fmt: skip
    failed = run_measure(plan, work, machine, output, mode, rounds, kernel or [], variant or [], role)
    raise typer.Exit(1 if failed else 0)


@app.command()
def profile(
    plan: Annotated[str, typer.Argument(help="A plan of tilecast measure.")],
    output: Annotated[str, typer.Option("-o", "--output", help="File to write.")],
    machine: Annotated[str, typer.Option("--machine", help="Machine name or file.")] = "h200-sxm",
    workers: Annotated[int, typer.Option("--workers", min=1, max=256, help="Compilers that run at a time.")] = 2,
) -> None:
    """Compile a plan's kernels without a GPU and keep what forecasts from machine code read."""
    from tilecast.cmd_measure import run_profile

    typer.echo(run_profile(plan, output, machine, workers))


@app.command()
def counters(
    plan: Annotated[str, typer.Argument(help="A plan of tilecast measure.")],
    output: Annotated[str, typer.Option("-o", "--output", help="Table to write.")] = "counters.csv",
    machine: Annotated[
        str | None, typer.Option("--machine", help="Machine name or file (default: the GPU here).")
    ] = None,
    most: Annotated[
        int, typer.Option("--most", min=1, max=100000, help="Kernels to profile, spread over the plan.")
    ] = 40,
) -> None:
    """Read hardware counters of a plan's kernels with Nsight Compute (ncu)."""
    from tilecast.cmd_measure import run_counters

    typer.echo(run_counters(plan, output, machine, most))


@app.command()
def calibrate(
    output: Annotated[str, typer.Option("-o", "--output", help="Machine file to write.")] = "machine.toml",
    store: Annotated[str, typer.Option("--store", help="Table of results; what it holds is not measured again.")] = (
        "calibrate.csv"
    ),
    only: Annotated[
        list[str] | None, typer.Option("--only", help="Only this group of benchmarks (may be repeated).")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="The main facts only, in under a minute.")] = False,
) -> None:
    """Measure the GPU at hand with microbenchmarks and write its machine file."""
    from tilecast.cmd_calibrate import run_calibrate

    typer.echo(run_calibrate(output=output, store=store, only=tuple(only or ()), quick=quick))


@app.command()
def bundle(
    output: Annotated[str, typer.Option("-o", "--output", help="Zip to write.")] = "bundle.zip",
    quick: Annotated[bool, typer.Option("--quick", help="The main facts and about a dozen kernels.")] = False,
    plan: Annotated[str | None, typer.Option("--plan", help="A plan of tilecast measure (default: the GPU's).")] = None,
    resume: Annotated[
        str | None, typer.Option("--resume", help="Folder of unfinished work (default: beside the output).")
    ] = None,
) -> None:
    """Measure everything on the GPU at hand and pack it into one zip; a run that was cut off goes on."""
    from tilecast.cmd_bundle import run_bundle

    typer.echo(run_bundle(output=output, quick=quick, plan=plan, resume=resume))
