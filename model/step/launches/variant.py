"""The launches of a serving step: how the kernels of a variant deal its sequences, in which order, and with which loop."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

from tilecast.model.kernel.variants.fa3 import Fa3Variant
from tilecast.model.kernel.variants.hopper import serving as hopper_serving
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.pipeline.graph import Pipeline
from tilecast.model.pipeline.soft_cap import with_cap
from tilecast.model.step.batch import Batch
from tilecast.model.step.launches.classes import CLASSES, StepVariant
from tilecast.model.step.launches.dealing import Dealing


def dealing(variant: StepVariant, heads: Workload) -> Dealing:
    """How kernels of ``variant`` deal sequences of a model's ``heads``, one by one (`launched` knows their company)."""
    return CLASSES[variant.family].dealing(variant, multiplied(variant, heads))


def launched(variant: StepVariant, batch: Batch, sms: int, dealt: Dealing | None = None) -> Dealing:
    """How a launch of ``variant`` for ``batch`` on ``sms`` SMs deals: the same bits for each sequence, but maybe in fewer items.  ``dealt``:
    for which sequences it is (default: all that the kernel takes)."""
    return CLASSES[variant.family].launched(dealt or dealing(variant, batch.heads), batch, sms)


def launches(variants: tuple[StepVariant, ...], batch: Batch, sms: int) -> list[tuple[StepVariant, Dealing]]:
    """The launches of a step in their order, where a sequence of ``batch`` may be for one: those of `kernels.serving.operator`."""
    group = batch.heads.group_size
    lengths = [q for q, _ in batch.lengths]
    # With queries packed a sequence may have any number up to the longest: a kernel is left out only where none can be its, as the shape of
    # q says, which holds the rows of all.
    rest = sum(lengths) - (len(lengths) - 1) * max(lengths)
    least, most = (max(1, rest) if batch.packed else max(lengths)) * group, max(lengths) * group
    given = [(v, dealing(v, batch.heads)) for v in variants]
    # Of two kernels for the same rows the one that begins with more rows takes them, or, where both begin alike, that for fewer.
    begins = sorted(d.least_rows for _, d in given)
    dealt = []
    for v, d in given:
        fewer = [o.most_rows for _, o in given if o.least_rows == d.least_rows and o.most_rows < d.most_rows]
        first, last = (
            max([d.least_rows, *(rows + 1 for rows in fewer)]),
            [rows - 1 for rows in begins if rows > d.least_rows],
        )
        dealt.append((v, replace(d, least_rows=first, most_rows=min([d.most_rows, *last]))))
    if most >= begins[-1]:
        dealt = [(v, one) for v, d in dealt for one in _halved(d)]
    wanted = [(v, d) for v, d in dealt if d.least_rows <= most and least <= d.most_rows]
    # The few rows first, which leave SMs to the most; last those between, of which there are rarely any.
    wanted = sorted(wanted, key=lambda one: one[1].least_rows)
    wanted = [*wanted[:1], *wanted[:0:-1]]
    joined = [False, *(a.beside and b.follows for (_, a), (_, b) in itertools.pairwise(wanted)), False]
    return [
        (v, launched(v, batch, sms, replace(d, beside=after, follows=before)))
        for (v, d), (before, after) in zip(wanted, itertools.pairwise(joined), strict=True)
    ]


def _halved(dealt: Dealing) -> tuple[Dealing, ...]:
    """Beside a launch for the most rows: sequences of half a tile's rows have one of their own, and so have the others.  Where a kernel has no
    such form the one launch it is."""
    if not dealt.least_rows <= dealt.half_rows < dealt.most_rows:
        return (dealt,)
    few, rest = replace(dealt, most_rows=dealt.half_rows), replace(dealt, least_rows=dealt.half_rows + 1)
    return tuple(replace(half, follows=True) for half in (few, rest))


def multiplied(variant: StepVariant, heads: Workload) -> Workload:
    """Heads with as many columns as the variant's kernel multiplies and sums up."""
    if not CLASSES[variant.family].narrower:
        return heads
    columns, columns_v = hopper_serving.own_columns(heads.head_dim_qk, heads.head_dim_v)
    return replace(heads, head_dim_qk=columns, head_dim_v=columns_v)


def loop(
    heads: Workload,
    variant: StepVariant,
    machine: Machine,
    page: int,
    programs: int | None = None,
    capped: bool = False,
) -> Pipeline:
    """The loop of ``programs`` programs on an SM (default: as many as there are), of scores with a soft cap where they are ``capped``."""
    of_class = CLASSES[variant.family]
    made = of_class.loop(heads, variant, machine, page, programs)
    return with_cap(made, machine, of_class.cap) if capped else made


def forward_of(variant: StepVariant, heads: Workload) -> Fa3Variant | None:
    """The variant of forward kernels whose loop kernels of ``variant`` have, None where they have one of their own."""
    found = CLASSES[variant.family].forward
    return None if found is None else found(variant, heads)


def in_turn(variant: StepVariant, dealt: Dealing) -> StepVariant:
    """The variant whose loop programs of a launch run: one program of an SM that takes runs of splits has rings of its own, and tiles of
    few rows have a loop of their own."""
    found: StepVariant = CLASSES[variant.family].in_turn(variant, dealt)
    return found


def splitting(variant: StepVariant, keys: int) -> StepVariant:
    """The variant with splits of ``keys`` keys, whatever the heads."""
    knobs: dict[str, Any] = dict.fromkeys(CLASSES[variant.family].split_knobs, keys)
    return replace(variant, **knobs)


def title(variant: StepVariant) -> str:
    """The variant's tile and warps, for a line of text."""
    return CLASSES[variant.family].title(variant)
