"""How the kernels of each class deal a step and which loop they run: by the rules of their own host code and first lines.

What differs between kernel classes of serving steps is said here and nowhere else in `step/`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tilecast.model.kernel.variants.fa3 import WIDE, Fa3Variant
from tilecast.model.kernel.variants.hopper import mla as hopper_mla
from tilecast.model.kernel.variants.hopper import prefill as hopper_prefill
from tilecast.model.kernel.variants.hopper import runs as hopper_runs
from tilecast.model.kernel.variants.hopper import serving as hopper_serving
from tilecast.model.kernel.variants.hopper.mla import HopperMlaVariant
from tilecast.model.kernel.variants.hopper.prefill import HopperPrefillVariant
from tilecast.model.kernel.variants.hopper.runs import own_run_of, programs_beside, runs_of
from tilecast.model.kernel.variants.hopper.serving import (
    HopperRunsVariant,
    HopperServingE4m3Variant,
    HopperServingVariant,
)
from tilecast.model.kernel.variants.serving import DECODE_ROWS, ServingVariant, split_limit
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.pipeline import fa3
from tilecast.model.pipeline.graph import Pipeline
from tilecast.model.pipeline.serving import apart, latent, portable
from tilecast.model.pipeline.soft_cap import DIVISION, TANGENT, SoftCap
from tilecast.model.step.batch import Batch
from tilecast.model.step.costs.around import (
    COPY_ENGINE,
    COPY_ENGINE_E4M3,
    COPY_ENGINE_HALF_RUNS,
    COPY_ENGINE_RUNS,
    COPY_ENGINE_SEVERAL,
    COPY_ENGINE_WIDE,
    LATENT,
    LATENT_RUNS,
    LATENT_TURNED,
    POINTERS,
    Counts,
)
from tilecast.model.step.costs.runs import shares_of
from tilecast.model.step.costs.tiles import AROUND_PARTS, CHAINED, PARTED, PREFILL, TileCounts, of_warpgroups
from tilecast.model.step.launches.dealing import FAR, Dealing, Parting, keys_seen, limits

#: Variants that a step is forecast with.
StepVariant = (
    ServingVariant
    | HopperServingVariant
    | HopperServingE4m3Variant
    | HopperRunsVariant
    | HopperPrefillVariant
    | HopperMlaVariant
)


@dataclass(frozen=True, slots=True)
class KernelClass:
    """What differs between kernel classes of serving steps."""

    dealing: Callable[[Any, Workload], Dealing]
    loop: Callable[[Workload, Any, Machine, int, int | None], Pipeline]
    title: Callable[[Any], str]
    #: Knobs that say how many keys a split has.
    split_knobs: tuple[str, ...] = ()
    #: What a launch makes of it for a batch.
    launched: Callable[[Dealing, Batch, int], Dealing] = lambda dealt, _batch, _sms: dealt
    #: The variant whose loop programs of a launch run.
    in_turn: Callable[[Any, Dealing], Any] = lambda variant, _dealt: variant
    #: Whether its kernels take heads of fewer columns than their own, as if they were as wide.
    narrower: bool = False
    #: The variant of forward kernels whose loop its kernels have.
    forward: Callable[[Any, Workload], Fa3Variant] | None = None
    #: How its kernels bend scores.
    cap: SoftCap = DIVISION


def _portable(v: ServingVariant, heads: Workload) -> Dealing:
    decodes = v.tile_m <= DECODE_ROWS
    least, most = (1, DECODE_ROWS) if decodes else (DECODE_ROWS + 1, FAR)
    limit = split_limit(v, heads.heads_kv)
    return Dealing(
        least, most, v.tile_m, v.tile_n, v.split_keys, v.whole_keys, limit, False, v.programs, v.waves, v.warps, False, POINTERS
    )  # fmt: skip


def _hopper(v: HopperServingVariant, heads: Workload) -> Dealing:
    keys = v.split_keys_of_many if heads.heads_kv >= v.many_heads else v.split_keys
    most = 1 << hopper_serving.split_limit(v, heads.heads_kv).bit_length() - 1
    rows = hopper_serving.ROWS
    return Dealing(
        1, rows, rows, v.tile_n, keys, v.whole_keys, most, True, 1, 1, 4, True,
        COPY_ENGINE_WIDE if heads.head_dim_v > WIDE else COPY_ENGINE, beside=True, follows=True,
    )  # fmt: skip


def _e4m3(v: HopperServingE4m3Variant, heads: Workload) -> Dealing:
    """The same in tiles of 16 rows, of sequences of up to 32."""
    return replace(
        _hopper(v, heads), most_rows=hopper_serving.MOST_ROWS_E4M3, tile_m=hopper_serving.ROWS_E4M3, split_rows=hopper_serving.ROWS,
        tiles_first=True, counts=COPY_ENGINE_E4M3, beside=False, follows=False,
    )  # fmt: skip


def _runs(v: HopperRunsVariant, heads: Workload) -> Dealing:
    """The same in tiles of 16 rows, of sequences of no more, by programs that take in splits one after the other."""
    rows = hopper_serving.ROWS_E4M3
    return replace(
        _hopper(v, heads), most_rows=rows, tile_m=rows, programs=v.programs, merges_beside=False, counts=COPY_ENGINE_RUNS, fold=v.fold,
        shrinks=v.shrinks, follows=False, rounds=v.direct_rounds, half_rows=0 if v.narrow else hopper_serving.ROWS_HELD,
        own_runs=hopper_runs.has_own_runs(v.narrow, heads.head_dim_qk, heads.head_dim_v),
    )  # fmt: skip


def _runs_launched(dealt: Dealing, batch: Batch, sms: int) -> Dealing:
    """Each split has a program where all that there may be fit on the device at once, or in two rounds, or each run of some where these have
    nearly all places at once; otherwise there is a program to an SM, which takes runs of a sequence's splits until there are none."""
    work, group = batch.workload(), batch.heads.group_size
    rows = min(dealt.tile_m, dealt.most_rows)
    dealt = replace(dealt, queries=max(1, min(work.seqlen_q, rows // group)))
    half = min(work.seqlen_q * group, rows) <= dealt.half_rows
    splits = 1 if work.seqlen_k <= dealt.whole_keys else min(dealt.most_splits, -(-work.seqlen_k // dealt.split_keys))
    own_run = 0
    if work.seqlen_q * group <= dealt.tile_m:
        size = float(len(batch.lengths) * work.seqlen_k * work.heads_kv * batch.key_bytes)
        own_run = own_run_of(
            splits, len(batch.lengths), work.heads_kv, dealt.programs * sms, dealt.rounds, dealt.fold if dealt.own_runs else 0, size
        )  # fmt: skip
    if own_run:
        counts: Counts = COPY_ENGINE_HALF_RUNS if half else dealt.counts
        if work.seqlen_q > 1:
            counts = replace(counts, set_up=counts.set_up + COPY_ENGINE_SEVERAL)
        return replace(dealt, direct=True, own_run=own_run, counts=counts)
    sequences = tuple(dealt.shared(q, k, batch.heads) for q, k in batch.lengths if dealt.takes(q * group))
    some = 0
    if dealt.beside:
        some = programs_beside(sequences, *_others(dealt, batch), sms, work.heads_kv, dealt.fold)
    runs = runs_of(sequences, some or sms, work.heads_kv, dealt.fold, dealt.shrinks)
    counts = shares_of(len(batch.lengths), half, dealt.beside)
    return replace(dealt, runs=runs, programs=1, counts=counts, some=some if some < sms else 0)


def _others(dealt: Dealing, batch: Batch) -> tuple[float, int]:
    """What the launch for more rows takes of a key head, in blocks of ``dealt``, and its tiles."""
    heads = batch.heads
    left, right = limits(heads)
    around, total, tiles = hopper_runs.OTHER_AROUND // dealt.tile_n, 0, 0
    for q, k in batch.lengths:
        if (rows := q * heads.group_size) > hopper_runs.FEW_ROWS:
            blocks = -(-keys_seen(q, k, left, dealt.tile_n)[1] // dealt.tile_n)
            seen = blocks - (q // (2 * dealt.tile_n) if right < FAR else 0)
            of_sequence = -(-rows // hopper_runs.OTHER_ROWS)
            total, tiles = total + of_sequence * (seen + around), tiles + of_sequence
    return total * hopper_runs.other_pace(heads.head_dim_qk), tiles


def _mla(v: HopperMlaVariant, heads: Workload) -> Dealing:
    many = heads.heads_q >= v.many_heads
    keys = v.split_keys_of_many if many else v.split_keys
    return Dealing(
        1, FAR, hopper_serving.ROWS, hopper_mla.KEYS, keys, v.whole_keys, v.most_splits, True, 1, 1, 4, True, LATENT,
        split_rows=hopper_mla.SPLIT_QUERIES * heads.group_size, together=v.merged,
    )  # fmt: skip


def _mla_launched(dealt: Dealing, batch: Batch, sms: int) -> Dealing:
    """Query heads in parts that fit a tile, smaller ones where SMs would be idle; splits one after the other, in runs, where dealing
    them out takes longer, for each leaves what it has of its rows and is merged, or leaves more than L2 holds."""
    work = batch.workload()
    queries, group = work.seqlen_q, work.group_size
    splits = 1
    if work.seqlen_k > dealt.whole_keys:
        splits = min(dealt.most_splits, -(-work.seqlen_k // dealt.split_keys))
    sizes = [parts for parts in range(1, group + 1) if group % parts == 0 and group // parts <= dealt.tile_m]
    items = len(batch.lengths) * work.heads_kv * splits
    fewer = [parts for parts in sizes if items * parts <= sms and group // parts >= hopper_mla.FEWEST_HEADS]
    parts = max(fewer, default=sizes[0])
    split_tiles = -(-min(queries, hopper_mla.SPLIT_QUERIES) * (group // parts) // dealt.tile_m)
    tiles = len(batch.lengths) * work.heads_kv * parts * split_tiles
    rounds, rows, heads = -(-tiles * splits // sms), min(dealt.tile_m, queries * group // parts), work.heads_kv * parts
    few = 128 * max(splits, rounds) > (128 + 3 * rows) * rounds and tiles * splits * rows <= hopper_mla.MOST_LEFT
    chained = splits > 1 and heads <= sms and not few
    turned = 0 if chained else hopper_mla.turned_rows(queries * group // parts)
    alone = queries == 1 and items * parts <= sms
    found = replace(
        dealt, head_parts=parts, split_rows=hopper_mla.SPLIT_QUERIES * (group // parts), chained=chained, turned=turned, apart=turned > 0 and alone,
        counts=LATENT_TURNED if turned else dealt.counts,
    )  # fmt: skip
    teams = min(sms, tiles * splits) // heads
    most = FAR if len(batch.lengths) * split_tiles <= teams else hopper_mla.MOST_APART - 1
    return replace(found, teams=_teams(found, batch, teams), most_apart=most, counts=LATENT_RUNS) if chained else found


def _teams(dealt: Dealing, batch: Batch, teams: int) -> int:
    """``teams`` that share all splits in runs; 0 where each had better take whole tiles: a shared one takes about a split's time more, and an
    eighth of one for each of its splits, which are handed over or join later."""
    heads, group = batch.heads, batch.heads.group_size // dealt.head_parts
    left = limits(heads)[0]
    shapes = [
        (-(-q * group // dealt.tile_m), dealt.splits_of(q * group, keys_seen(q, k, left, dealt.tile_n)[1])[0])
        for q, k in batch.lengths
    ]
    tiles, splits = sum(count for count, _ in shapes), max(splits for _, splits in shapes)
    rounds = -(-sum(count * splits for count, splits in shapes) // teams)
    return 0 if tiles <= teams and rounds + 1 + splits // 8 >= splits else teams


def _prefill(v: HopperPrefillVariant, heads: Workload) -> Dealing:
    rows = hopper_serving.ROWS
    room = hopper_prefill.MOST_NUMBERS // (rows * v.warpgroups * (heads.head_dim_v + 2))
    # Where registers do not hold O of a tile's parts so far beside that of the next one, and shared memory has no room for it.
    left = heads.head_dim_v > WIDE and not hopper_prefill.aside(v.warpgroups, heads.head_dim_v)
    parting = Parting(
        hopper_prefill.SMS,
        hopper_prefill.MOST_PARTS,
        v.part_keys,
        room,
        min(hopper_prefill.MOST_PLACES, room),
        2 * left,
        hopper_prefill.whole_keys(v, heads.head_dim_v),
        hopper_prefill.SMALL_PARTS,
    )
    few = v.warpgroups == 1
    return Dealing(
        hopper_serving.ROWS_E4M3 + 1 if few else rows + 1,
        rows if few else FAR,
        rows * v.warpgroups,
        v.tile_n,
        0,
        0,
        1,
        False,
        1,
        1,
        4,
        True,
        of_warpgroups(PREFILL, v.warpgroups),
        parting=parting,
        beside=True,
        follows=True,
    )


def _prefill_launched(dealt: Dealing, batch: Batch, sms: int) -> Dealing:
    """Keys are parted where some sequence may want it; a program takes in a tile's parts one after the other where dealing them out
    would hardly be faster."""
    work, parting = batch.workload(), dealt.parting
    if parting is None:
        return dealt
    keys, rows = -(-work.seqlen_k // dealt.tile_n) * dealt.tile_n, work.seqlen_q * work.group_size
    left = work.window[0] if work.window is not None else -1
    if left >= 0:
        keys = min(keys, work.seqlen_q + left + 2 * dealt.tile_n)
    tiles = -(-rows // dealt.tile_m)
    most, total = parting.wanted(tiles * work.heads_kv, keys), len(batch.lengths) * tiles
    if batch.packed:
        # Sequences of any lengths up to the longest, fewest rows and in all as many queries; of as many keys as queries where one list has both.
        own = batch.page == 0 and all(q == k for q, k in batch.lengths)
        most = max(
            parting.wanted(
                count * work.heads_kv,
                min(keys, -(-(count * dealt.tile_m // work.group_size) // dealt.tile_n) * dealt.tile_n)
                if own
                else keys,
            )
            for count in range(1, min(tiles, parting.sms) + 1)
        )
        rows = batch.queries * work.group_size
        total = min(total, rows // dealt.tile_m + len(batch.lengths), rows // dealt.least_rows)
    total *= work.heads_kv
    if most < 2:
        return replace(dealt, parting=None)
    alike = 3 * -(-total // sms) * most <= 4 * -(-total * most // sms)
    # A program that takes in one part after the other merges between them; a merge of others' parts keeps it from its next item.
    found = replace(dealt, merges_beside=False, places=total * most)
    if not (alike or total * most > parting.room):
        joined = most > hopper_prefill.most_merged(dealt.counts.finishers, work.head_dim_v)
        return replace(found, joined=joined, counts=_parted(PARTED, dealt, work.head_dim_v, joined))
    counts = _parted(CHAINED, dealt, work.head_dim_v, False)
    chained = replace(found, chained=True, counts=counts, places=parting.chained * sms)
    if len(batch.lengths) == 1:
        return chained
    return replace(chained, longer=hopper_prefill.CHAIN / sms, places=chained.places + min(parting.some, total * most))


def _parted(counts: TileCounts, dealt: Dealing, head_dim_v: int, joined: bool) -> TileCounts:
    """Counts of the warpgroups of a launch whose tiles have parts, which a launch of its own merges where they are ``joined``."""
    assert dealt.parting is not None
    found = replace(of_warpgroups(counts, dealt.counts.finishers), kept=not dealt.parting.chained)
    by_last, by_launch = next(around for columns, around in AROUND_PARTS.items() if head_dim_v <= columns)
    # No program merges for others where what a tile has so far is in shared memory.
    apart = joined or hopper_prefill.aside(found.finishers, head_dim_v)
    return replace(found, around_parts=by_launch if apart else by_last)


def _hopper_loop(w: Workload, v: HopperServingVariant, m: Machine, _page: int, _programs: int | None) -> Pipeline:
    """One warpgroup, one thing after the other: the loop of a `fa3` kernel without overlap."""
    like = Fa3Variant(
        warpgroups=1, tile_n=v.tile_n, kv_stages=v.kv_stages, overlap=False, ping_pong=False, rescale="always"
    )
    return replace(fa3.build(w, like, m), name=f"serving on Hopper 64x{v.tile_n}")


def _forward(v: HopperPrefillVariant, w: Workload) -> Fa3Variant:
    return Fa3Variant(
        warpgroups=v.warpgroups, tile_n=v.tile_n, kv_stages=v.kv_stages, q_stages=hopper_prefill.q_tiles(w), overlap=True,
        ping_pong=False, rescale="anchored",
    )  # fmt: skip


def _prefill_loop(w: Workload, v: HopperPrefillVariant, m: Machine, _page: int, _programs: int | None) -> Pipeline:
    return replace(fa3.build(w, _forward(v, w), m), name=f"prefill on Hopper {64 * v.warpgroups}x{v.tile_n}")


def _e4m3_loop(w: Workload, v: HopperServingE4m3Variant, m: Machine, _page: int, programs: int | None) -> Pipeline:
    return apart.build(w, v, m, hopper_serving.shared_bytes_e4m3(v, w), 1 if programs is None else programs)


def _runs_loop(w: Workload, v: HopperRunsVariant, m: Machine, _page: int, programs: int | None) -> Pipeline:
    shared = hopper_serving.shared_bytes_runs(v, w, v.kv_stages)
    return apart.build(w, v, m, shared, v.programs if programs is None else programs)


def _one_program(v: HopperRunsVariant, dealt: Dealing) -> HopperRunsVariant:
    if dealt.runs is None:
        return v
    return replace(v, kv_stages=max(v.dealt_stages, v.beside_stages if dealt.some else 1), programs=1)


def _mla_turned(v: HopperMlaVariant, dealt: Dealing) -> HopperMlaVariant:
    return hopper_mla.turned(v, dealt.turned, dealt.apart) if dealt.turned else v


def _mla_loop(w: Workload, v: HopperMlaVariant, m: Machine, _page: int, _programs: int | None) -> Pipeline:
    return latent.build_turned(w, v, m) if isinstance(v, hopper_mla.HopperMlaTurned) else latent.build(w, v, m)


#: By variant family.
CLASSES = {
    "serving": KernelClass(_portable, portable.build, lambda v: f"{v.tile_m}x{v.tile_n} {v.warps} warps", ("split_keys",)),
    "serving-hopper": KernelClass(
        _hopper, _hopper_loop, lambda v: f"64x{v.tile_n} one warpgroup", ("split_keys", "split_keys_of_many"), narrower=True
    ),
    "prefill-hopper": KernelClass(
        _prefill, _prefill_loop, lambda v: f"{64 * v.warpgroups}x{v.tile_n} {'one warpgroup' if v.warpgroups == 1 else f'{v.warpgroups} warpgroups'}",
        launched=_prefill_launched, narrower=True, forward=_forward, cap=TANGENT,
    ),
    "serving-hopper-e4m3": KernelClass(
        _e4m3, _e4m3_loop, lambda v: f"16x{v.tile_n} four warps apart", ("split_keys", "split_keys_of_many")
    ),
    **{family: KernelClass(
        _runs, _runs_loop, lambda v: f"16x{v.tile_n} four warps apart", ("split_keys", "split_keys_of_many"),
        launched=_runs_launched, in_turn=_one_program, narrower=narrower,
    ) for family, narrower in (("serving-hopper-runs", True), ("serving-hopper-runs-e4m3", False))},
    "mla-hopper": KernelClass(
        _mla, _mla_loop, lambda v: f"64x{hopper_mla.KEYS} two warpgroups", ("split_keys", "split_keys_of_many"),
        launched=_mla_launched, in_turn=_mla_turned,
    ),
}  # fmt: skip
