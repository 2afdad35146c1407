"""The tuner from the command line."""

from __future__ import annotations

from typing import Annotated

import typer

from tilecast import options as opt

app = typer.Typer()


@app.command()
def tune(
    machine: opt.MachineName,
    family: Annotated[
        str | None, typer.Option("--family", help="fa2, fa3 or fa4 (default: the machine's own).")
    ] = None,
    budget: Annotated[int, typer.Option("--budget", min=0, max=1000, help="Kernels to time on the GPU here.")] = 5,
    compile: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Compile the best candidates and read their machine code.")
    ] = True,
    candidates: Annotated[int, typer.Option("--candidates", min=1, max=1000, help="Candidates to compile.")] = 24,
    clock: opt.ClockText = "sustained",
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
    output: Annotated[str | None, typer.Option("-o", "--output", help="Kernel file to write.")] = None,
    audit: Annotated[
        str | None, typer.Option("--audit", help="Every candidate and why it was kept or dropped: FILE.json or .csv.")
    ] = None,
    table: Annotated[
        str | None, typer.Option("--table", help="Table of timed kernels; what it has is not timed again.")
    ] = None,
    workers: Annotated[int, typer.Option("--workers", min=0, max=256, help="Compilers at a time (0: all cores).")] = 0,
    as_json: opt.AsJson = False,
) -> None:
    """Choose a kernel for a shape: the whole space by forecast, the best by machine code, the very best on the GPU."""
    from tilecast.cmd_tune import run_tune

    (work,) = opt.workloads(
        batch=batch, heads=heads, heads_kv=heads_kv, seqlen=seqlen, seqlen_k=seqlen_k, head_dim=head_dim,
        head_dim_v=head_dim_v, causal=causal, window=window, dtype=dtype, preset=preset,
    )  # fmt: skip
    typer.echo(
        run_tune(
            work,
            machine,
            family,
            budget,
            compile,
            candidates,
            opt.clock_value(clock),
            output,
            audit,
            table,
            workers,
            as_json,
        )
    )
