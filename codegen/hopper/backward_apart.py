"""What the template of the `hopper_bwd_apart` family needs to know: a backward of two kernels in Gluon for sm_90a.

Python decides here, `templates/hopper_backward_apart.py.j2` only writes.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from tilecast.codegen.gluon import in_lines
from tilecast.codegen.host import Host
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

    @property
    def tile(self) -> int:
        """Rows of a warpgroup and of every tile."""
        return family.TILE

    @property
    def stages(self) -> int:
        """Tiles of Q, dO and P, and of K."""
        return family.STAGES

    @property
    def padded(self) -> int:
        """Rows that terms are padded to: those of a program of dQ."""
        return max(2 * family.TILE, self.rows)

    @property
    def sizes(self) -> str:
        """Fields of what the roles know of a launch."""
        return " ".join(("terms", *_SIZES, "scale_log2", "scale"))

    @property
    def new_problem(self) -> str:
        """The statement that collects what the roles know."""
        return in_lines(", ".join(self.sizes.split()), "problem = Problem(", ")", 116)

    @property
    def key_rows(self) -> str:
        """The constant of the keys of a program."""
        return "TILE"

    @property
    def once_rows(self) -> int:
        """Query rows that take as long as what a program does once."""
        return family.ONCE_ROWS

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
        return f"range({descriptors + 1}, {descriptors + 1 + len(_SIZES)})"

    def registers(self, multiplying: int, movers: int) -> str:
        """Registers a thread of the roles after the first: warpgroups that multiply, and warps that move data."""
        return f"[{', '.join(map(str, [family.REGISTERS] * multiplying + [_MOVERS] * movers))}]"

    @property
    def host_statements(self) -> tuple[str, ...]:
        """Statements that return the launches of a call."""
        return (
            f"block = [1, 1, TILE.value, {self.head_dim_qk}]",
            "layout = gl.NVMMASharedLayout.get_default_for(block, DTYPES[str(q.dtype)])",
            "boxes = [TensorDescriptor.from_tensor(x, block, layout) for x in (q, dout, k, v, made_dk, made_dv, dq)]",
            *FOR_NARROWER_ROWS,
            "query_blocks, key_blocks = triton.cdiv(seqlen_q, 2 * TILE.value), triton.cdiv(seqlen_k, TILE.value)",
            "heads = batch * heads_q",
            "sizes = (seqlen_q, seqlen_k, heads_q, group, part, key_blocks, query_blocks, heads, padded)",
            "return (",
            "    (row_terms, (padded // ROWS.value * heads, 1, 1), for_rows),",
            "    (key_gradients, (key_blocks * batch * sum_heads, 1, 1), (*boxes[:6], terms, *sizes)),",
            "    (query_gradients, (query_blocks * heads, 1, 1), (*boxes[:4], boxes[6], terms, *sizes)),",
            "    *last,",
            ")",
        )


def context(variant: Fa3BackwardApartVariant, workload: Workload) -> HopperBackwardApart:
    """The kernels of a variant, which must be writable (`fa3_backward_apart.writable`)."""
    mask = {"none": "Attention", "causal": "Causal attention"}[workload.mask]
    return HopperBackwardApart(
        title=f"{mask} backward on Hopper for head_dim {workload.head_dim_qk}: two kernels, seven products, no sum of several programs",
        description=_description(workload),
        mask=workload.mask,
        head_dim_qk=workload.head_dim_qk,
        head_dim_v=workload.head_dim_v,
        variant=variant,
        v_pieces=pieces(workload.head_dim_v),
    )


def _description(workload: Workload) -> str:
    lines = [
        keys_seen_and_masked(workload.mask, "tile"),
        f"Programs of key_gradients have {family.TILE} keys of one head and walk over {family.TILE} queries at a time, from the last to the",
        "first: one warpgroup computes S^T and P^T and adds to dV, the other computes dP^T, takes P^T from shared memory, makes",
        "dS^T and adds to dK; neither sum would fit beside the other in the registers of one.  Programs of query_gradients",
        f"have {2 * family.TILE} queries, half of them in each warpgroup, and walk over {family.TILE} keys at a time.  Load warps copy",
        "tiles.  row_terms goes before.  Runs on sm_90a with triton and torch alone.",
    ]
    return textwrap.fill(" ".join(lines), 120)
