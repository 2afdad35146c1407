"""What the template of the `hopper_bwd_apart` family needs to know: a backward of two kernels in Gluon for sm_90a.

Python decides here, `templates/hopper_backward_apart.py.j2` only writes.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from tilecast.codegen.gluon import in_lines
from tilecast.codegen.host import WINDOW_STATEMENTS, Host
from tilecast.codegen.masks import keys_seen_and_masked
from tilecast.codegen.part_sums import PartSums
from tilecast.codegen.pieces import Piece, pieces
from tilecast.codegen.row_terms import FOR_NARROWER_ROWS, RowTerms
from tilecast.model.kernel.variants import fa3_backward_apart as family
from tilecast.model.kernel.variants.fa3_backward_apart import Fa3BackwardApartVariant
from tilecast.model.kernel.workload import Workload

TEMPLATE = "hopper_backward_apart.py.j2"
#: Registers a thread of the roles that only move data.
_MOVERS = 24
_SIZES = ("seqlen_q", "seqlen_k", "heads_q", "group", "part", "key_blocks", "query_blocks", "heads", "padded")
_WINDOW = ("window_left", "window_right")
#: Constants of a tile's columns, and of how many tiles are those of a head, of what ends in them.
_OF_QK, _OF_V = ("COLUMNS", "TILES"), ("COLUMNS_V", "TILES_V")


@dataclass(frozen=True, slots=True)
class HopperBackwardApart(RowTerms, PartSums):
    """Everything `TEMPLATE` reads except the header, as ``k``."""

    title: str
    description: str
    mask: str
    head_dim_qk: int
    head_dim_v: int
    variant: Fa3BackwardApartVariant
    v_pieces: tuple[Piece, ...]
    #: Whether each warpgroup of key_gradients has keys of its own, and keys of a program.
    own: bool
    keys: int
    #: Tiles of K, and of V, in query_gradients.
    key_stages: tuple[int, int]

    @property
    def tile(self) -> int:
        """Rows of a warpgroup and of every tile."""
        return family.TILE

    @property
    def stages(self) -> int:
        """Tiles of Q and dO, and of P, in key_gradients."""
        return family.STAGES

    @property
    def columns_qk(self) -> int:
        """Columns of a tile of Q or K: tensors of Gluon have a power of two of them."""
        return _power_of_two(self.head_dim_qk)

    @property
    def columns_v(self) -> int:
        """Columns of a tile of V or dO; those of a tile of K where dV leaves by way of that."""
        return _power_of_two(self.head_dim_v) if self.own else min(_power_of_two(self.head_dim_v), self.columns_qk)

    @property
    def pieces_qk(self) -> int:
        """Tiles that are the columns of Q or K."""
        return self.head_dim_qk // self.columns_qk

    @property
    def pieces_v(self) -> int:
        """Tiles that are the columns of V or dO."""
        return self.head_dim_v // self.columns_v

    @property
    def head_dims(self) -> tuple[str, str]:
        """Columns of q, dq, out and dout, and of k, v, dk and dv, for a docstring."""
        dims = self.head_dim_qk, self.head_dim_v
        one = f"{dims[0]}" if dims[0] == dims[1] else f"{dims[0]} or {dims[1]}"
        return one, one

    @property
    def dk_leaves_by(self) -> str:
        """Tiles that dK of shared keys leaves by: those of V, or where V has fewer columns a slot of Q, all of which has been read before
        the last P was there."""
        return "shared.v" if self.head_dim_v == self.head_dim_qk else "shared.q"

    def count(self, total: str) -> int:
        """Products of a step that add to a sum ("dq", "dk" or "dv"), and for "dv" those that make dP."""
        return self.pieces_v if total == "dv" else self.pieces_qk

    def names(self, total: str) -> tuple[str, ...]:
        """Accumulators of a sum."""
        count = self.count(total)
        return (total,) if count == 1 else tuple(f"{total}_{i}" for i in range(count))

    def _piece(self, total: str, slot: str, i: int) -> str:
        """Which tile a piece of a slot is."""
        if self.count(total) == 1:
            return slot
        first = "" if slot == "0" else f"{f'({slot})' if ' ' in slot else slot} * {_of(total)[1]}"
        return f"{first} + {i}" if first and i else first or f"{i}"

    def zeros(self, total: str) -> tuple[str, ...]:
        """Statements that begin a sum."""
        columns = _of(total)[0]
        made = f"gl.zeros([TILE, {columns}], gl.float32, layout=accumulator({columns}))"
        return tuple(f"{name} = {made}" for name in self.names(total))

    def add(self, total: str, scores: str, tiles: str, slot: str) -> tuple[str, ...]:
        """Statements that add scores times the rows in a slot of ``tiles`` to a sum, asynchronous."""
        return tuple(
            f"{name} = issue_sum({scores}, matrix({tiles}, {self._piece(total, slot, i)}), {name})"
            for i, name in enumerate(self.names(total))
        )

    def wait(self, total: str, behind: int = 0) -> str:
        """The statement that waits for a sum, with ``behind`` products issued since."""
        names = ", ".join(self.names(total))
        return f"{names} = warpgroup_mma_wait({behind}, deps=[{names}])"

    def store(self, total: str, tiles: str, slot: str, head_row: str) -> tuple[str, ...]:
        """Statements that write a finished sum, by way of a slot of ``tiles``."""
        scaled = "" if total == "dv" else " * problem.scale"
        return tuple(
            f"store_sum({total}_desc, {tiles}, {self._piece(total, slot, i)}, {name}{scaled}, batch, {head_row}, "
            f"{f'{i} * {_of(total)[0]}' if i else 0})"
            for i, name in enumerate(self.names(total))
        )

    @property
    def row_range(self) -> str:
        """What `tiles_of_queries` returns."""
        return "first, whole, whole_end, end" if self.mask == "window" else "first, whole, end"

    @property
    def hides_rows(self) -> str:
        """Whether keys must be hidden from tile m of queries."""
        return "(m < whole) | (m >= whole_end)" if self.mask == "window" else "m < whole"

    @property
    def key_range(self) -> str:
        """What `tiles_of_keys` returns."""
        return "first, whole, whole_end, end" if self.mask == "window" else "whole, end"

    def hides_keys(self, tile: str) -> str:
        """Whether keys of a tile must be hidden."""
        return f"({tile} < whole) | ({tile} >= whole_end)" if self.mask == "window" else f"{tile} >= whole"

    @property
    def key_steps(self) -> str:
        """Tiles of keys that a program of query_gradients walks over."""
        return "end - first" if self.mask == "window" else "end"

    @property
    def key_tile(self) -> str:
        """Number n of them."""
        return "(first + n)" if self.mask == "window" else "n"

    @property
    def key_tile_name(self) -> str:
        """What query_role calls it."""
        return "tile" if self.mask == "window" else "n"

    @property
    def value_slot(self) -> str:
        """The slot of V in a step of query_role."""
        return "slot_v" if self.key_stages[1] > 1 else "still"

    @property
    def padded(self) -> int:
        """Rows that terms are padded to: those of a program of dQ."""
        return max(2 * family.TILE, self.rows)

    @property
    def sizes(self) -> str:
        """Fields of what the roles know of a launch."""
        return " ".join(("terms", *self._sizes, "scale_log2", "scale"))

    @property
    def _sizes(self) -> tuple[str, ...]:
        return (*_SIZES, *(_WINDOW if self.mask == "window" else ()))

    @property
    def new_problem(self) -> str:
        """The statement that collects what the roles know."""
        return in_lines(", ".join(self.sizes.split()), "problem = Problem(", ")", 116)

    @property
    def begins_early(self) -> bool:
        """Programs of key_gradients set up under row_terms."""
        return True

    @property
    def key_rows(self) -> str:
        """The constant of the keys of a program."""
        return "KEYS"

    @property
    def once_rows(self) -> int:
        """Query rows that take as long as what a program does once."""
        return family.ONCE_ROWS

    @property
    def beside(self) -> float:
        """Those of the queries are."""
        return family.BESIDE

    @property
    def host(self) -> Host:
        """What windows the host takes."""
        return Host(self.mask, self.head_dim_qk, self.head_dim_v, (), "", narrower=self.narrower)

    @property
    def narrower(self) -> bool:
        """The copy engine brings zeros for columns that heads do not have."""
        return True

    def signature(self, name: str, written: tuple[str, ...]) -> str:
        """The head of a kernel of products, and the tensors that it writes."""
        names = [*(f"{tensor}_desc" for tensor in ("q", "dout", "k", "v", *written)), *self.sizes.split()]
        return in_lines(", ".join(names), f"def {name}(", "):")

    def unspecialized(self, descriptors: int) -> str:
        """Places of sizes among its arguments."""
        return f"range({descriptors + 1}, {descriptors + 1 + len(self._sizes)})"

    def registers(self, multiplying: int, movers: int) -> str:
        """Registers a thread of the roles after the first: warpgroups that multiply, and warps that move data."""
        return f"[{', '.join(map(str, [family.REGISTERS] * multiplying + [_MOVERS] * movers))}]"

    @property
    def host_statements(self) -> tuple[str, ...]:
        """Statements that return the launches of a call."""
        return (
            *(WINDOW_STATEMENTS if self.mask == "window" else ()),
            *self._boxes,
            *FOR_NARROWER_ROWS,
            "query_blocks, key_blocks = triton.cdiv(seqlen_q, 2 * TILE.value), triton.cdiv(seqlen_k, KEYS.value)",
            "heads = batch * heads_q",
            "sizes = (seqlen_q, seqlen_k, heads_q, group, part, key_blocks, query_blocks, heads, padded)",
            *(("sizes += (window_left, window_right)",) if self.mask == "window" else ()),
            "return (",
            "    (row_terms, (padded // ROWS.value * heads, 1, 1), for_rows),",
            "    (key_gradients, (key_blocks * batch * sum_heads, 1, 1), (*boxes[:6], terms, *sizes)),",
            "    (query_gradients, (query_blocks * heads, 1, 1), (*boxes[:4], boxes[6], terms, *sizes)),",
            "    *last,",
            ")",
        )

    @property
    def _boxes(self) -> tuple[str, ...]:
        """Statements that make the descriptors."""
        made = "TensorDescriptor.from_tensor(x, block, layout)"
        layout = "layout = gl.NVMMASharedLayout.get_default_for(block, DTYPES[str(q.dtype)])"
        if self.head_dim_qk == self.head_dim_v:
            over = "(q, dout, k, v, made_dk, made_dv, dq)"
            return ("block = [1, 1, TILE.value, COLUMNS.value]", layout, f"boxes = [{made} for x in {over}]")
        wide = "(q, COLUMNS), (dout, COLUMNS_V), (k, COLUMNS), (v, COLUMNS_V), (made_dk, COLUMNS), (made_dv, COLUMNS_V), (dq, COLUMNS)"
        return (
            "boxes = []",
            *in_lines(wide, "for x, columns in (", "):", 116).split("\n"),
            "    block = [1, 1, TILE.value, columns.value]",
            f"    {layout}",
            f"    boxes.append({made})",
        )


def _of(total: str) -> tuple[str, str]:
    return _OF_V if total == "dv" else _OF_QK


def _power_of_two(columns: int) -> int:
    """The largest that divides ``columns``."""
    return columns & -columns


def context(variant: Fa3BackwardApartVariant, workload: Workload) -> HopperBackwardApart:
    """The kernels of a variant, which must be writable (`fa3_backward_apart.writable`)."""
    mask = {"none": "Attention", "causal": "Causal attention", "window": "Sliding-window attention"}[workload.mask]
    return HopperBackwardApart(
        title=f"{mask} backward on Hopper for head_dim {workload.dims}: two kernels, seven products, no sum of several programs",
        description=_description(workload),
        mask=workload.mask,
        head_dim_qk=workload.head_dim_qk,
        head_dim_v=workload.head_dim_v,
        variant=variant,
        v_pieces=pieces(workload.head_dim_v),
        own=family.own_keys(workload),
        keys=family.keys(workload),
        key_stages=(family.STAGES, family.value_stages(workload)),
    )


def _description(workload: Workload) -> str:
    shared = [
        "first: one warpgroup computes S^T and P^T and adds to dV, the other computes dP^T, takes P^T from shared memory, makes",
        "dS^T and adds to dK; neither sum would fit beside the other in the registers of one.",
    ]
    own = ["first, half of the keys in each warpgroup."]
    lines = [
        keys_seen_and_masked(workload.mask, "tile"),
        f"Programs of key_gradients have {family.keys(workload)} keys of one head and walk over {family.TILE} queries at a time, from the last to the",
        *(own if family.own_keys(workload) else shared),
        "Programs of query_gradients",
        f"have {2 * family.TILE} queries, half of them in each warpgroup, and walk over {family.TILE} keys at a time.  Load warps copy",
        "tiles.  row_terms goes before.  Runs on sm_90a with triton and torch alone.",
    ]
    return textwrap.fill(" ".join(lines), 120)
