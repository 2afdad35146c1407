"""What the template of the `hopper_bwd` family needs to know: a FlashAttention-3 class backward in Gluon for sm_90a.

Python decides here, `templates/hopper_backward.py.j2` only writes.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from inspect import getsource

from tilecast.codegen.gluon import in_lines
from tilecast.codegen.host import WINDOW_STATEMENTS, Host
from tilecast.codegen.masks import keys_seen_and_masked
from tilecast.codegen.part_sums import PartSums
from tilecast.codegen.pieces import Piece, pieces
from tilecast.codegen.render import BEST_ALLOCATION
from tilecast.codegen.row_terms import FOR_NARROWER_ROWS, RowTerms, strides
from tilecast.model.kernel.variants import fa3_backward
from tilecast.model.kernel.variants.fa3_backward import Fa3BackwardVariant
from tilecast.model.kernel.workload import Workload

TEMPLATE = "hopper_backward.py.j2"
TARGETS = ("sm_90a",)
#: Registers a thread of the roles that only move data.
_MOVERS = 24
#: What the kernel of the products takes: (tensor, constant of its box's rows).
_BOXES = (
    ("terms", "TILE_M"),
    ("q", "TILE_M"),
    ("dout", "TILE_M"),
    ("k", "TILE_N"),
    ("v", "TILE_N"),
    ("sums", "SUM_ROWS"),
    ("made_dk", "KEYS"),
    ("made_dv", "KEYS"),
)
#: Sums of a tile of dQ that add_chains asks for at a time, and registers of a thread that has them all.
_ASKED, _SUM_REGISTERS = 8, 96
_SIZES = ("seqlen_q", "seqlen_k", "heads_q", "group", "part", "heads", "abreast", "padded", "chains")
_WINDOW = ("window_left", "window_right")


@dataclass(frozen=True, slots=True)
class HopperBackward(RowTerms, PartSums):
    """Everything `TEMPLATE` reads except the header, as ``k``."""

    title: str
    description: str
    mask: str
    head_dim: int
    head_dim_v: int
    variant: Fa3BackwardVariant
    v_pieces: tuple[Piece, ...]

    @property
    def form(self) -> str:
        """Which parts of the template are its: a head that is one tile, or three of dQ's columns."""
        return "whole"

    @property
    def sizes_of_a_head(self) -> str:
        """Constants that say how many columns a head has, and the tiles of them."""
        return f"HEAD_DIM = gl.constexpr({self.head_dim})"

    @property
    def columns_text(self) -> str:
        """Columns of tensors, for a docstring."""
        return str(self.head_dim)

    @property
    def keeps_deltas(self) -> bool:
        """Whether D is a float32 of its own beside pieces of LSE."""
        return bool(self.loaded_terms)

    @property
    def in_pieces(self) -> bool:
        """Products subtract LSE, and at head_dim 64 D too."""
        return True

    @property
    def loaded_terms(self) -> int:
        """Numbers of a row that are loaded as float32."""
        return fa3_backward.loaded_terms(self.variant)

    @property
    def piece_slots(self) -> int:
        """Tiles of pieces that are on their way or in use."""
        return fa3_backward.piece_slots(self.variant)

    @property
    def step(self) -> str:
        """What a warpgroup does in a step."""
        return f"backward/step_{'halves' if self.halves else 'whole'}.j2"

    @property
    def _in_shared(self) -> tuple[tuple[str, str], ...]:
        """(field, what the kernel calls it) of what lies in shared memory: tiles, numbers, barriers."""
        loaded = (("deltas", "deltas_there"),) if self.loaded_terms else ()
        names = ("q", "dout", "k", *(() if self.halves else ("v",)), "ds", "dq", "pieces", "dealt")
        return (*((name, name) for name in names), *loaded, ("barriers", "made"))

    @property
    def barriers(self) -> str:
        """Statements that say where each barrier is, and how many there are."""
        lines, first = [], 0
        for name, count in self._barrier_slots.items():
            lines.append(f"{name} = gl.constexpr({first})")
            first += count
        return "\n".join([*lines, f"BARRIERS = gl.constexpr({first})"])

    @property
    def _barrier_slots(self) -> dict[str, int]:
        """Barriers by what they tell."""
        slots = {"FULL": self.stages, "EMPTY": self.stages, "DQ_EMPTY": self.variant.dq_slots, "DS_FULL": self.stages}
        slots |= {"DEALT_FULL": self.dealt, "DEALT_EMPTY": self.dealt, "KV_FULL": 1, "KV_EMPTY": 1}
        return slots | ({"PIECES_EMPTY": 1} if self.loaded_terms else {})

    @property
    def shared(self) -> str:
        """Fields of what lies in shared memory."""
        return " ".join(field for field, _ in self._in_shared)

    @property
    def new_shared(self) -> str:
        """The statement that collects it."""
        return in_lines(", ".join(name for _, name in self._in_shared), "shared = Shared(", ")", 116)

    @property
    def counters(self) -> bool:
        """Blocks of dQ count the programs that have added to them."""
        return True

    @property
    def begins_early(self) -> bool:
        """Programs of gradients set up under row_terms."""
        return True

    @property
    def sums_beside(self) -> bool:
        """Parts are added up beside round_dq."""
        return True

    @property
    def register_option(self) -> str:
        """What asks for the best allocation, which Triton 3.9 does not: at head_dim 64, where K and V are held, it finds none better."""
        return f", {BEST_ALLOCATION}" if self.head_dim > 64 else ""

    @property
    def padded(self) -> int:
        """Rows that terms and sums are padded to."""
        return max(self.variant.tile_m, self.rows)

    @property
    def abreast_rows(self) -> int:
        """Queries that heads abreast have together, 0 where their number does not depend on it."""
        return fa3_backward.abreast_rows(self.variant, self.mask)

    @property
    def any_order_abreast(self) -> int:
        """Heads that are abreast where programs add to dQ in any order."""
        return fa3_backward.ANY_ORDER_ABREAST

    @property
    def dq_chains(self) -> str:
        """The function that says how many chains a head's blocks of keys go by."""
        return getsource(fa3_backward.dq_chains)

    @property
    def asked(self) -> int:
        """Sums of a tile of dQ that are asked for at a time."""
        return _ASKED

    @property
    def sum_registers(self) -> int:
        """Registers of a thread that adds them up: told of no number, the compiler spares some and asks for one after the other."""
        return _SUM_REGISTERS

    @property
    def dq_sums(self) -> str:
        """The function that says how many sums a block of dQ has."""
        return getsource(fa3_backward.dq_sums)

    @property
    def heads_abreast(self) -> str:
        """The function that says how many heads are abreast."""
        return getsource(fa3_backward.heads_abreast)

    @property
    def dealt(self) -> int:
        """Items that a program was dealt and not all of its roles have taken."""
        return fa3_backward.DEALT

    @property
    def halves(self) -> bool:
        """Whether a step has 128 queries, and takes them by halves to spare registers."""
        return self.variant.tile_m == 2 * fa3_backward.KEYS

    @property
    def tile_n(self) -> int:
        """Keys of a program."""
        return fa3_backward.TILE_N

    @property
    def keys(self) -> int:
        """Keys of a warpgroup."""
        return fa3_backward.KEYS

    @property
    def stages(self) -> int:
        """Tiles of Q and dO, and of dS."""
        return fa3_backward.STAGES

    @property
    def sum_rows(self) -> int:
        """Rows of a tile of dQ in its workspace: as registers hold it, 128 bytes each, so that a tile lies in one piece."""
        return self.variant.tile_m * self.head_dim // self.sum_columns

    @property
    def sum_columns(self) -> int:
        """Columns of them."""
        return 32

    @property
    def from_fragments(self) -> str:
        """Axes of a tile as registers hold it that make its rows, then its columns; the first is the warpgroup."""
        return "(0, 1, 6, 3, 4, 2, 5, 7)" if self.halves else "(1, 6, 3, 4, 0, 2, 5, 7)"

    @property
    def registers(self) -> str:
        """Registers a thread of the second warpgroup that multiplies, and of the roles that move data."""
        return f"[{', '.join(map(str, [fa3_backward.REGISTERS, *[_MOVERS] * (1 + self.variant.adders)]))}]"

    @property
    def sizes(self) -> str:
        """Fields of what the roles know of a launch."""
        return " ".join((*self._pointers, *self._sizes, "scale_log2", "scale"))

    @property
    def _sizes(self) -> tuple[str, ...]:
        return (*_SIZES, *(_WINDOW if self.mask == "window" else ()))

    @property
    def chained(self) -> bool:
        """Whether a head's blocks of keys may go by several chains, each with sums of its own."""
        return self.mask != "window"

    @property
    def hides(self) -> str:
        """Whether keys must be hidden from queries of a step."""
        return "(m < whole) | (m >= whole_end)" if self.mask == "window" else "m < whole"

    @property
    def _pointers(self) -> tuple[str, ...]:
        """Tensors that the kernel of the products takes without a descriptor."""
        return (*(("deltas",) if self.loaded_terms else ()), "counters")

    @property
    def _described(self) -> tuple[str, ...]:
        """Tensors that it takes as descriptors."""
        return tuple(tensor.replace("terms", "pieces").removeprefix("made_") for tensor, _ in _BOXES)

    @property
    def signature(self) -> str:
        """The head of the kernel of the products."""
        names = [*(f"{tensor}_desc" for tensor in self._described), *self.sizes.split()]
        return in_lines(", ".join(names), "def gradients(", "):")

    @property
    def unspecialized(self) -> str:
        """Places of sizes among its arguments."""
        first = len(self._described) + len(self._pointers)
        return f"range({first}, {first + len(self._sizes)})"

    @property
    def new_problem(self) -> str:
        """The statement that collects what the roles know."""
        return in_lines(", ".join(self.sizes.split()), "problem = Problem(", ")", 116)

    @property
    def last_signature(self) -> str:
        """The head of the kernel that rounds dQ."""
        return self._of_sums("round_dq", "heads_q", "seqlen_q", "padded", "eighths")

    @property
    def chains_signature(self) -> str:
        """The head of the kernel that adds up the sums of chains and rounds dQ."""
        return self._of_sums("add_chains", "heads_q", "seqlen_q", "padded", "chains", "eighths")

    def _of_sums(self, name: str, *sizes: str) -> str:
        names = ("sums_ptr", "dq_ptr", "counters_ptr", *strides(("dq",)), *sizes, "scale_log2", "scale")
        return in_lines(", ".join(names), f"def {name}(", "):")

    @property
    def key_rows(self) -> str:
        """The constant of the keys of a program."""
        return "TILE_N"

    @property
    def once_rows(self) -> int:
        """Query rows that take as long as what a program does once."""
        return fa3_backward.ONCE_ROWS

    @property
    def workspaces_text(self) -> str:
        """What launches need beside terms and sums of parts, for a docstring."""
        each = "sums of dQ and 4 bytes to each block of queries to count in"
        each += ", both once for each chain" if self.chained else ""
        return f"{each}, and 4 more{'; D' if self.keeps_deltas else ''}"

    @property
    def workspaces_statements(self) -> tuple[str, ...]:
        """Statements that return what launches need beside terms."""
        count = "blocks = padded // TILE_M.value"
        sizes = "blocks * triton.cdiv(heads_q // heads_kv, parts), triton.cdiv(seqlen_k, TILE_N.value)"
        seen = "max(seqlen_k - seqlen_q, 0) // TILE_N.value" if self.mask == "causal" else "sizes[1]"
        return (
            f"padded = terms.shape[{2 if self.in_pieces else 3}]",
            count,
            *(
                (
                    "if heads_kv:",
                    f"    sizes = {sizes}",
                    "    chains = dq_chains(heads_kv * parts, *sizes)",
                    f"    blocks *= dq_sums(chains, batch * heads_kv * parts, *sizes, {seen})",
                )
                if self.chained
                else ()
            ),
            "sums = terms.new_empty((batch, heads_q, blocks * SUM_ROWS.value, SUM_COLUMNS.value))",
            "counters = terms.new_empty((batch * heads_q * blocks + 1,))",
            f"return dk_parts, dv_parts, sums, counters{', terms.new_empty((batch, heads_q, padded))' if self.keeps_deltas else ''}",
        )

    @property
    def host(self) -> Host:
        """What windows the host takes."""
        return Host(self.mask, self.head_dim, self.head_dim_v, (), "", narrower=self.narrower)

    @property
    def narrower(self) -> bool:
        """The copy engine brings zeros for columns that heads do not have."""
        return True

    @property
    def head_dim_qk(self) -> int:
        """Columns of Q and K."""
        return self.head_dim

    @property
    def _boxes(self) -> tuple[str, ...]:
        """The loop over what descriptors are made of, and the box of each."""
        boxes = ", ".join(f"({tensor}, {rows})" for tensor, rows in _BOXES)
        return (
            *in_lines(boxes, "for x, count in (", "):", 116).split("\n"),
            "    block = [1, 1, count.value, 64 if count is KEYS else HEAD_DIM.value if x.dtype == q.dtype else x.shape[3]]",
        )

    @property
    def _of_dq(self) -> tuple[str, ...]:
        """Statements that choose the launch which makes dQ of its sums."""
        if not self.chained:
            return ("of_dq = (round_dq, (dq_blocks, 1, 1), for_dq)",)
        return (
            "of_dq = (add_chains, (8 * dq_blocks, 1, 1), for_dq)",
            "if chains == 1:",
            "    of_dq = (round_dq, (dq_blocks, 1, 1), (*for_dq[:-2], eighths))",
        )

    @property
    def host_statements(self) -> tuple[str, ...]:
        """Statements that return the launches of a call."""
        row_tensors = "terms, deltas, counters," if self.keeps_deltas else "terms, counters,"
        chains = "chains, " if self.chained else ""
        return (
            *(WINDOW_STATEMENTS if self.mask == "window" else ()),
            "boxes = []",
            *self._boxes,
            "    layout = gl.NVMMASharedLayout.get_default_for(block, DTYPES[str(x.dtype)])",
            "    boxes.append(TensorDescriptor.from_tensor(x, block, layout))",
            *(("chains = sums.shape[2] // (padded // TILE_M.value * SUM_ROWS.value)",) if self.chained else ()),
            *(
                line.replace("terms,", row_tensors).replace("eighths_v)", f"{chains}eighths_v)")
                for line in FOR_NARROWER_ROWS
            ),
            "key_blocks, heads = triton.cdiv(seqlen_k, TILE_N.value), batch * sum_heads",
            "steps = triton.cdiv(seqlen_q, TILE_M.value) * part",
            "most = HEADS_ABREAST if deterministic else ANY_ORDER_ABREAST",
            f"abreast = heads_abreast(most, {self.abreast_rows}, seqlen_q, steps, group, key_blocks, heads, {self.mask == 'causal'}, deterministic)",
            f"in_order = {'chains' if self.chained else '1'} * (1 if deterministic else -1)",
            "sizes = (seqlen_q, seqlen_k, heads_q, group, part, heads, abreast, padded, in_order)",
            *(("sizes += (window_left, window_right)",) if self.mask == "window" else ()),
            "row_blocks = padded // ROWS.value * batch * heads_q",
            "dq_blocks = padded // TILE_M.value * batch * heads_q",
            f"for_dq = (sums, dq, counters, *(n // 8 for n in dq.stride()[:3]), heads_q, seqlen_q, padded{', chains' * self.chained}, eighths)",
            *self._of_dq,
            "return (",
            "    (row_terms, (row_blocks, 1, 1), for_rows),",
            f"    (gradients, (min(key_blocks * heads, multiprocessors(q.device.index)), 1, 1), (*boxes, {', '.join(self._pointers)}, *sizes)),",
            "    of_dq,",
            "    *last,",
            ")",
        )


def context(
    variant: Fa3BackwardVariant, workload: Workload, form: type[HopperBackward] = HopperBackward
) -> HopperBackward:
    """The kernels of a variant, which must be writable (`fa3_backward.writable`), in a ``form`` of the template."""
    mask = {"none": "Attention", "causal": "Causal attention", "window": "Sliding-window attention"}[workload.mask]
    return form(
        title=f"{mask} backward on Hopper for head_dim {workload.dims}: five products, the same bits every run",
        description=_description(variant, workload),
        mask=workload.mask,
        head_dim=workload.head_dim_qk,
        head_dim_v=workload.head_dim_v,
        variant=variant,
        v_pieces=pieces(workload.head_dim_v),
    )


def _description(variant: Fa3BackwardVariant, workload: Workload) -> str:
    lines = [
        keys_seen_and_masked(workload.mask),
        f"Programs of gradients have {fa3_backward.TILE_N} keys of one head and walk over {variant.tile_m} queries at a time, from the last",
        "to the first: a load warp copies Q, dO and two numbers of each row, two warpgroups of 64 keys compute S^T, dP^T and",
        "what dV and dK grow by, put dS into shared memory for each other and make a part of dQ each, and a last warp adds",
        "that to a float32 sum in global memory.  Programs add to a block of dQ in the order of their keys, which a counter",
        "tells, so sums do not depend on who comes first, unless a launch leaves it to them.  row_terms goes before, round_dq after.",
        "Runs on sm_90a with triton and torch alone.",
    ]
    return textwrap.fill(" ".join(lines), 120)
