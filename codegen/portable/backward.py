"""What the template of the `triton_bwd` family needs to know: a FlashAttention-2 backward in plain Triton, without atomics.

Python decides here, `templates/triton_backward.py.j2` only writes.  The kernels run from sm_80 on (with tensor descriptors
from sm_90 on) and in Triton's interpreter.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from tilecast.codegen.gluon import in_lines
from tilecast.codegen.host import WINDOW_STATEMENTS, Host, box_loops
from tilecast.codegen.masks import keys_seen_and_masked
from tilecast.codegen.part_sums import PartSums
from tilecast.codegen.pieces import Piece, pieces
from tilecast.codegen.row_terms import FOR_ROWS, STRIDE, RowTerms, strides
from tilecast.model.kernel.header import dims_text
from tilecast.model.kernel.variants import fa2_backward
from tilecast.model.kernel.variants.fa2_backward import Fa2BackwardVariant
from tilecast.model.kernel.workload import Workload

TEMPLATE = "triton_backward.py.j2"
#: Masks of the loop over queries: what `add_queries` takes (nothing: its blocks are never masked), and the condition.
_KEY_SIDE = {
    "none": ("", ""),
    "causal": ("keys, diagonal, ", "keys[:, None] <= at"),
    "window": (
        "keys, diagonal, window_left, window_right, ",
        "(keys[:, None] >= at - window_left) & (keys[:, None] <= at + window_right)",
    ),
}
#: Masks of the loop over keys: what `add_keys` takes, and the condition.
_QUERY_SIDE = {
    "none": ("seqlen_k", "keys < seqlen_k"),
    "causal": ("last_key", "keys <= last_key[:, None]"),
    "window": ("first_key, last_key", "(keys >= first_key[:, None]) & (keys <= last_key[:, None])"),
}
_SIZES = ("heads_q", "group", "part", "seqlen_q", "seqlen_k", "padded")
#: Tensors of the kernel of dQ: those of which tiles move, and those of which one tile stays or is written.
_QUERY_TENSORS = (("k", "v"), ("q", "dout", "dq"))


@dataclass(frozen=True, slots=True)
class KeyKernel:
    """A kernel whose programs own keys: of dK, of dV, or of both."""

    name: str
    #: The function of a step.
    step: str
    #: What it adds up, and the tensors of which a tile stays for that.
    sums: tuple[str, ...]
    stays: tuple[str, ...]
    about: str
    step_about: str

    @property
    def tensors(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Tensors of which tiles move, and those of which one tile stays or is written."""
        return ("q", "dout"), (*self.stays, *self.sums)


_TOGETHER = (
    KeyKernel("key_gradients", "add_queries", ("dk", "dv"), ("k", "v"), "dK and dV",
              "S^T = K Q^T, dV += P^T dO, dP^T = V dO^T, dK += dS^T Q"),
)  # fmt: skip
_APART = (
    KeyKernel("key_gradients", "add_queries_to_dk", ("dk",), ("k", "v"), "dK",
              "S^T = K Q^T, dP^T = V dO^T, dK += dS^T Q"),
    KeyKernel("value_gradients", "add_queries_to_dv", ("dv",), ("k",), "dV", "S^T = K Q^T, dV += P^T dO"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TritonBackward(RowTerms, PartSums):
    """Everything `TEMPLATE` reads except the header, as ``k``."""

    title: str
    description: str
    mask: str
    head_dim_qk: int
    head_dim_v: int
    variant: Fa2BackwardVariant
    qk_pieces: tuple[Piece, ...]
    v_pieces: tuple[Piece, ...]

    # -- constants -----------------------------------------------------------------------------------------------------

    @property
    def queries_described(self) -> bool:
        """Whether tiles of Q and dO come to the keys' loop by tensor descriptors."""
        return self.variant.dkv_loads == "descriptors"

    @property
    def keys_described(self) -> bool:
        """Whether tiles of K and V come to the queries' loop by tensor descriptors."""
        return self.variant.dq_loads == "descriptors"

    def _described_where_it_moves(self, tensor: str) -> bool:
        return self.keys_described if tensor in "kv" else self.queries_described

    @property
    def padded(self) -> int:
        """Rows that terms are padded to: what no loop reads beyond."""
        return max(self.variant.dkv_tile_m, self.variant.dq_tile_m, self.rows)

    # -- names ---------------------------------------------------------------------------------------------------------

    def _names(self, tensor: str) -> list[str]:
        return [f"{tensor}{piece.suffix}" for piece in self._pieces(tensor)]

    def _pieces(self, tensor: str) -> tuple[Piece, ...]:
        return self.qk_pieces if tensor in ("q", "k", "dq", "dk") else self.v_pieces

    @property
    def key_kernels(self) -> tuple[KeyKernel, ...]:
        """The kernels of dK and dV."""
        return _APART if self.variant.dkv_apart else _TOGETHER

    def kv_names(self, kernel: KeyKernel) -> str:
        """K and V that stay."""
        return ", ".join(name for tensor in kernel.stays for name in self._names(tensor))

    @property
    def query_names(self) -> str:
        """Q, dO and the terms of their rows that stay."""
        return ", ".join([*self._names("q"), *self._names("dout"), "lse2", "delta"])

    def key_sums(self, kernel: KeyKernel) -> str:
        """Sums of a loop over queries."""
        return ", ".join(name for tensor in kernel.sums for name in self._names(tensor))

    def first_key_sums(self, kernel: KeyKernel) -> str:
        """The same before any query."""
        widths = [piece.width for tensor in kernel.sums for piece in self._pieces(tensor)]
        made = ", ".join(f"tl.zeros([DKV_TILE_N, {width}], tl.float32)" for width in widths)
        return f"({made})" if len(widths) > 1 else made

    @property
    def dq(self) -> str:
        """Sums of the queries' loop."""
        return ", ".join(self._names("dq"))

    @property
    def dq_state(self) -> str:
        """The same as one value."""
        return f"({self.dq})" if len(self.qk_pieces) > 1 else self.dq

    @property
    def first_dq(self) -> str:
        """dQ before any key."""
        return ", ".join(f"tl.zeros([DQ_TILE_M, {piece.width}], tl.float32)" for piece in self.qk_pieces)

    @property
    def queries(self) -> str:
        """Where Q and dO of a head are, and the terms of its rows."""
        where = [*self._described("q"), *self._described("dout"), "batch", "head"]
        if not self.queries_described:
            where = ["q_head", "dout_head", "stride_qs", "stride_ds", "seqlen_q"]
        return ", ".join([*where, "terms_head", "padded"])

    @property
    def kv(self) -> str:
        """Where K and V of a head are."""
        if self.keys_described:
            return ", ".join([*self._described("k"), *self._described("v"), "batch", "head_kv"])
        return "k_ptr, v_ptr, stride_ks, stride_vs"

    def _described(self, tensor: str) -> list[str]:
        return [f"{tensor}_desc{piece.suffix}" for piece in self._pieces(tensor)]

    # -- masks ---------------------------------------------------------------------------------------------------------

    @property
    def key_limits(self) -> str:
        """What `add_queries` compares positions with, a comma after each; nothing where no block is masked."""
        return _KEY_SIDE[self.mask][0]

    @property
    def key_visible(self) -> str:
        """The condition under which a masked block's query sees a key, keys down, queries across."""
        return _KEY_SIDE[self.mask][1]

    @property
    def query_limits(self) -> str:
        """What `add_keys` compares keys with."""
        found = _QUERY_SIDE[self.mask][0]
        # Loads of masked blocks must stop at the last key.
        return f"{found}, seqlen_k" if not self.keys_described and self.mask != "none" else found

    @property
    def query_visible(self) -> str:
        """The condition under which a key of a masked block is seen, queries down, keys across."""
        return _QUERY_SIDE[self.mask][1]

    # -- statements ----------------------------------------------------------------------------------------------------

    def _stays(self, tensor: str, valid: str, tile: str) -> list[str]:
        """Statements that load a tile which stays: once for a program, so always from pointers."""
        return [
            f"{tensor}{piece.suffix} = load_rows({tensor}_ptr{piece.offset}, stride_{STRIDE[tensor]}s, {valid}, {tile}, {piece.width}, True)"
            for piece in self._pieces(tensor)
        ]

    def _moves(self, tensor: str, piece: Piece, tile: str, place: str, head: str, checked: str) -> str:
        """The statement that loads a tile of a step."""
        name = f"{tensor}{piece.suffix}"
        if self._described_where_it_moves(tensor):
            box = f"{tensor}_desc{piece.suffix}.load([batch, {head}, {place}, {piece.start}])"
            return f"{name} = {box}.reshape([{tile}, {piece.width}])"
        rows = "seqlen_q - row" if place == "row" else "seqlen_k - key"
        stride = f"stride_{STRIDE[tensor]}s"
        return f"{name} = load_rows({tensor}_block{piece.offset}, {stride}, {rows}, {tile}, {piece.width}, {checked})"

    def _blocks(self, tensors: tuple[str, str], place: str, base: str) -> list[str]:
        """Statements that find the rows of a step."""
        if self._described_where_it_moves(tensors[0]):
            return []
        return [f"{x}_block = {x}{base} + tl.cast({place}, tl.int64) * stride_{STRIDE[x]}s * 8" for x in tensors]

    def kv_statements(self, kernel: KeyKernel) -> tuple[str, ...]:
        """Statements that load K and V of a program of keys."""
        loads = [line for tensor in kernel.stays for line in self._stays(tensor, "seqlen_k - key", "DKV_TILE_N")]
        return (*loads, f"kv = ({self.kv_names(kernel)})")

    def key_places(self, tensors: tuple[str, ...], head: str = "head_kv") -> tuple[str, ...]:
        """Statements that find the rows of a program of keys."""
        rows = (("batch", "b"), (head, "h"), ("key", "s"))
        return tuple(
            f"{x}_ptr += ("
            + " + ".join(f"{place}.to(tl.int64) * stride_{STRIDE[x]}{axis}" for place, axis in rows)
            + ") * 8"
            for x in tensors
        )

    @property
    def head_statements(self) -> tuple[str, ...]:
        """Statements that find Q and dO of a head."""
        lines = []
        if not self.queries_described:
            for x in ("q", "dout"):
                batch, head = (f"stride_{STRIDE[x]}{axis}" for axis in "bh")
                lines.append(
                    f"{x}_head = {x}_ptr + (batch.to(tl.int64) * {batch} + tl.cast(head, tl.int64) * {head}) * 8"
                )
        return (*lines, f"queries = ({self.queries})")

    @property
    def st_statements(self) -> tuple[str, ...]:
        """Statements for S^T of a block of queries."""
        lines = self._blocks(("q", "dout"), "row", "_head")
        for piece in self.qk_pieces:
            lines.append(self._moves("q", piece, "DKV_TILE_M", "row", "head", "True"))
            lines.append(f"s = tl.dot(k{piece.suffix}, q{piece.suffix}.T{', s' if piece.start else ''})")
        return tuple(lines)

    def dout_statements(self, kernel: KeyKernel) -> tuple[str, ...]:
        """Statements that load dO of a block of queries, add to dV, and those for dP^T."""
        lines = []
        for piece in self.v_pieces:
            dout, dv = f"dout{piece.suffix}", f"dv{piece.suffix}"
            lines.append(self._moves("dout", piece, "DKV_TILE_M", "row", "head", "True"))
            if "dv" in kernel.sums:
                lines.append(f"{dv} = tl.dot(p.to({dout}.dtype), {dout}, {dv})")
            if "dk" in kernel.sums:
                lines.append(f"dp = tl.dot(v{piece.suffix}, {dout}.T{', dp' if piece.start else ''})")
        return tuple(lines)

    def dk_statements(self, kernel: KeyKernel) -> tuple[str, ...]:
        """Statements that make dS^T and add to dK."""
        if "dk" not in kernel.sums:
            return ()
        delta = "tl.load(terms_head + padded + rows)[None, :]"
        adds = (f"dk{x.suffix} = tl.dot(ds, q{x.suffix}, dk{x.suffix})" for x in self.qk_pieces)
        return (f"ds = (p * (dp - {delta})).to({self._names('q')[0]}.dtype)", *adds)

    def key_stores(self, kernel: KeyKernel) -> tuple[str, ...]:
        """Statements that write dK and dV."""
        return tuple(
            line
            for tensor in kernel.sums
            for line in self._stores(tensor, "seqlen_k - key", "DKV_TILE_N", " * scale" if tensor == "dk" else "")
        )

    def _stores(self, tensor: str, valid: str, tile: str, factor: str) -> tuple[str, ...]:
        stride = f"stride_{STRIDE[tensor]}s"
        return tuple(
            f"store_rows({tensor}_ptr{x.offset}, {stride}, {valid}, {tensor}{x.suffix}{factor}, {tile}, {x.width})"
            for x in self._pieces(tensor)
        )

    @property
    def query_statements(self) -> tuple[str, ...]:
        """Statements that load Q and dO of a program of queries."""
        return tuple(line for x in ("q", "dout") for line in self._stays(x, "seqlen_q - row", "DQ_TILE_M"))

    @property
    def s_statements(self) -> tuple[str, ...]:
        """Statements for S of a block of keys."""
        lines = self._blocks(("k", "v"), "key", "_ptr")
        for piece in self.qk_pieces:
            lines.append(self._moves("k", piece, "DQ_TILE_N", "key", "head_kv", "MASKED"))
            lines.append(f"s = tl.dot(q{piece.suffix}, k{piece.suffix}.T{', s' if piece.start else ''})")
        return tuple(lines)

    @property
    def dp_statements(self) -> tuple[str, ...]:
        """Statements for dP of a block of keys."""
        lines = []
        for piece in self.v_pieces:
            lines.append(self._moves("v", piece, "DQ_TILE_N", "key", "head_kv", "MASKED"))
            lines.append(f"dp = tl.dot(dout{piece.suffix}, v{piece.suffix}.T{', dp' if piece.start else ''})")
        return tuple(lines)

    @property
    def dq_statements(self) -> tuple[str, ...]:
        """Statements that add to dQ."""
        return tuple(f"dq{x.suffix} = tl.dot(ds, k{x.suffix}, dq{x.suffix})" for x in self.qk_pieces)

    @property
    def dq_stores(self) -> tuple[str, ...]:
        """Statements that write dQ."""
        return self._stores("dq", "seqlen_q - row", "DQ_TILE_M", " * scale")

    @property
    def first_k(self) -> str:
        """A piece of K, for its dtype."""
        return self._names("k")[0]

    # -- signatures and launches ---------------------------------------------------------------------------------------

    @property
    def _window(self) -> tuple[str, ...]:
        return ("window_left", "window_right") if self.mask == "window" else ()

    def unspecialized(self, moving: tuple[str, ...], staying: tuple[str, ...]) -> str:
        """Places of strides and sizes among a kernel's arguments: the compiled code must not depend on them."""
        described, pointers = self._tensors(moving, staying)
        first = len(described) + len(pointers) + 1
        return f"range({first}, {first + 3 * len(pointers) + len(_SIZES) + len(self._window)})"

    @property
    def query_tensors(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Tensors of the kernel of dQ."""
        return _QUERY_TENSORS

    def _tensors(self, moving: tuple[str, ...], staying: tuple[str, ...]) -> tuple[list[str], tuple[str, ...]]:
        """(descriptors, tensors given as pointers) of a kernel, in the order of its arguments."""
        if self._described_where_it_moves(moving[0]):
            return [name for x in moving for name in self._described(x)], staying
        return [], (*moving, *staying)

    def _signature(self, name: str, moving: tuple[str, ...], staying: tuple[str, ...]) -> str:
        described, pointers = self._tensors(moving, staying)
        names = [*described, *(f"{x}_ptr" for x in pointers), "terms_ptr", *strides(pointers), *_SIZES, *self._window]
        return in_lines(", ".join([*names, "scale_log2", "scale"]), f"def {name}(", "):")

    def key_signature(self, kernel: KeyKernel) -> str:
        """The head of a kernel whose programs own keys."""
        return self._signature(kernel.name, *kernel.tensors)

    @property
    def query_signature(self) -> str:
        """The head of the kernel of dQ."""
        return self._signature("query_gradients", *_QUERY_TENSORS)

    @property
    def key_rows(self) -> str:
        """The constant of the keys of a program."""
        return "DKV_TILE_N"

    @property
    def once_rows(self) -> int:
        """Query rows that take as long as what a program does once."""
        return fa2_backward.ONCE_ROWS

    @property
    def host(self) -> Host:
        """What windows the host takes."""
        return Host(self.mask, self.head_dim_qk, self.head_dim_v, (), "")

    def _boxes(self, name: str, tensors: tuple[str, ...], rows: str) -> list[str]:
        """Statements that make the descriptors of a kernel."""
        loops, columns = box_loops([(x, rows, piece.width) for x in tensors for piece in self._pieces(x)])
        made = f"TensorDescriptor.from_tensor(x, [1, 1, count.value, {columns}])"
        return [f"{name} = [", f"    {made}", *(f"    {loop}" for loop in loops), "]"]

    @property
    def host_statements(self) -> tuple[str, ...]:
        """Statements that return the launches of a call."""
        lines = list(WINDOW_STATEMENTS) if self.mask == "window" else []
        sizes = "heads_q, group, part, seqlen_q, seqlen_k, padded"
        lines += [f"sizes = ({', '.join([sizes, *self._window])})"]
        if self.queries_described:
            lines += self._boxes("of_queries", ("q", "dout"), "DKV_TILE_M")
        if self.keys_described:
            lines += self._boxes("of_keys", ("k", "v"), "DQ_TILE_N")
        lines += list(FOR_ROWS)
        launches = ["    (row_terms, (padded // ROWS.value * batch * heads_q, 1, 1), for_rows),"]
        blocks = "triton.cdiv(seqlen_k, DKV_TILE_N.value) * batch * heads_kv"
        for kernel in self.key_kernels:
            lines.append(self._arguments(f"for_{kernel.name}", "of_queries", *kernel.tensors))
            launches.append(f"    ({kernel.name}, ({blocks}, sum_heads // heads_kv, 1), for_{kernel.name}),")
        lines.append(self._arguments("for_queries", "of_keys", *_QUERY_TENSORS))
        blocks = "triton.cdiv(seqlen_q, DQ_TILE_M.value) * batch * heads_q"
        launches.append(f"    (query_gradients, ({blocks}, 1, 1), for_queries),")
        return (*lines, "return (", *launches, "    *last,", ")")

    def _arguments(self, name: str, boxes: str, moving: tuple[str, ...], staying: tuple[str, ...]) -> str:
        """The statement that collects a kernel's arguments but the scales."""
        given = ", ".join(f"made_{x}" if x in ("dk", "dv") else x for x in self._tensors(moving, staying)[1])
        head = f"*{boxes}, " if self._described_where_it_moves(moving[0]) else ""
        return f"{name} = ({head}{given}, terms, *(n // 8 for x in ({given}) for n in x.stride()[:3]), *sizes)"


def context(variant: Fa2BackwardVariant, workload: Workload) -> TritonBackward:
    """The kernels of a variant, which must be writable (`fa2_backward.writable`)."""
    return TritonBackward(
        title=_title(workload),
        description=_description(variant, workload),
        mask=workload.mask,
        head_dim_qk=workload.head_dim_qk,
        head_dim_v=workload.head_dim_v,
        variant=variant,
        qk_pieces=pieces(workload.head_dim_qk),
        v_pieces=pieces(workload.head_dim_v),
    )


def _title(workload: Workload) -> str:
    mask = {"none": "Attention", "causal": "Causal attention", "window": "Sliding-window attention"}[workload.mask]
    return (
        f"{mask} backward for head_dim {dims_text(workload)}: FlashAttention-2 in plain Triton, the same bits every run"
    )


def _description(variant: Fa2BackwardVariant, workload: Workload) -> str:
    keys = "programs of key_gradients keep dK and dV"
    if variant.dkv_apart:
        keys = "programs of key_gradients keep dK, those of value_gradients dV"
    products = "eight" if variant.dkv_apart else "seven"
    lines = [
        keys_seen_and_masked(workload.mask),
        "No atomics: row_terms makes two numbers of each query row,",
        f"{keys} of {variant.dkv_tile_n} keys and walk over {variant.dkv_tile_m} queries at a time,",
        f"query_gradients keeps dQ of {variant.dq_tile_m} queries and walks over {variant.dq_tile_n} keys at a time.",
        f"Each computes what it needs of S and dP: {products} matrix products in place of five, and no sum of several programs.",
    ]
    split = [dim for dim in (workload.head_dim_qk, workload.head_dim_v) if dim & (dim - 1)]
    if split:
        sums = " + ".join(str(piece.width) for piece in pieces(split[0]))
        lines.append(f"Triton's blocks are powers of two: head_dim {split[0]} goes as {sums}, nothing is padded.")
    return textwrap.fill(" ".join(lines), 120)
