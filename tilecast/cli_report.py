"""``tilecast report``: the design review of one forecast."""

from __future__ import annotations

from typing import Annotated

import typer

from tilecast import options as opt

app = typer.Typer()


@app.command()
def report(
    machine: opt.MachineName,
    output: Annotated[
        str, typer.Option("-o", "--output", help="FILE.html, or FILE.md with its charts beside it.")
    ] = "review.html",
    markdown: Annotated[
        str | None, typer.Option("--markdown", help="Folder for the Markdown twin of an HTML report.")
    ] = None,
    whatif: Annotated[
        list[str] | None, typer.Option("--whatif", help="Add a before and after: fact=value, e.g. mufu.ex2=32.")
    ] = None,
    scale: Annotated[
        list[str] | None, typer.Option("--scale", help="The same with a factor: fact or section=1.5.")
    ] = None,
    variant: opt.VariantText = None,
    family: Annotated[str | None, typer.Option("--family", help="Kernel family: fa4, fa3, fa2, unfused.")] = None,
    clock: opt.ClockText = "sustained",
    measured: Annotated[
        str | None, typer.Option("--measured", help="Table of tilecast measure to compare with (default: the H200's).")
    ] = None,
    date: Annotated[str, typer.Option("--date", help="Date to print; without one, same input gives same bytes.")] = "",
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
    """Write the design review: verdict, forecast, roofline, schedule, sensitivities, alternatives, accuracy, risks."""
    from tilecast.cmd_report import run_report

    (work,) = opt.workloads(
        batch=batch, heads=heads, heads_kv=heads_kv, seqlen=seqlen, seqlen_k=seqlen_k, head_dim=head_dim,
        head_dim_v=head_dim_v, causal=causal, window=window, dtype=dtype, preset=preset,
    )  # fmt: skip
    typer.echo(
        run_report(
            work,
            machine,
            output=output,
            markdown=markdown,
            whatif=whatif or [],
            scale=scale or [],
            variant=variant,
            family=family,
            clock=opt.clock_value(clock),
            measured=measured,
            date=date,
        )
    )
