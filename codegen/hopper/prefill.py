"""What the template of Hopper's prefill kernels needs to know: packed, cached and paged keys in Gluon.

Python decides here, `templates/hopper_prefill.py.j2` only writes.  The loop is `hopper_ws`'s with a window, of which none and
causal are cases at run time.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import ClassVar

from tilecast.codegen.gluon import in_lines, quoted
from tilecast.codegen.hopper.forward_form import Piece
from tilecast.codegen.hopper.forward_kernel import HopperKernel
from tilecast.codegen.hopper.serving import EIGHTHS, FACTOR_STRIDES, FACTORS, POINTERS, STRIDES, own_copies
from tilecast.codegen.masks import SEEN_OF_SEQUENCE
from tilecast.model.kernel.header import dims_text
from tilecast.model.kernel.variants.fa3 import WIDE
from tilecast.model.kernel.variants.hopper.prefill import (
    ASKING,
    CHAIN,
    JOIN_AHEAD,
    JOIN_COLUMNS,
    MOST_MERGED,
    MOST_NUMBERS,
    MOST_PARTS,
    MOST_PLACES,
    SMALL_PARTS,
    SMS,
    HopperPrefillVariant,
    aside,
    most_merged,
    q_tiles,
    whole_keys,
)
from tilecast.model.kernel.variants.hopper.serving import PIECE, ROWS, takes_narrower
from tilecast.model.kernel.workload import Workload

TEMPLATE = "hopper_prefill.py.j2"
TARGETS = ("sm_90a",)
_SIZES = ("heads_kv", "group", "inverse", "seqlen_q", "seqlen_k", "left", "right", "rows_min", "rows_max")
_NUMBERS = (*STRIDES, "stride_table", *FACTOR_STRIDES, "count", *_SIZES)
#: What the launch that merges parts reads and writes.
_JOIN_POINTERS = ("out", "lse", "sinks", "cu_q", "cu_k", "used_k", "v_scales", "partials")
#: (registers of a thread of a consumer, of the two warps that take tiles and copy, at launch) by consumers.
_REGISTERS = {1: (240, 104, 240), 2: (216, 80, 168), 3: (152, 56, 128)}

#: The same where O leaves few to a thread, and there are several.
_WIDE = (224, 64, 168)

_PARTED_PLACES = (
    "how, places, most_tiles, most = _dealing(batch, heads_kv, group, seqlen_q, seqlen_k, sms, None if cu_q is None else q.shape[0], max(rows[0], 1), window[0], alike)",
    "need, room = _room(how, places), [x.shape[0] for x in work]",
    "if room[0] < need[0] or room[1] < need[1]:",
    '    raise ValueError(f"work: expected room for {need} numbers, as scratch says, got {room}")',
    "items = max(items, places) if how >= 2 else items",
)


@dataclass(frozen=True, slots=True)
class HopperPrefillKernel(HopperKernel):
    """Everything `TEMPLATE` reads except the header, as ``k``."""

    planned: int = 32
    part_keys: int = 1024
    #: Columns of a piece.
    piece: ClassVar[int] = PIECE
    #: What roles tell each other of a tile.
    facts: ClassVar[int] = 7
    part_facts: ClassVar[int] = 4
    #: What parts of a sequence's keys are to fill, and most parts of a sequence.
    sms: ClassVar[int] = SMS
    most_parts: ClassVar[int] = MOST_PARTS
    #: Parts of a tile that its last program merges; where they are more, columns of O that a program of the launch for that has, and parts that are
    #: on their way to it.
    most_merged: int = MOST_MERGED
    #: Keys up to which a sequence is not parted, where that is not what its parts have.
    whole_keys: int = 0
    small_parts: ClassVar[int] = SMALL_PARTS
    joined_apart: ClassVar[int] = JOIN_COLUMNS
    joined_ahead: ClassVar[int] = JOIN_AHEAD
    asking: ClassVar[int] = ASKING
    #: Numbers that parts of a launch may leave; which tiles' parts are dealt out where others' are not, and how many.
    most_numbers: ClassVar[int] = MOST_NUMBERS
    chain: ClassVar[float] = CHAIN
    most_places: ClassVar[int] = MOST_PLACES
    #: Programs of an SM, and how many times as many a launch has: each takes tiles until there are none.
    programs: ClassVar[int] = 1
    waves: ClassVar[int] = 1
    #: Whether a launch may run beside those for other rows that come before and after.
    beside: ClassVar[bool] = True
    #: Whether programs take in runs of splits.
    runs: ClassVar[bool] = False
    #: Whether some launches have options of their own.
    own_options: ClassVar[str] = ""
    latent: ClassVar[bool] = False
    narrow: ClassVar[bool] = False
    #: Whether K and V come by tensor descriptors, and whether programs take tiles of rows until there are none, or parts of them.
    described: ClassVar[bool] = True
    whole: ClassVar[bool] = True

    @property
    def narrower(self) -> bool:
        """Whether heads may have fewer columns than the kernel: the copy engine brings zeros for the rest."""
        return takes_narrower(self.head_dim_qk, self.head_dim_v)

    @property
    def parted_places(self) -> str:
        """Statements of a plan: how parts are taken in, that there is room for what they leave, items with parts dealt out."""
        return "\n    ".join(("", *_PARTED_PLACES))

    @property
    def problem_scales(self) -> str:
        """The last arguments of a problem: with a soft cap that bends scores, scores are exponents already."""
        return "1.0 if CAPPED else scale, scale, rows.cap_log2 if CAPPED else None"

    @property
    def joined(self) -> int:
        """Columns of O that are merged at a time: as many as there are registers for twice."""
        return self.head_dim_v if self.head_dim_v <= WIDE else 64

    @property
    def aside(self) -> bool:
        """Whether what a tile has so far is in shared memory; then O is in pieces, which are read back one by one."""
        return aside(self.warpgroups, self.head_dim_v)

    @property
    def kept_of_program(self) -> int:
        """Places in memory that a program has for what its tile has so far: none where that stays on the SM."""
        return 2 if self.joined < self.head_dim_v and not self.aside else 0

    @property
    def in_pieces(self) -> bool:
        """Whether tiles are tuples of pieces: always, of one piece as well."""
        return True

    @property
    def uneven(self) -> bool:
        """Whether warpgroups may see different key blocks: written for one of them as well."""
        return True

    @property
    def batch_fields(self) -> str:
        """What both roles know of the sequences."""
        return " ".join(("cu_q", "cu_k", "used_k", "table", "slots", "stride_table", "count", *_SIZES))

    @property
    def rows_fields(self) -> str:
        """What consumers know of their tensors."""
        strides = (name for name in STRIDES if not name.startswith("stride_q"))
        known = (
            "out",
            "lse",
            "sinks",
            "k_scales",
            "v_scales",
            "partials",
            "arrived",
            *strides,
            *FACTOR_STRIDES,
            *FACTORS,
        )
        return " ".join((*known, *["eighths"] * self.narrower))

    @staticmethod
    def own_fields(name: str, fields: str) -> str:
        """Arguments that make a role's own copy of a named tuple: of its numbers, which roles would compute with alike."""
        return own_copies(name, fields, _NUMBERS)

    @property
    def unspecialized(self) -> str:
        """Numbers that the compiled code must not depend on."""
        return quoted(self._sizes)

    @property
    def _sizes(self) -> tuple[str, ...]:
        """Numbers of a launch, in the order of the kernel's arguments."""
        return (*_NUMBERS, *(EIGHTHS if self.narrower else ()))

    @property
    def signature(self) -> str:
        """The head of the kernel."""
        names = [
            *POINTERS,
            *self._sizes,
            *FACTORS,
            "PAGE: gl.constexpr",
            "CAPPED: gl.constexpr",
            "BESIDE: gl.constexpr",
            "PARTS: gl.constexpr",
            "JOINS: gl.constexpr",
        ]
        return in_lines(", ".join(names), "def attention(", "):")

    @property
    def join_unspecialized(self) -> str:
        """Numbers that the code of the launch that merges must not depend on."""
        return quoted(self._join_sizes)

    @property
    def _join_sizes(self) -> tuple[str, ...]:
        """Numbers of that launch: those of outputs and lengths."""
        apart = ("stride_q", "stride_table", "stride_k")
        return (*(name for name in _NUMBERS if not name.startswith(apart)), *EIGHTHS[1:] * self.narrower)

    @property
    def join_signature(self) -> str:
        """The head of the kernel that merges."""
        return in_lines(", ".join((*_JOIN_POINTERS, *self._join_sizes)), "def attention_join(", "):")

    def joined_fields(self, fields: str) -> str:
        """Of the fields of a named tuple, those that the kernel that merges has; it asks for no other."""
        known = {name: name for name in (*_JOIN_POINTERS, *self._join_sizes)} | {"eighths": EIGHTHS[1]}
        return ", ".join(known.get(name, "None") for name in fields.split())

    @property
    def join_arguments(self) -> str:
        """What a plan gives it."""
        values = {
            "stride_ob": "*(n // 8 for n in out_strides)", "stride_os": "", "stride_oh": "",
            "stride_lb": "*lse_strides", "stride_ls": "", "stride_lh": "",
            "stride_vb": "*((0, 0) if v_scales is None else v_scales.stride())", "stride_vg": "",
            "partials": "work[0]", "count": "batch", "inverse": "(1 << 20) // group + 1", "seqlen_k": "min(seqlen_k, FAR.value)",
            "rows_min": "max(rows[0], 1)", "rows_max": "min(rows[1], FAR.value)",
            "eighths_v": f"None if v.shape[-1] == {self.head_dim_v} else v.shape[-1] // 8",
        }  # fmt: skip
        names = (*_JOIN_POINTERS, *self._join_sizes)
        return ", ".join(text for name in names if (text := values.get(name, name)))

    @property
    def zeros(self) -> str:
        """O before any key."""
        return "first_o(v)"

    @property
    def scaled_o(self) -> str:
        """O times the factor of a step."""
        return "scaled_pieces(o, factor)"

    @property
    def _finish_qk(self) -> tuple[str, str]:
        return "s = warpgroup_mma_wait(len(o), deps=[s])", "release(tile.k, n + 1)"

    @property
    def _finish_pv(self) -> tuple[str, str]:
        return "o = finished(o)", "release(tile.v, n)"

    @property
    def product_statements(self) -> tuple[str, ...]:
        """The matrix products of an iteration, until S is there, bent by a soft cap."""
        # HopperKernel by name: a class with slots is made anew, and `super()` without arguments means the one before.
        return (*HopperKernel.product_statements.fget(self), "s = capped(s, tile.problem)")  # type: ignore[attr-defined]

    @property
    def first_softmax(self) -> str:
        """The first step of the softmax, O before it, and the end of V, which the first product of P takes in."""
        clear = "clear_end(g, items, turn, v, n, end * TILE_N - k_len, opens)"
        return f"{HopperKernel.first_softmax.fget(self)}\n{clear}"  # type: ignore[attr-defined]

    @property
    def release_single(self) -> str:
        """The end of Q where all blocks were one and no other part follows."""
        return "if closes:\n        release(q, q_number)"

    @property
    def gives_q_behind_exponentials(self) -> bool:
        """At head_dim 64, where loops take 5 to 12 % less with it, and at 192/128, whose machine code is forecast to take 20 % less; at 128 it
        is no gain (0.97 to 1.04 of the speed), and more is spilled around the loops."""
        return self.head_dim_v <= PIECE or self.head_dim_qk > self.head_dim_v

    @property
    def consumer_roles(self) -> tuple[str, ...]:
        """Partitions of the consumers."""
        return tuple(
            f"(consumer_role, ({g}, q, k, v, items, batch, rows, CAPPED, PARTS, JOINS)),"
            for g in range(self.warpgroups)
        )


def context(variant: HopperPrefillVariant, workload: Workload) -> HopperPrefillKernel:
    """The kernel of a legal variant."""
    wide = workload.head_dim_v > WIDE and variant.warpgroups > 1
    consumer, load, at_launch = _WIDE if wide else _REGISTERS[variant.warpgroups]
    workers = variant.warpgroups - 1  # the first consumer is the default partition
    return HopperPrefillKernel(
        title=f"Prefill on Hopper for head_dim {dims_text(workload)}: attention to paged, packed or cached keys, many rows to a sequence",
        description=_description(variant),
        mask="window",
        warpgroups=variant.warpgroups,
        rows=ROWS,
        tile_m=ROWS * variant.warpgroups,
        tile_n=variant.tile_n,
        kv_stages=variant.kv_stages,
        q_stages=q_tiles(workload),
        head_dim_qk=workload.head_dim_qk,
        head_dim_v=workload.head_dim_v,
        qk_pieces=_pieces(workload.head_dim_qk),
        v_pieces=_pieces(workload.head_dim_v),
        rescale="anchored",
        rescale_threshold=0.0,
        scheduler="persistent",
        overlap=True,
        ping_pong=False,
        issue_order=("qk", "pv"),
        emulated_eighths=0,
        polynomial=(),
        worker_warps=[4] * workers + [1, 1],
        worker_registers=[consumer] * workers + [load, load],
        registers_at_launch=at_launch,
        planned=variant.planned,
        part_keys=variant.part_keys,
        most_merged=most_merged(variant.warpgroups, workload.head_dim_v),
        whole_keys=whole_keys(variant, workload.head_dim_v),
    )


def _pieces(width: int) -> tuple[Piece, ...]:
    """Columns of a head in pieces of one width, so that boxes of small pages make tiles."""
    return tuple(Piece(offset, PIECE) for offset in range(0, width, PIECE))


def _description(variant: HopperPrefillVariant) -> str:
    lines = [
        SEEN_OF_SEQUENCE,
        f"One warp takes tiles, the next one that no program has, and copies Q, another blocks of {variant.tile_n} keys into rings in shared "
        f"memory, {variant.kv_stages} of K and of V ahead; {variant.warpgroups} consumer warpgroup{'s' * (variant.warpgroups > 1)} of {ROWS} rows, queries of "
        "all heads that share a key head, read them.",
        "Anchored softmax: the row maximum of the first blocks is the reference of all exponentials, until a row outgrows it.",
        "Keys of a sequence whose tiles leave SMs idle are parted, by its own lengths and heads alone; parts are merged in one order, whether "
        "programs take one each or a program those of a tile: what a sequence gets depends on it alone.  Runs on sm_90a with triton and torch alone.",
    ]
    return textwrap.fill("  ".join(lines), 120)
