"""What the template of Hopper's serving kernels needs to know: paged, packed and split attention in Gluon.

Python decides here, `templates/hopper_serving.py.j2` only writes.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import ClassVar

from tilecast.codegen.gluon import in_lines, quoted
from tilecast.codegen.masks import SEEN_OF_SEQUENCE
from tilecast.model.kernel.header import dims_text
from tilecast.model.kernel.variants.hopper import runs
from tilecast.model.kernel.variants.hopper.serving import (
    PARTS_COLUMNS,
    PIECE,
    Q_SLOTS_RUNS,
    ROWS,
    ROWS_E4M3,
    ROWS_HELD,
    HopperRunsVariant,
    HopperServingE4m3Variant,
    HopperServingVariant,
    piece_e4m3,
    takes_narrower,
)
from tilecast.model.kernel.workload import Workload

TEMPLATE = "hopper_serving.py.j2"
TEMPLATE_RUNS = "hopper_serving_runs.py.j2"
TARGETS = ("sm_90a",)
#: Arguments of serving kernels on Hopper: pointers and descriptors, strides, strides of a cache's factors, factors of scores.
POINTERS = ("q_ptr", "k_desc", "v_desc", "out", "lse", "sinks", "cu_q", "cu_k", "used_k", "table", "slots", "k_scales",
             "v_scales", "partials", "arrived")  # fmt: skip
STRIDES = tuple(f"stride_{tensor}{axis}" for tensor in "qol" for axis in "bsh")
FACTOR_STRIDES = ("stride_kb", "stride_kg", "stride_vb", "stride_vg")
FACTORS = ("scale_log2", "cap_log2")
_SIZES = (
    "heads_kv",
    "group",
    "seqlen_q",
    "seqlen_k",
    "split_bits",
    "split_log2",
    "left",
    "right",
    "rows_min",
    "rows_max",
)
#: Constants of a launch that all have, in the order of the kernel's.
_CONSTANTS = ("PAGE", "CAPPED", "ONE", "PLANNED")
_SCRATCH = ("split_bound", "slot_rows", "split_tiles")
_NUMBERS = (*STRIDES, "stride_table", *FACTOR_STRIDES, "count", *_SIZES, *_SCRATCH)
#: Columns of heads, in eighths of them, where heads may have fewer than the kernel; None: as many.
EIGHTHS = ("eighths_qk", "eighths_v")


def own_copies(name: str, fields: str, numbers: Iterable[str]) -> str:
    """Arguments that make a role's own copy of the named tuple ``name``, of those fields that are ``numbers``."""
    own = set(numbers)
    return ", ".join(f"own_copy({name}.{field})" if field in own else f"{name}.{field}" for field in fields.split())


#: Registers of an SM.
_REGISTERS = 65536
#: Of a thread that are a multiple of eight.
_MOST_REGISTERS = 248


@dataclass(frozen=True, slots=True)
class HopperServingKernel:
    """Everything `TEMPLATE` reads except the header, as ``k``."""

    title: str
    description: str
    head_dim_qk: int
    head_dim_v: int
    tile_n: int
    kv_stages: int
    split_keys: int
    split_keys_of_many: int
    many_heads: int
    whole_keys: int
    most_splits: int
    most_items: int
    merged: int
    planned: int
    tile_m: ClassVar[int] = ROWS
    #: Programs of an SM, and how many times as many a launch has: each takes items until there are none.
    programs: ClassVar[int] = 1
    waves: ClassVar[int] = 1
    latent: ClassVar[bool] = False
    #: What the second tensor map is of.
    second_boxes: ClassVar[str] = "v_desc"
    narrow: ClassVar[bool] = False
    #: The type of Q in shared memory.
    q_dtype: ClassVar[str] = "k_desc.dtype"
    #: Warps of the roles beside the one that multiplies.
    worker_warps: ClassVar[tuple[int, ...]] = (4, 1)
    #: Whether K and V come by tensor descriptors, and whether a sequence's keys are never split.
    described: ClassVar[bool] = True
    whole: ClassVar[bool] = False
    #: Whether the launch for other rows that comes after this one may run beside it.
    beside: ClassVar[bool] = True
    #: Whether programs take in runs of splits, and constants of the launch that a kernel has before ``BESIDE``.
    runs: ClassVar[bool] = False
    last_constants: ClassVar[tuple[str, ...]] = ("Q_ROWS",)
    #: That of these constants under which a launch has options of its own; "" where all have the same.
    own_options: ClassVar[str] = ""

    @property
    def narrower(self) -> bool:
        """Whether heads may have fewer columns than the kernel: the copy engine brings zeros for the rest."""
        return takes_narrower(self.head_dim_qk, self.head_dim_v) and self.described and not (self.latent or self.narrow)

    @property
    def piece(self) -> int:
        """Columns of a piece of K and V; of bytes of e4m3 128 where both have them."""
        return piece_e4m3(self.head_dim_qk, self.head_dim_v) if self.narrow else PIECE

    @property
    def more_keys(self) -> str:
        """Bases of the keys beyond eight that a thread of warps that multiply apart has."""
        return ", ".join(f"[{n}, 0]" for n in (8, 16) if n < self.tile_n // 4)

    @property
    def warp_keys(self) -> str:
        """Bases of the keys that such warps have apart."""
        return f"[{self.tile_n // 4}, 0], [{self.tile_n // 2}, 0]"

    @property
    def merged_rows(self) -> int:
        """Rows that are merged at a time, by four warps: of more columns than 128 half as many, for whose splits a thread has registers."""
        return 4 if self.head_dim_v <= 2 * PIECE else 2

    @property
    def merging(self) -> str:
        """Layout of splits, rows and columns of a merge."""
        across = 4 // self.merged_rows
        return f"[{self.merged}, 1, {self.head_dim_v // 32 // across}], [1, 1, 32], [1, {self.merged_rows}, {across}], [2, 1, 0]"

    @property
    def all_made(self) -> str:
        """The pieces of O when all products are done."""
        waited = "warpgroup_mma_wait(0, deps=made)"
        return f"({waited},)" if self.head_dim_v == self.piece else waited

    @property
    def register_option(self) -> str:
        """What the options of a launch say about registers."""
        warps = 4 + -(-sum(self.worker_warps) // 4) * 4
        return f', "maxnreg": {min(_REGISTERS // (32 * warps) // 8 * 8, _MOST_REGISTERS)}'

    @property
    def worker_registers(self) -> tuple[int, ...]:
        """Registers of a thread of the warpgroup that merges, and of the load warp; the matrix warpgroup has the rest."""
        return 168, 104

    def bits(self, name: str) -> int:
        """log2 of a power of two."""
        return int(getattr(self, name)).bit_length() - 1

    @property
    def batch_fields(self) -> str:
        """What both roles know of the sequences."""
        return " ".join(("cu_q", "cu_k", "used_k", "table", "slots", "stride_table", "count", *_SIZES))

    @property
    def rows_fields(self) -> str:
        """What the softmax role knows of its tensors."""
        known = ("q", "out", "lse", "sinks", "k_scales", "v_scales", *STRIDES, *FACTOR_STRIDES, *FACTORS)
        return " ".join((*known, *(EIGHTHS if self.narrower else ())))

    @property
    def scratch_fields(self) -> str:
        """What it knows of where splits leave what they have."""
        return " ".join(("partials", "arrived", "counters", *_SCRATCH))

    def own(self, name: str, fields: str) -> str:
        """Arguments that make a role's own copy of a named tuple: of its numbers, which roles would compute with alike."""
        return own_copies(name, fields, (*self.numbers, "counters"))

    @property
    def unspecialized(self) -> str:
        """Numbers that the compiled code must not depend on."""
        return quoted(self._sizes)

    @property
    def _sizes(self) -> tuple[str, ...]:
        """Numbers of a launch, in the order of the kernel's arguments."""
        return (*self.numbers, *(EIGHTHS if self.narrower else ()))

    @property
    def numbers(self) -> tuple[str, ...]:
        """Numbers that vary from call to call."""
        return _NUMBERS

    @property
    def options_flag(self) -> int:
        """The place among a launch's constants of that which says whether it has options of its own."""
        return (*_CONSTANTS, *self.last_constants).index(self.own_options)

    @property
    def signature(self) -> str:
        """The head of the kernel."""
        pointers = (self.second_boxes if name == "v_desc" else name for name in POINTERS)
        names = [*pointers, *self._sizes, *FACTORS]
        names += [f"{name}: gl.constexpr" for name in (*_CONSTANTS, *self.last_constants, *["BESIDE"] * self.beside)]
        return in_lines(", ".join(names), "def attention(", "):")


@dataclass(frozen=True, slots=True)
class HopperServingE4m3Kernel(HopperServingKernel):
    """The same for caches that hold e4m3 bytes."""

    tile_m: ClassVar[int] = ROWS_E4M3
    #: Most rows of a sequence whose keys are split: tiles of the same keys are neighbours, so that one brings them and others find them.
    split_rows: ClassVar[int] = ROWS
    narrow: ClassVar[bool] = True
    beside: ClassVar[bool] = False
    q_dtype: ClassVar[str] = "q_ptr.dtype.element_ty"


@dataclass(frozen=True, slots=True)
class HopperRunsKernel(HopperServingKernel):
    """The same for `TEMPLATE_RUNS`, whose warps have keys of their own and whose programs take in runs of splits."""

    #: Programs of an SM.
    resident: int
    fold: int
    #: Blocks in flight of a program that takes items in turn.
    dealt_stages: int
    #: The same beside a launch that has the other SMs.
    beside_stages: int
    #: Whether runs become shorter towards the end of a launch whose rounds are not nearly full; else it has none.
    shrinks: bool

    #: Rounds of programs up to which each split has one of its own.
    direct_rounds: int

    #: The arithmetic by which a launch is dealt out, and its constants.
    rule: ClassVar[ModuleType] = runs

    tile_m: ClassVar[int] = ROWS_E4M3
    runs: ClassVar[bool] = True
    worker_warps: ClassVar[tuple[int, ...]] = (1,)
    last_constants: ClassVar[tuple[str, ...]] = ("DIRECT", "MOST")
    #: Rows of a tile that programs keep of what they have, where no sequence has more.
    few_held: ClassVar[int] = ROWS_HELD
    #: Rows that they keep, by name.
    held: ClassVar[str] = "HELD"
    #: Bytes of keys and values of a launch that are worth having leave L2 first: beyond, an H200 took 3 % longer
    #: (data/measured/h200_decode_policy.csv).
    once_bytes: ClassVar[int] = 200_000_000
    own_options: ClassVar[str] = "DIRECT"
    q_slots: ClassVar[int] = Q_SLOTS_RUNS

    @property
    def wide(self) -> bool:
        """Whether O of each warp leaves no registers to keep Q and values of a block in: they are read piece by piece."""
        return self.head_dim_v > PARTS_COLUMNS

    @property
    def own_runs(self) -> bool:
        """Whether runs of several splits may have a program of their own."""
        return runs.has_own_runs(self.narrow, self.head_dim_qk, self.head_dim_v)

    @property
    def overlaps(self) -> bool:
        """Whether a program that takes items in turn makes the next block's scores under this one's softmax: where registers do for both."""
        return not self.narrow and self.head_dim_qk <= PARTS_COLUMNS

    @property
    def parts_pieces(self) -> int:
        """Pieces of O that warps leave in shared memory at a time, to be added up."""
        return PARTS_COLUMNS // self.piece

    @property
    def many_merged(self) -> int:
        """Rows that are merged at a time, where sequences have more than four."""
        return 4 if self.wide else 8

    @property
    def direct_registers(self) -> int:
        """Registers of a thread at launch where an SM holds several programs."""
        return min(_REGISTERS // (32 * 8 * self.resident) // 8 * 8, _MOST_REGISTERS)

    @property
    def worker_registers(self) -> tuple[int, ...]:
        """Registers of a thread of the load warp where an SM holds several programs."""
        return (72,)

    @property
    def dealt_registers(self) -> int:
        """The same where a program takes items in turn."""
        return 104

    @property
    def batch_fields(self) -> str:
        """What programs know of the sequences."""
        return " ".join(("cu_q", "cu_k", "used_k", "table", "slots", "stride_table", "count", *_SIZES, "sms"))

    def batch_with(self, **changed: str) -> str:
        """What is known of the sequences, but for what has ``changed``."""
        return ", ".join(changed.get(field, f"batch.{field}") for field in self.batch_fields.split())

    @property
    def numbers(self) -> tuple[str, ...]:
        """Numbers that vary from call to call: not the rows of a slot, by which addresses of a merge are constants apart."""
        return (*(name for name in _NUMBERS if name != "slot_rows"), "sms")

    @property
    def scratch_fields(self) -> str:
        """What programs know of where splits leave what they have."""
        return " ".join(("partials", "arrived", *_SCRATCH))


@dataclass(frozen=True, slots=True)
class HopperRunsE4m3Kernel(HopperRunsKernel):
    """The same for caches that hold e4m3 bytes."""

    narrow: ClassVar[bool] = True
    held: ClassVar[str] = "TILE_M"


def context(variant: HopperServingVariant, workload: Workload) -> HopperServingKernel:
    """The kernel of a legal variant."""
    return HopperServingKernel(_title(workload), _description(variant), **knobs(variant, workload))


def context_e4m3(variant: HopperServingE4m3Variant, workload: Workload) -> HopperServingE4m3Kernel:
    """The kernel of a legal variant for caches of e4m3."""
    title, description = _title(workload, "e4m3 caches, "), _description_e4m3(variant)
    return HopperServingE4m3Kernel(title, description, **knobs(variant, workload))


def context_runs(variant: HopperRunsVariant, workload: Workload) -> HopperRunsKernel:
    """The kernel of a legal variant that takes in runs of splits, from 16-bit caches or from caches of e4m3."""
    return (HopperRunsE4m3Kernel if variant.narrow else HopperRunsKernel)(
        _title(workload, "few rows, " + "e4m3 caches, " * variant.narrow),
        _description_runs(variant),
        **knobs(variant, workload),
        resident=variant.programs,
        fold=variant.fold,
        dealt_stages=variant.dealt_stages,
        beside_stages=max(variant.beside_stages, variant.dealt_stages),
        shrinks=variant.shrinks,
        direct_rounds=variant.direct_rounds,
    )


def knobs(variant: HopperServingVariant, workload: Workload) -> dict[str, int]:
    """What kernels of any such class read of their variant and heads."""
    return {
        "head_dim_qk": workload.head_dim_qk,
        "head_dim_v": workload.head_dim_v,
        "tile_n": variant.tile_n,
        "kv_stages": variant.kv_stages,
        "split_keys": variant.split_keys,
        "split_keys_of_many": variant.split_keys_of_many,
        "many_heads": variant.many_heads,
        "whole_keys": variant.whole_keys,
        "most_splits": variant.most_splits,
        "most_items": variant.most_items,
        "merged": variant.merged,
        "planned": variant.planned,
    }


def _title(workload: Workload, caches: str = "") -> str:
    return f"Decoding on Hopper for {caches}head_dim {dims_text(workload)}: attention to paged, packed or cached keys, split over keys"


def _description_e4m3(variant: HopperServingE4m3Variant) -> str:
    loading = (
        f"A load warp copies blocks of {variant.tile_n} keys, bytes of e4m3, into rings in shared memory, {variant.kv_stages} of K and of V ahead; "
        f"four warps own {ROWS_E4M3} rows, the query heads of one key head for consecutive queries, and take a fourth of a block's keys each, which "
        "they make float16, as Q is, in registers; another warpgroup merges.  Q in bfloat16 is scaled by a power of two for each row, so that it fits."
    )
    return _described(loading)


def _description(variant: HopperServingVariant) -> str:
    loading = (
        f"A load warp copies blocks of {variant.tile_n} keys into rings in shared memory, {variant.kv_stages} of K and of V ahead; a "
        f"warpgroup owns {ROWS} rows, the query heads of one key head for consecutive queries, and another one merges."
    )
    return _described(loading)


_WIDENED = ", bytes of e4m3, which they make float16 in registers, as Q is, in bfloat16 by a power of two for each row"


def _description_runs(variant: HopperRunsVariant) -> str:
    loading = (
        f"A program copies blocks of {variant.tile_n} keys into rings in shared memory, {variant.kv_stages} of K and of V ahead, "
        f"{variant.programs} programs to an SM; four warps own {ROWS_E4M3} rows, the query heads of one key head for consecutive queries, and take "
        f"a fourth of a block's keys each{_WIDENED if variant.narrow else ''}.  Where there are more splits than that, an SM has one program, with {variant.dealt_stages} blocks ahead, which takes "
        "runs of a sequence's splits until there are none."
    )
    return _described(loading, ROWS_E4M3)


def _described(loading: str, rows: int = ROWS) -> str:
    lines = [
        SEEN_OF_SEQUENCE,
        loading,
        f"Sequences of up to {rows} rows are split, whatever else is in the batch, and the program that finishes a tile last merges "
        "its splits in their order: what a sequence gets depends on it alone.  Runs on sm_90a with triton and torch alone.",
    ]
    return textwrap.fill("  ".join(lines), 120)
