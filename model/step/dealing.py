"""How kernels of a serving variant deal a step: which sequences they take, how they split them, how many programs there are.

The same rules as the kernels' own host code and first lines; what differs between kernel classes of serving steps is said here and
nowhere else in `step/`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tilecast.model.kernel.variants.fa3 import Fa3Variant
from tilecast.model.kernel.variants.hopper import prefill as hopper_prefill
from tilecast.model.kernel.variants.hopper import serving as hopper_serving
from tilecast.model.kernel.variants.hopper.prefill import HopperPrefillVariant
from tilecast.model.kernel.variants.hopper.serving import HopperServingVariant
from tilecast.model.kernel.variants.serving import DECODE_ROWS, ServingVariant, split_limit
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.pipeline import fa3, serving
from tilecast.model.pipeline.graph import Pipeline
from tilecast.model.step.costs import COPY_ENGINE, POINTERS, Counts

#: Variants that a step is forecast with.
StepVariant = ServingVariant | HopperServingVariant | HopperPrefillVariant
#: More rows and keys than a sequence has.
FAR = 1 << 29


@dataclass(frozen=True, slots=True)
class Dealing:
    """What a launch does with sequences, for heads of one model."""

    #: Rows of the sequences that it takes: queries times query heads that share a key head.
    least_rows: int
    most_rows: int
    #: Rows of a tile, keys of a block.
    tile_m: int
    tile_n: int
    #: Keys of a split, of sequences of one tile and more than ``whole_keys`` keys; 0: none is split.
    split_keys: int
    whole_keys: int
    most_splits: int
    #: Whether a sequence of ``most_splits`` splits has even shares of its blocks; else splits of a multiple of ``split_keys``.
    even: bool
    #: Programs that an SM holds, and how many times as many a launch may have; 1: those that are there take all items in turn.
    programs: int
    waves: int
    #: Warps of a program that merge.
    warps: int
    #: Whether a warpgroup of its own merges, beside the loop.
    merges_beside: bool
    counts: Counts

    def takes(self, rows: int) -> bool:
        """Whether the launch is for sequences of so many rows."""
        return self.least_rows <= rows <= self.most_rows


def dealing(variant: StepVariant, heads_kv: int) -> Dealing:
    """How kernels of ``variant`` deal sequences of ``heads_kv`` key heads."""
    return _CLASSES[variant.family].dealing(variant, heads_kv)


def loop(heads: Workload, variant: StepVariant, machine: Machine, page: int, programs: int | None = None) -> Pipeline:
    """The loop of ``programs`` programs on an SM (default: as many as there are)."""
    return _CLASSES[variant.family].loop(heads, variant, machine, page, programs)


def splitting(variant: StepVariant, keys: int) -> StepVariant:
    """The variant with splits of ``keys`` keys, whatever the heads."""
    knobs: dict[str, Any] = dict.fromkeys(_CLASSES[variant.family].split_knobs, keys)
    return replace(variant, **knobs)


def title(variant: StepVariant) -> str:
    """The variant's tile and warps, for a line of text."""
    return _CLASSES[variant.family].title(variant)


@dataclass(frozen=True, slots=True)
class _Class:
    dealing: Callable[[Any, int], Dealing]
    loop: Callable[[Workload, Any, Machine, int, int | None], Pipeline]
    title: Callable[[Any], str]
    #: Knobs that say how many keys a split has.
    split_knobs: tuple[str, ...] = ()


def _portable(v: ServingVariant, heads_kv: int) -> Dealing:
    decodes = v.tile_m <= DECODE_ROWS
    least, most = (1, DECODE_ROWS) if decodes else (DECODE_ROWS + 1, FAR)
    return Dealing(
        least, most, v.tile_m, v.tile_n, v.split_keys, v.whole_keys, split_limit(v, heads_kv), False, v.programs, v.waves, v.warps, False, POINTERS
    )  # fmt: skip


def _hopper(v: HopperServingVariant, heads_kv: int) -> Dealing:
    keys = v.split_keys_of_many if heads_kv >= v.many_heads else v.split_keys
    most = 1 << hopper_serving.split_limit(v, heads_kv).bit_length() - 1
    return Dealing(
        1,
        hopper_serving.ROWS,
        hopper_serving.ROWS,
        v.tile_n,
        keys,
        v.whole_keys,
        most,
        True,
        1,
        1,
        4,
        True,
        COPY_ENGINE,
    )


def _prefill(v: HopperPrefillVariant, heads_kv: int) -> Dealing:
    rows = hopper_serving.ROWS
    return Dealing(
        rows + 1, FAR, rows * v.warpgroups, v.tile_n, 0, 0, 1, False, 1, 1, 4, True, COPY_ENGINE
    )  # fmt: skip


def _hopper_loop(w: Workload, v: HopperServingVariant, m: Machine, _page: int, _programs: int | None) -> Pipeline:
    """One warpgroup, one thing after the other: the loop of a `fa3` kernel without overlap."""
    like = Fa3Variant(
        warpgroups=1, tile_n=v.tile_n, kv_stages=v.kv_stages, overlap=False, ping_pong=False, rescale="always"
    )
    return replace(fa3.build(w, like, m), name=f"serving on Hopper 64x{v.tile_n}")


def _prefill_loop(w: Workload, v: HopperPrefillVariant, m: Machine, _page: int, _programs: int | None) -> Pipeline:
    like = Fa3Variant(
        warpgroups=v.warpgroups, tile_n=v.tile_n, kv_stages=v.kv_stages, q_stages=hopper_prefill.q_tiles(w), overlap=True,
        ping_pong=False, rescale="anchored",
    )  # fmt: skip
    return replace(fa3.build(w, like, m), name=f"prefill on Hopper {64 * v.warpgroups}x{v.tile_n}")


_CLASSES = {
    "serving": _Class(_portable, serving.build, lambda v: f"{v.tile_m}x{v.tile_n} {v.warps} warps", ("split_keys",)),
    "serving-hopper": _Class(
        _hopper, _hopper_loop, lambda v: f"64x{v.tile_n} one warpgroup", ("split_keys", "split_keys_of_many")
    ),
    "prefill-hopper": _Class(
        _prefill, _prefill_loop, lambda v: f"{64 * v.warpgroups}x{v.tile_n} {v.warpgroups} warpgroups"
    ),
}  # fmt: skip
