"""What the template of the `triton` family needs to know: a FlashAttention-2 forward in plain Triton.

Python decides here, `templates/triton.py.j2` only writes.  The kernels run from sm_80 on and in Triton's interpreter.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from tilecast.codegen.gluon import in_lines, quoted
from tilecast.codegen.host import WINDOW_STATEMENTS, Descriptor, Host, box_loops
from tilecast.codegen.masks import keys_seen
from tilecast.codegen.pieces import InPieces, Piece, pieces
from tilecast.model.kernel.header import dims_text
from tilecast.model.kernel.variants.fa2 import LOADS, SMALLEST_DOT, Fa2Variant, needs_pipeline
from tilecast.model.kernel.verdict import VariantError
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine

TEMPLATE = "triton.py.j2"
_BLOCK_TEXT = {
    "none": "Only the block that reaches over the last key is masked.",
    "causal": "Only blocks on the diagonal are masked.",
    "window": "Only blocks on the two edges of that band are masked.",
}
#: What `attend` compares the keys of a masked block with: its arguments, and the condition.
_MASK_CODE = {
    "none": ("seqlen_k", "keys < seqlen_k"),
    "causal": ("last_key", "keys <= last_key[:, None]"),
    "window": ("first_key, last_key", "(keys >= first_key[:, None]) & (keys <= last_key[:, None])"),
}


@dataclass(frozen=True, slots=True)
class TritonKernel(InPieces):
    """Everything `TEMPLATE` reads except the header, as ``k``."""

    title: str
    description: str
    mask: str
    head_dim_qk: int
    head_dim_v: int
    tile_m: int
    tile_n: int
    warps: int
    kv_stages: int
    #: Software pipeline stages of loops over blocks on the edge of the mask.
    edge_stages: int
    loads: str
    longest_first: bool
    qk_pieces: tuple[Piece, ...]
    v_pieces: tuple[Piece, ...]

    @property
    def tma(self) -> bool:
        """Whether tiles come by tensor descriptors."""
        return self.loads == "descriptors"

    @property
    def limits(self) -> str:
        """What `attend` compares the keys of a masked block with."""
        found, _ = _MASK_CODE[self.mask]
        # Loads of masked blocks must stop at the last key.
        return f"{found}, seqlen_k" if not self.tma and self.mask != "none" else found

    @property
    def visible(self) -> str:
        """The condition under which a key of a masked block is seen."""
        return _MASK_CODE[self.mask][1]

    # -- variables -----------------------------------------------------------------------------------------------------

    @property
    def kv(self) -> str:
        """Where K and V of a head are."""
        if not self.tma:
            return "k_ptr, v_ptr, stride_ks, stride_vs"
        return ", ".join([*(d.name for d in self.descriptors if d.tensor in "kv"), "batch, head_kv"])

    # -- loads and stores ----------------------------------------------------------------------------------------------

    @property
    def q_statements(self) -> tuple[str, ...]:
        """Statements that load the Q tile."""
        lines = []
        for piece in self.qk_pieces:
            made = f"load_rows(q_ptr{piece.offset}, stride_qs, seqlen_q - row, TILE_M, {piece.width}, True)"
            if self.tma:
                made = f"q_desc{piece.suffix}.load([batch, head, row, {piece.start}]).reshape([TILE_M, {piece.width}])"
            lines.append(f"q{piece.suffix} = {made}")
        return (*lines, f"q = ({self.q})") if self.q != "q" else tuple(lines)

    def load_block(self, tensor: str, piece: Piece) -> str:
        """A piece of a block of K or V."""
        if self.tma:
            box = f"{tensor}_desc{piece.suffix}.load([batch, head_kv, key, {piece.start}])"
            return f"{box}.reshape([TILE_N, {piece.width}])"
        return (
            f"load_rows({tensor}_block{piece.offset}, stride_{tensor}s, seqlen_k - key, TILE_N, {piece.width}, MASKED)"
        )

    @property
    def qk_statements(self) -> tuple[str, ...]:
        """Statements for S of a key block."""
        lines = [f"{self.q} = q"] if self.q != "q" else []
        if not self.tma:
            lines += [f"{t}_block = {t}_ptr + tl.cast(key, tl.int64) * stride_{t}s" for t in "kv"]
        return (*lines, *self.qk_products)

    @property
    def store_statements(self) -> tuple[str, ...]:
        """Statements that write O."""
        lines = [] if self.tma else ["out_rows = out_ptr + tl.arange(0, TILE_M)[:, None] * stride_os"]
        for piece in self.v_pieces:
            made, desc = f"out{piece.suffix}", f"out_desc{piece.suffix}"
            dtype = f"{desc}.dtype" if self.tma else "out_ptr.dtype.element_ty"
            columns = f"tl.arange({piece.start}, {piece.start + piece.width})[None, :]"
            lines.append(f"{made} = tl.where(empty, 0.0, o{piece.suffix} * inverse).to({dtype})")
            lines.append(
                f"{desc}.store([batch, head, row, {piece.start}], {made}.reshape([1, 1, TILE_M, {piece.width}]))"
                if self.tma
                else f"tl.store(out_rows + {columns}, {made}, mask=valid[:, None])"
            )
        return tuple(lines)

    # -- launch --------------------------------------------------------------------------------------------------------

    @property
    def descriptors(self) -> tuple[Descriptor, ...]:
        """Tensor descriptors in the order of the kernel's arguments; none where tiles come by pointers."""
        if not self.tma:
            return ()
        qk, v = self.qk_pieces, self.v_pieces
        tensors = (("q", "TILE_M", qk), ("k", "TILE_N", qk), ("v", "TILE_N", v), ("out", "TILE_M", v))
        return tuple(
            Descriptor(f"{tensor}_desc{piece.suffix}", tensor, rows, piece.width)
            for tensor, rows, pieces in tensors
            for piece in pieces
        )

    @property
    def unspecialized(self) -> str:
        """Sizes that the compiled code must not depend on."""
        window = ["window_left", "window_right"] if self.mask == "window" else []
        return quoted(("heads_q", "group", "seqlen_q", "seqlen_k", *window))

    @property
    def host(self) -> Host:
        """The host side."""
        numbers = "heads_q, heads_q // heads_kv, seqlen_q, seqlen_k"
        lines = ["programs = triton.cdiv(seqlen_q, TILE_M.value) * batch * heads_q"]
        if self.mask == "window":
            lines = [*WINDOW_STATEMENTS, *lines]
            numbers += ", window_left, window_right"
        if self.tma:
            loops, columns = box_loops([(made.tensor, made.rows, made.columns) for made in self.descriptors])
            lines += [
                "descriptors = [",
                f"    TensorDescriptor.from_tensor(x, [1, 1, count.value, {columns}])",
                *(f"    {loop}" for loop in loops),
                "]",
            ]
        if self.mask == "window" or not self.tma:
            lines += [f"sizes = ({numbers})"]
            numbers = "*sizes" if self.tma else "*(n for x in (q, k, v, out) for n in x.stride()[:3]), *sizes"
        return Host(self.mask, self.head_dim_qk, self.head_dim_v, tuple(lines), numbers, self.tma, self.tma)

    @property
    def signature(self) -> str:
        """The head of the kernel."""
        places = [d.name for d in self.descriptors] if self.tma else ["q_ptr", "k_ptr", "v_ptr", "out_ptr"]
        strides = [] if self.tma else [f"stride_{tensor}{axis}" for tensor in "qkvo" for axis in "bhs"]
        sizes = [
            "heads_q",
            "group",
            "seqlen_q",
            "seqlen_k",
            *(["window_left", "window_right"] if self.mask == "window" else []),
        ]
        return in_lines(", ".join([*places, "lse_ptr", *strides, *sizes, "scale_log2"]), "def attention(", "):")


def context(variant: Fa2Variant, workload: Workload, machine: Machine, loads: str | None = None) -> TritonKernel:
    """The kernel of a variant; `loads` is one of LOADS, by default what suits the machine.

    Raises VariantError where Triton cannot express the variant.
    """
    for name, tile in (("tile_m", variant.tile_m), ("tile_n", variant.tile_n)):
        if tile < SMALLEST_DOT or tile & (tile - 1):
            raise VariantError(f"triton: {name} must be a power of two of at least {SMALLEST_DOT}, got {tile}")
    if workload.dtype not in ("bf16", "fp16"):
        raise VariantError(f"triton: dtype must be bf16 or fp16, got '{workload.dtype}'")
    if variant.scheduler not in ("grid", "longest-first"):
        raise VariantError(f"triton: scheduler must be grid or longest-first, got '{variant.scheduler}'")
    if loads is None:
        loads = "descriptors" if machine.tensor_kind in ("wgmma", "tcgen05") else "pointers"
    if loads not in LOADS:
        raise VariantError(f"triton: loads must be {' or '.join(LOADS)}, got '{loads}'")
    v_pieces = pieces(workload.head_dim_v)
    must_pipeline = len(v_pieces) > 1 or needs_pipeline(variant, workload, machine)
    return TritonKernel(
        title=_title(workload),
        description=_description(variant, workload),
        mask=workload.mask,
        head_dim_qk=workload.head_dim_qk,
        head_dim_v=workload.head_dim_v,
        tile_m=variant.tile_m,
        tile_n=variant.tile_n,
        warps=variant.warps,
        kv_stages=variant.kv_stages,
        # A loop that runs at most once needs no pipeline, unless it has to have one.
        edge_stages=1 if workload.mask == "none" and not must_pipeline else variant.kv_stages,
        loads=loads,
        longest_first=variant.scheduler == "longest-first",
        qk_pieces=pieces(workload.head_dim_qk),
        v_pieces=v_pieces,
    )


def _title(workload: Workload) -> str:
    mask = {"none": "Attention", "causal": "Causal attention", "window": "Sliding-window attention"}[workload.mask]
    return f"{mask} forward for head_dim {dims_text(workload)}: FlashAttention-2 in plain Triton"


def _description(variant: Fa2Variant, workload: Workload) -> str:
    lines = [
        keys_seen(workload.mask),
        f"A program owns {variant.tile_m} query rows of one head and takes in {variant.tile_n} keys at a time.",
        _BLOCK_TEXT[workload.mask],
    ]
    if variant.scheduler == "longest-first":
        lines.append("Programs of a head start with its last rows, which see the most keys.")
    split = [dim for dim in (workload.head_dim_qk, workload.head_dim_v) if dim & (dim - 1)]
    if split:
        sums = " + ".join(str(piece.width) for piece in pieces(split[0]))
        lines.append(f"Triton's blocks are powers of two: head_dim {split[0]} goes as {sums}, nothing is padded.")
    return textwrap.fill("  ".join(lines), 120)


def targets(descriptors: bool) -> tuple[str, ...]:
    """Targets of plain Triton: tensor descriptors need sm_90, pointers run from sm_80 on."""
    newer = ("sm_90a", "sm_100a", "sm_103a")
    return newer if descriptors else ("sm_80", *newer)
