"""The workload options every verb shares, and how they become workloads."""

from __future__ import annotations

from typing import Annotated

import typer

from tilecast.model.kernel.presets import preset as find_preset
from tilecast.model.kernel.shapes_csv import parse_window, read_shapes
from tilecast.model.kernel.workload import Workload, WorkloadError

_WORK = "Workload"
Batch = Annotated[int | None, typer.Option("--batch", help="Sequences (default 1).", rich_help_panel=_WORK)]
Heads = Annotated[int | None, typer.Option("--heads", help="Query heads (default 16).", rich_help_panel=_WORK)]
HeadsKv = Annotated[
    int | None, typer.Option("--heads-kv", help="Key/value heads (default: as --heads).", rich_help_panel=_WORK)
]
Seqlen = Annotated[int | None, typer.Option("--seqlen", help="Query length (default 4096).", rich_help_panel=_WORK)]
SeqlenK = Annotated[
    int | None, typer.Option("--seqlen-k", help="Key length (default: as --seqlen).", rich_help_panel=_WORK)
]
HeadDim = Annotated[
    int | None, typer.Option("--head-dim", help="Head dimension of Q and K (default 128).", rich_help_panel=_WORK)
]
HeadDimV = Annotated[int | None, typer.Option("--head-dim-v", help="Head dimension of V.", rich_help_panel=_WORK)]
Causal = Annotated[
    bool | None, typer.Option("--causal/--no-causal", help="Causal mask, aligned bottom right.", rich_help_panel=_WORK)
]
Window = Annotated[
    str | None, typer.Option("--window", help="Sliding window 'left,right' (or 'left').", rich_help_panel=_WORK)
]
Dtype = Annotated[str | None, typer.Option("--dtype", help="bf16 (default), fp16 or fp8.", rich_help_panel=_WORK)]
PresetName = Annotated[
    str | None, typer.Option("--preset", help="A model's shape, e.g. llama3-8b.", rich_help_panel=_WORK)
]
Shapes = Annotated[str | None, typer.Option("--shapes", help="CSV of shapes.", rich_help_panel=_WORK)]
MachineName = Annotated[str, typer.Option("--machine", help="Machine name or machine file.")]
VariantText = Annotated[
    str | None, typer.Option("--variant", help="Kernel knobs, e.g. family=fa4,cta_group=2 (default: the best legal).")
]
ClockText = Annotated[str, typer.Option("--clock", help="sustained, short, or a locked clock in MHz.")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON with documented, stable keys.")]


def workloads(
    *,
    batch: int | None = None,
    heads: int | None = None,
    heads_kv: int | None = None,
    seqlen: int | None = None,
    seqlen_k: int | None = None,
    head_dim: int | None = None,
    head_dim_v: int | None = None,
    causal: bool | None = None,
    window: str | None = None,
    dtype: str | None = None,
    preset: str | None = None,
    shapes: str | None = None,
) -> list[Workload]:
    """One workload from the options, or all rows of ``shapes``; WorkloadError on anything that makes no sense."""
    if shapes is not None:
        single = {
            "--batch": batch, "--heads": heads, "--heads-kv": heads_kv, "--seqlen": seqlen, "--seqlen-k": seqlen_k,
            "--head-dim": head_dim, "--head-dim-v": head_dim_v, "--causal": causal, "--window": window,
            "--dtype": dtype, "--preset": preset,
        }  # fmt: skip
        clash = [name for name, value in single.items() if value is not None]
        if clash:
            raise WorkloadError(f"--shapes gives the shapes, with their columns: drop {clash[0]}")
        return read_shapes(shapes)
    model = find_preset(preset) if preset else None
    heads_q = heads if heads is not None else model.heads_q if model else 16
    shared = heads_kv if heads_kv is not None else model.heads_kv if model and heads is None else heads_q
    dim = head_dim if head_dim is not None else model.head_dim_qk if model else 128
    dim_v = head_dim_v if head_dim_v is not None else model.head_dim_v if model and head_dim is None else dim
    length = seqlen if seqlen is not None else model.seqlen if model else 4096
    limits = parse_window(window or "", bool(causal))
    mask = "window" if limits else "causal" if causal else "none"
    if model and causal is None and limits is None:
        mask, limits = model.mask, model.window
    keys = seqlen_k if seqlen_k is not None else length
    return [
        Workload(
            1 if batch is None else batch, heads_q, shared, length, keys, dim, dim_v, mask, limits, dtype or "bf16"
        )
    ]


def clock_value(text: str) -> str | float:
    """ "sustained", "short" or MHz as a number; anything else is passed on for `predict` to refuse."""
    try:
        return float(text)
    except ValueError:
        return text
