"""``tilecast sweep``."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer()


@app.command()
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
        bool, typer.Option("--retry-failed", help="Compute items again whose worker died or broke.")
    ] = False,
) -> None:
    """Compute machines x workloads x variants, or time kernels on this host's GPUs; goes on where it stopped."""
    from tilecast.cmd_sweep import run_sweep

    text, failed = run_sweep(
        spec=spec, store=store, exports=export or [], engine=engine, workers=workers, ray_address=ray_address, run=run,
        retry_failed=retry_failed,
    )  # fmt: skip
    typer.echo(text)
    raise typer.Exit(1 if failed else 0)
