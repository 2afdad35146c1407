"""The verb about serving: step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilecast.cli.workload_options import AsJson, Changes, Clock, Heads, check_knobs, takes_workload
from tilecast.model.kernel.workload import WorkloadError
from tilecast.model.machine.machine import Machine

if TYPE_CHECKING:
    from tilecast.model.step.batch import Batch, Lengths

app = typer.Typer()
_BATCH = "Batch"
BatchFile = Annotated[
    str | None,
    typer.Option("--batch-file", help="CSV with columns seqlen_k and, if wanted, seqlen_q (1) and count (1), one row for sequences alike.",
                 rich_help_panel=_BATCH),
]  # fmt: skip
Page = Annotated[
    int, typer.Option("--page", help="Tokens of a page, 16 to 256; 0: caches without pages.", rich_help_panel=_BATCH)
]  # fmt: skip


Cache = Annotated[
    str | None, typer.Option("--cache", help='What the caches hold: e4m3, a byte an element (default: as q is).', rich_help_panel=_BATCH)
]  # fmt: skip
Latent = Annotated[
    bool, typer.Option("--latent", help="Latent attention (MLA): V is the first columns of the one key that all heads share.", rich_help_panel=_BATCH)
]  # fmt: skip


def batch_of(
    heads: Heads,
    requests: str | None,
    batch_file: str | None,
    page: int,
    cache: str | None = None,
    latent: bool = False,
) -> Batch:
    """The batch from the options; WorkloadError on anything that makes no sense."""
    from tilecast.model.step.batch import Batch, parse_requests, read_batch

    if (requests is None) == (batch_file is None):
        given = "neither" if requests is None else "both"
        raise WorkloadError(f"--requests and --batch-file: expected one of the two, got {given}")
    if cache == "":
        raise WorkloadError("--cache: expected e4m3, or no --cache for caches with the dtype of q, got ''")
    lengths = (
        _in_options("--requests", lambda: parse_requests(requests))
        if requests is not None
        else read_batch(batch_file or "")
    )
    return Batch(lengths, heads.work, page, cache or "", latent)


def _in_options(option: str, parse: Any) -> Lengths:
    try:
        found: Lengths = parse()
        return found
    except WorkloadError as error:
        raise WorkloadError(f"{option}: {str(error).removeprefix('requests: ')}") from None


def _seconds(text: str) -> float:
    from tilecast.model.chip.power import lasting_seconds

    found = lasting_seconds(text)
    if not found:
        raise WorkloadError(f"--within: expected a time above 0 with its unit (20ms, 0.5ms, 1s), got '{text}'")
    return found


@app.command(
    rich_help_panel="Forecast", epilog="Example: tilecast step h200 --preset llama3-8b --requests 64x8192,1x512:4096"
)
@takes_workload
def step(
    heads: Heads,
    machine: Machine,
    changes: Changes,
    clock: Clock,
    requests: Annotated[
        str | None,
        typer.Option("--requests", help="Sequences of the step: 64x8192,1x512:4096 are 64 of one query and 8192 keys, and one of 512 queries and 4096 keys.",
                     rich_help_panel=_BATCH),
    ] = None,
    batch_file: BatchFile = None,
    page: Page = 64,
    cache: Cache = None,
    latent: Latent = False,
    next_: Annotated[
        str | None, typer.Option("--next", help="Sequences to add, as in --requests (default: one like the last of one query).", rich_help_panel=_BATCH)
    ] = None,
    within: Annotated[
        str | None, typer.Option("--within", help="A latency (20ms): how many times --next fits into it.", rich_help_panel=_BATCH)
    ] = None,
    splits: Annotated[bool, typer.Option("--splits/--no-splits", help="Compare lengths of splits.")] = True,
    variant: Annotated[
        str | None, typer.Option("--variant", help="Knobs of the kernel that decodes, e.g. split_keys=1024 (default: as shipped).")
    ] = None,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Forecast a serving step: attention, what binds, the best split, what one more request costs, how many fit a latency."""
    from tilecast.cli.tables import show
    from tilecast.model.step.batch import parse_requests
    from tilecast.model.step.decoder import decoders
    from tilecast.model.step.forecast import forecast_step, named_pair

    check_knobs(variant)
    batch = batch_of(heads, requests, batch_file, page, cache, latent)
    more = _in_options("--next", lambda: parse_requests(next_)) if next_ is not None else _one_more(batch)
    limit = _seconds(within) if within is not None else None
    decoder = decoders().get(heads.preset or "")
    chip = changes.of(machine)
    pair = None
    if variant is not None:
        pair = named_pair(variant, batch, chip)
    answer = forecast_step(
        batch, chip, pair, decoder=decoder, clock=clock.value, compare_splits=splits, next_request=more, within_seconds=limit
    )  # fmt: skip
    text, data = answer.text(), answer.to_dict()
    if chip is not machine:
        before = forecast_step(batch, machine, pair, decoder=decoder, clock=clock.value)
        text += f"\nWithout the changes: attention {before.seconds * 1e6:.4g} us a layer, {before.seconds / answer.seconds:.3f} times as long."
        data["before"] = {"attention_us": before.seconds * 1e6}
    show(text, data, as_json)


def _one_more(batch: Batch) -> Lengths:
    """A sequence like the last that decodes; like the last of all where none does."""
    decodes = [one for one in batch.lengths if one[0] == 1]
    return ((decodes or list(batch.lengths))[-1],)
