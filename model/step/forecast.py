"""The forecast of a serving step: time, what binds, where the time goes, which split is best, what one more request costs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from tilecast.model.chip.evaluate import PredictError, check_clock
from tilecast.model.kernel.knobs import family_named
from tilecast.model.kernel.variants.hopper.prefill import chosen_few
from tilecast.model.kernel.variants.hopper.serving import own_columns
from tilecast.model.kernel.verdict import VariantError
from tilecast.model.kernel.workload import WorkloadError
from tilecast.model.machine.machine import Machine, machine_of
from tilecast.model.serving import (
    HOPPER_MLA,
    HOPPER_PREFILL,
    HOPPER_RUNS,
    HOPPER_RUNS_E4M3,
    HOPPER_SERVING,
    HOPPER_SERVING_E4M3,
    TRITON_SERVING,
    ServingFamily,
    find_serving,
    parse_serving,
    writable,
)
from tilecast.model.sm.bounds import bounds
from tilecast.model.step.answer import Largest, NextRequest, Part, SplitTime, StepForecast
from tilecast.model.step.batch import MOST_SEQUENCES, Batch, Lengths, requests_text
from tilecast.model.step.decoder import Decoder, decoder_floor
from tilecast.model.step.evaluate import StepRun, evaluate_step
from tilecast.model.step.launches.classes import StepVariant
from tilecast.model.step.launches.variant import dealing, multiplied, splitting
from tilecast.model.step.render import as_dict, as_text

#: (head_dim of q and k, of v) that ship with kernels of the copy engine.
_HOPPER_HEADS = {(64, 64), (128, 128), (192, 128), (256, 256)}
#: Keys of a split that are compared.
SPLITS = (256, 512, 1024, 2048, 4096)
MEMORY = "K, V, Q and O at the memory's bandwidth"
PACE = "blocks that come slower than the memory could send them"
START = "start: programs find their item, its first pages, its first block"
MERGE = "splits handed over and merged after the last block"
IDLE = "programs that find no item"
LAUNCH = "launch"
_KINDS = {
    MEMORY: ("memory", "HBM bandwidth"), START: ("start", "start of programs"), MERGE: ("merge", "merging of splits"),
    IDLE: ("idle", "programs without an item"), LAUNCH: ("launch", "kernel launch"),
}  # fmt: skip


@dataclass(frozen=True, slots=True, repr=False)
class StepPrediction(StepForecast):
    """The answer for one batch, with its text."""

    to_dict = as_dict
    text = __str__ = as_text

    def __repr__(self) -> str:
        return f"<StepPrediction {self.machine.name}: {self.batch.label()}: {self.seconds * 1e6:.4g} us>"


def forecast_step(
    batch: Batch, machine: Machine | str, variants: tuple[StepVariant, ...] | None = None, *,
    decoder: Decoder | None = None, clock: str | float = "sustained", compare_splits: bool = False,
    next_request: Lengths | None = None, within_seconds: float | None = None,
) -> StepPrediction:  # fmt: skip
    """Forecast attention of a step of ``batch``, as `tilecast.attention_kvcache` runs it.

    ``variants``: the kernels that decode and prefill (default: those that ship).  ``decoder``: also a floor for the whole step.
    ``next_request``: what such sequences more cost; with ``within_seconds`` how many times they fit into that time, of the whole
    step where the decoder is known and of one layer's attention otherwise.
    Raises PredictError, MachineError or WorkloadError with one sentence.
    """
    chip = machine_of(machine)
    check_clock(clock, chip)
    pair = shipped_pair(batch, chip) if variants is None else variants
    check_step(batch, chip, pair)
    question = _Question(chip, pair, decoder, clock)
    run = evaluate_step(batch, chip, pair, clock)
    parts = _parts(run)
    more, largest = None, None
    if next_request is not None:
        more = question.cost_of(next_request, batch)
        if within_seconds is not None:
            largest = question.largest(next_request, batch, within_seconds)
    elif within_seconds is not None:
        raise WorkloadError("within: expected a next request to add, got none")
    return StepPrediction(
        batch, chip, pair, "as shipped" if variants is None else "as given", clock if isinstance(clock, str) else "fixed",
        run, parts, _binding(run, parts), None if decoder is None else decoder_floor(decoder, batch, chip),
        split_times(batch, chip, pair, clock) if compare_splits else (), more, largest,
    )  # fmt: skip


def shipped_pair(batch: Batch, machine: Machine) -> tuple[StepVariant, ...]:
    """The kernels that decode and prefill heads like those of ``batch``, and one for rows between, or one for all: on Hopper those of the
    copy engine where they are written."""
    hopper = machine.tensor_kind == "wgmma"
    columns, columns_v = own_columns(batch.heads.head_dim_qk, batch.heads.head_dim_v)
    if batch.latent and hopper:
        return (HOPPER_MLA.chosen(batch.heads, machine),)
    if batch.cache and hopper:
        return HOPPER_RUNS_E4M3.chosen(batch.heads, machine), HOPPER_SERVING_E4M3.chosen(batch.heads, machine)
    if hopper and (columns, columns_v) in _HOPPER_HEADS:
        batch = replace(batch, heads=replace(batch.heads, head_dim_qk=columns, head_dim_v=columns_v))
        one, many = _pair(HOPPER_RUNS, HOPPER_PREFILL, batch, machine)
        return one, chosen_few(batch.heads, machine), many
    return _pair(TRITON_SERVING, TRITON_SERVING, batch, machine)


def named_pair(text: str, batch: Batch, machine: Machine) -> tuple[StepVariant, ...]:
    """The same with the decoding kernel's knobs from ``text``, "split_keys=2048", which may name another family; VariantError."""
    decode, *prefill = shipped_pair(batch, machine)
    named = family_named(text)
    if named is not None and find_serving(named).name != decode.family:
        other = find_serving(named)
        known = (TRITON_SERVING, HOPPER_SERVING)
        if other not in known or batch.latent or batch.cache:
            usual = dict.fromkeys((*(family.name for family in known), decode.family))
            names = " or ".join(usual) if not (batch.latent or batch.cache) else decode.family
            raise VariantError(f"--variant: a step is forecast with families {names}, got '{named}'")
        decode, *prefill = _pair(other, TRITON_SERVING if other is TRITON_SERVING else HOPPER_PREFILL, batch, machine)
    given: Any = decode
    return (parse_serving(text, given), *prefill)


def _pair(
    decodes: ServingFamily[Any], prefills: ServingFamily[Any], batch: Batch, machine: Machine
) -> tuple[StepVariant, StepVariant]:
    one = replace(batch.heads, seqlen_q=1, heads_q=batch.heads.heads_kv)
    many = replace(batch.heads, seqlen_q=max(512, batch.heads.seqlen_q))
    return decodes.chosen(one, machine), prefills.chosen(many, machine)


def check_step(batch: Batch, machine: Machine, pair: tuple[StepVariant, ...]) -> None:
    """PredictError for what no serving kernel does, what is not forecast, or what no memory holds."""
    room = machine.get("hbm.capacity_gb", 0.0) * 1e9
    if room and batch.cache_bytes > room:
        raise PredictError(
            f"keys and values of the batch take {batch.cache_bytes / 1e9:.4g} GB in one layer, the memory of {machine.name} "
            f"holds {room / 1e9:g} GB: use fewer or shorter sequences"
        )
    special = "latent" if batch.latent else batch.cache
    if special and machine.tensor_kind != "wgmma":
        raise PredictError(
            f"{special} caches are forecast on H100 and H200 only, where a kernel of the copy engine reads them, got {machine.name}"
        )
    for variant in pair:
        dealt = dealing(variant, batch.heads)
        queries = 1 if dealt.least_rows == 1 else 512
        heads = multiplied(variant, batch.heads)
        verdict = writable(variant, replace(heads, seqlen_q=queries, seqlen_k=8192), machine)
        if not verdict.legal:
            # One key head, whose first columns V may be.
            shared = batch.heads.heads_kv == 1 and batch.heads.head_dim_qk > batch.heads.head_dim_v and not batch.latent
            latent = "; for latent attention, where V is the first columns of the key: --latent" if shared else ""
            raise PredictError(f"no serving kernel for {batch.label()} on {machine.name}: {verdict.sentence()}{latent}")
    _check_rows(batch, pair)


def _check_rows(batch: Batch, pair: tuple[StepVariant, ...]) -> None:
    rows = max(queries for queries, _ in batch.lengths) * batch.heads.group_size
    special = "latent" if batch.latent else batch.cache
    if not any(dealing(variant, batch.heads).takes(rows) for variant in pair):
        most = max(dealing(variant, batch.heads).most_rows for variant in pair)
        raise PredictError(
            f"sequences of {rows} rows (queries times query heads of a key head) with {special or 'such'} caches are not forecast: expected at most {most}"
        )


@dataclass(frozen=True, slots=True)
class _Question:
    """What stays the same while a batch grows."""

    machine: Machine
    pair: tuple[StepVariant, ...]
    decoder: Decoder | None
    clock: str | float

    def seconds(self, batch: Batch) -> float:
        """The whole step where the decoder is known, else attention of one layer."""
        attention = evaluate_step(batch, self.machine, self.pair, self.clock).seconds
        if self.decoder is None:
            return attention
        return self.decoder.layers * attention + decoder_floor(self.decoder, batch, self.machine).seconds

    def cost_of(self, more: Lengths, batch: Batch) -> NextRequest:
        """What more sequences cost."""
        grown = batch.with_requests(more)
        _check_rows(grown, self.pair)
        before, after = (evaluate_step(b, self.machine, self.pair, self.clock).seconds for b in (batch, grown))
        whole = None if self.decoder is None else self.seconds(grown) - self.seconds(batch)
        return NextRequest(requests_text(more), after - before, whole, grown.cache_bytes - batch.cache_bytes)

    def fits(self, batch: Batch) -> bool:
        """Whether the memory holds the caches of all layers, and the weights."""
        room = self.machine.get("hbm.capacity_gb", 0.0) * 1e9
        if not room:
            return True
        if self.decoder is None:
            return batch.cache_bytes <= room
        floor = decoder_floor(self.decoder, batch, self.machine)
        return floor.cache_bytes + floor.weight_bytes <= room

    def largest(self, more: Lengths, batch: Batch, within: float) -> Largest:
        """How many times ``more`` fits: doubled until it does not, then halved in."""
        most = (MOST_SEQUENCES - len(batch.lengths)) // len(more)

        def grown(count: int) -> Batch:
            return batch.with_requests(more * count)

        def good(count: int) -> bool:
            return count <= most and self.fits(grown(count)) and self.seconds(grown(count)) <= within

        low, high = 0, 1
        while good(high):
            low, high = high, high * 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if good(middle) else (low, middle)
        limit = "sequences" if low >= most else "latency" if self.fits(grown(low + 1)) else "memory"
        return Largest(requests_text(more), within, low, self.seconds(grown(low)), limit)


def split_times(
    batch: Batch, machine: Machine, pair: tuple[StepVariant, ...], clock: str | float,
    splits: Iterable[int] = SPLITS,
) -> tuple[SplitTime, ...]:  # fmt: skip
    """The step with the decoding kernel split every so many keys, the fastest first; empty where nothing is decoded."""
    rows = {q * batch.heads.group_size for q, _ in batch.lengths}
    all_dealt = [dealing(variant, batch.heads) for variant in pair]
    splits_some = (at for at, dealt in enumerate(all_dealt) if dealt.split_keys and any(map(dealt.takes, rows)))
    at = next(splits_some, None)
    if at is None:
        return ()
    legal = [n for n in splits if n % all_dealt[at].tile_n == 0]
    found = [
        SplitTime(
            n, evaluate_step(batch, machine, (*pair[:at], splitting(pair[at], n), *pair[at + 1 :]), clock).seconds
        )
        for n in legal
    ]
    return tuple(sorted(found, key=lambda one: one.seconds))


def _parts(run: StepRun) -> tuple[Part, ...]:
    """Where the time goes; adds up exactly, no part negative."""
    spent = dict.fromkeys((MEMORY, PACE, START, MERGE, IDLE, LAUNCH), 0.0)
    for launch in run.launches:
        hertz, played = launch.clock.mhz * 1e6, launch.played
        memory = min(launch.memory_seconds, played.streamed_until / hertz)
        streamed = played.streamed_until / hertz
        start = min(launch.costs.first_start / hertz, streamed - memory)
        idle = played.idle / hertz
        spent[MEMORY] += memory
        spent[START] += start
        spent[PACE] += streamed - memory - start
        spent[IDLE] += idle
        spent[MERGE] += max(0.0, (played.end - played.streamed_until) / hertz - idle)
        spent[LAUNCH] += launch.launch_seconds
    # What launches do at the same time counts once: the launch of the later one, then the end of the one before.
    spent[LAUNCH] -= run.under_way_seconds
    rest = run.beside_seconds - run.under_way_seconds
    for cause in (MERGE, START, PACE, MEMORY):
        less = min(rest, spent[cause])
        spent[cause] -= less
        rest -= less
    return tuple(Part(cause, seconds, seconds / run.seconds) for cause, seconds in spent.items())


def _binding(run: StepRun, parts: tuple[Part, ...]) -> tuple[str, str]:
    """The largest part."""
    largest = max(parts, key=lambda part: part.seconds)
    if largest.cause != PACE:
        return _KINDS[largest.cause]
    slowest = max(run.launches, key=lambda launch: launch.seconds)
    return "pace", f"pace of the programs: {bounds(slowest.pipeline).binding}"
