"""What the template of the `hopper_ws` family needs to know: a warp-specialised FlashAttention-3 class forward.

Python decides here, `templates/hopper_ws.py.j2` only writes.  The order in which a consumer issues its matrix products
and the depth of the rings are read off the pipeline of the variant, the same value that the forecast simulates.
"""

from __future__ import annotations

import struct
import textwrap
from dataclasses import dataclass

from tilecast.codegen.exp2 import COEFFICIENTS, emulated_of_eight
from tilecast.codegen.host import SMS_STATEMENT, WINDOW_STATEMENTS, Host, box_statements
from tilecast.model.families import build_pipeline
from tilecast.model.kernel.variants.fa3 import Fa3Variant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.pipeline.graph import Pipeline

TEMPLATE = "hopper_ws.py.j2"
ROWS = 64
#: Columns of V from which on registers are scarce: O takes half as many in each thread.
_WIDE = 192
#: (consumer, producer) registers a thread and the cap at entry, by consumer warpgroups: 65536 registers in all.
_REGISTERS = {1: (240, 24, 240), 2: (232, 40, 168), 3: (160, 32, 128)}
#: The same where two warpgroups keep 128 registers of O each: the load warp makes do with what is left.
_WIDE_REGISTERS = (240, 24, 168)
_RESCALE_TEXT = {
    "always": "Online softmax: O is rescaled in every step.",
    "conditional": "Online softmax with conditional rescale: O is only rescaled when the maximum of one of the rows has "
    "grown by more than 2^{threshold:g}.",
    "anchored": "Anchored softmax: the row maximum of the first blocks is the reference of all exponentials, so the steady "
    "state has neither a row maximum nor a rescale of O.  That is exact while no exponential leaves the range of its type; "
    "the row sums tell, and rows where one did are done again with the online softmax.",
}
_MASK_TEXT = {
    "none": "Every query sees every key.",
    "causal": "Causal: query i sees keys up to i + seqlen_k - seqlen_q; only blocks on that diagonal are masked.",
    "window": "Sliding window: query i sees keys from window_left before to window_right after position "
    "i + seqlen_k - seqlen_q (-1: no limit); only blocks on the two edges of that band are masked.",
}
_DOCSTRING_WIDTH = 118


@dataclass(frozen=True, slots=True)
class Piece:
    """Columns [offset, offset + width) of a head: Triton's tensors have power-of-two extents, heads of 96 do not."""

    offset: int
    width: int


def pieces(width: int) -> tuple[Piece, ...]:
    """``width`` columns as power-of-two pieces of at most 256, widest first."""
    out: list[Piece] = []
    offset = 0
    while offset < width:
        size = min(256, 1 << ((width - offset).bit_length() - 1))
        out.append(Piece(offset, size))
        offset += size
    return tuple(out)


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A tensor descriptor of the kernel: its name, the tensor it is of, and its box of ``rows`` (a constant) x columns."""

    name: str
    tensor: str
    rows: str
    columns: int


@dataclass(frozen=True, slots=True)
class HopperKernel:
    """Everything `TEMPLATE` reads except the header; its ``k``."""

    title: str
    #: Paragraphs, wrapped.
    description: str
    mask: str
    #: Consumer warpgroups of a CTA, and query rows of each.
    warpgroups: int
    rows: int
    #: Query rows of a CTA and keys of a block.
    tile_m: int
    tile_n: int
    kv_stages: int
    q_stages: int
    head_dim_qk: int
    head_dim_v: int
    qk_pieces: tuple[Piece, ...]
    v_pieces: tuple[Piece, ...]
    rescale: str
    #: Powers of two that a row maximum may grow by before O is rescaled ("conditional").
    rescale_threshold: float
    scheduler: str
    overlap: bool
    ping_pong: bool
    issue_order: tuple[str, ...]
    #: Of eight exponentials, how many are polynomials, and PTX literals of its coefficients, lowest power first.
    emulated_eighths: int
    polynomial: tuple[str, ...]
    #: Of the partitions after the default one.
    worker_warps: list[int]
    worker_registers: list[int]
    registers_at_launch: int

    @property
    def exp2(self) -> str:
        """Function for the exponentials of scores."""
        return "exp2" if self.emulated_eighths else "mufu_exp2"

    @property
    def turns(self) -> str:
        """Over which turns a program loops: a grid gives each program one tile."""
        return "gl.static_range(1)" if self.scheduler == "grid" else "range(problem.turns)"

    @property
    def numbers(self) -> tuple[str, ...]:
        """Fields of `Problem` that are sizes, in the order of the kernel's arguments."""
        window = ("window_left", "window_right") if self.mask == "window" else ()
        dealt = () if self.scheduler == "grid" else ("heads", "turns")
        sizes = (
            "stride_b",
            "stride_h",
            "stride_s",
            "seqlen_q",
            "seqlen_k",
            *window,
            "heads_q",
            "group",
            "query_blocks",
        )
        return (*sizes, *dealt)

    @property
    def numbers_quoted(self) -> str:
        """`numbers` as a list of string literals."""
        return ", ".join(f'"{name}"' for name in self.numbers)

    @property
    def wide(self) -> bool:
        """Whether O leaves so few registers that what can be computed again must not be kept."""
        return self.head_dim_v > _WIDE

    @property
    def descriptors(self) -> tuple[Descriptor, ...]:
        """Tensor descriptors in the order of the kernel's arguments, one to a piece."""
        found = []
        for tensor, parts, rows in (("q", self.qk_pieces, "ROWS"), ("k", self.qk_pieces, "TILE_N"), ("v", self.v_pieces, "TILE_N")):  # fmt: skip
            names = [f"{tensor}_desc_{i}" for i in range(len(parts))] if self.several else [f"{tensor}_desc"]
            found += [Descriptor(name, tensor, rows, part.width) for name, part in zip(names, parts, strict=True)]
        return tuple(found)

    @property
    def several(self) -> bool:
        """Whether tiles are tuples of pieces."""
        return len(self.qk_pieces) > 1 or len(self.v_pieces) > 1

    @property
    def host(self) -> Host:
        """The host side."""
        lines = [*box_statements([(made.tensor, made.rows, made.columns) for made in self.descriptors])]
        lines += WINDOW_STATEMENTS if self.mask == "window" else ()
        lines += ["query_blocks, heads = triton.cdiv(seqlen_q, TILE_M.value), batch * heads_q"]
        if self.scheduler == "grid":
            lines += ["programs = query_blocks * heads"]
        elif self.scheduler == "paired":
            lines += [
                SMS_STATEMENT,
                "pairs = (query_blocks + 1) // 2 * heads",
                "programs = min(sms, pairs)",
                "turns = 2 * triton.cdiv(pairs, programs)",
            ]
        else:
            lines += [
                SMS_STATEMENT,
                "programs = min(sms, query_blocks * heads)",
                "turns = triton.cdiv(query_blocks * heads, programs)",
            ]
        names = ("heads_q // heads_kv" if name == "group" else name for name in self.numbers[3:])
        lines += [
            "strides = (stride // 8 for stride in out.stride()[:3])",
            f"numbers = (*strides, {', '.join(names)})",
        ]
        described = tuple(made.tensor for made in self.descriptors)
        return Host(self.mask, self.head_dim_qk, self.head_dim_v, described, tuple(lines))

    def descriptors_of(self, tensor: str) -> str:
        """The descriptors of q, k or v as the roles take them: one, or a tuple."""
        names = [made.name for made in self.descriptors if made.tensor == tensor]
        return f"({', '.join(names)},)" if self.several else names[0]


def issue_order(pipeline: Pipeline) -> tuple[str, ...]:
    """The matrix products a consumer issues in one iteration, in the pipeline's order: "qk" and "pv"."""
    role = next(role for role in pipeline.roles if role.name == "consumer0")
    return tuple(pipeline.op(step.op).kind for step in role.program if pipeline.op(step.op).engine == "tensor")


def ring_depth(pipeline: Pipeline, name: str) -> int:
    """Slots of a buffer of the pipeline."""
    return next(buffer.depth for buffer in pipeline.buffers if buffer.name == name)


def context(variant: Fa3Variant, workload: Workload, machine: Machine) -> HopperKernel:
    """The kernel of a variant as `TEMPLATE` reads it.  The variant must be writable (`model.families.writable`)."""
    pipeline = build_pipeline(workload, variant, machine)
    order = issue_order(pipeline)
    if variant.overlap and order != ("qk", "pv"):
        raise ValueError(f"hopper_ws waits for S while P V runs, so S comes first: got the order {order}")
    consumer, load, at_launch = (
        _WIDE_REGISTERS if workload.head_dim_v > _WIDE and variant.warpgroups == 2 else _REGISTERS[variant.warpgroups]
    )
    workers = variant.warpgroups - 1  # the first consumer is the default partition
    eighths = emulated_of_eight(variant.emulated_share) or 0
    return HopperKernel(
        title=_title(workload),
        description=_description(variant, workload),
        mask=workload.mask,
        warpgroups=variant.warpgroups,
        rows=ROWS,
        tile_m=ROWS * variant.warpgroups,
        tile_n=variant.tile_n,
        kv_stages=ring_depth(pipeline, "K"),
        q_stages=ring_depth(pipeline, "Q"),
        head_dim_qk=workload.head_dim_qk,
        head_dim_v=workload.head_dim_v,
        qk_pieces=pieces(workload.head_dim_qk),
        v_pieces=pieces(workload.head_dim_v),
        rescale=variant.rescale,
        rescale_threshold=variant.rescale_threshold,
        scheduler=variant.scheduler,
        overlap=variant.overlap,
        ping_pong=variant.ping_pong and variant.warpgroups > 1,
        issue_order=order,
        emulated_eighths=eighths,
        polynomial=tuple(_float_bits(c) for c in (1.0, *COEFFICIENTS[variant.poly_degree])) if eighths else (),
        worker_warps=[4] * workers + [1],
        worker_registers=[consumer] * workers + [load],
        registers_at_launch=at_launch,
    )


def _float_bits(value: float) -> str:
    """A PTX literal of the float32 nearest ``value``."""
    return f"0f{struct.unpack('<I', struct.pack('<f', value))[0]:08X}"


def _title(workload: Workload) -> str:
    qk, v = workload.head_dim_qk, workload.head_dim_v
    mask = {"none": "no mask", "causal": "causal", "window": "sliding window"}[workload.mask]
    return f"Attention forward on Hopper: head_dim {qk if qk == v else f'{qk}/{v}'}, {mask}."


def _description(variant: Fa3Variant, workload: Workload) -> str:
    """Paragraphs of the docstring."""
    how = [
        f"A load warp copies tiles of Q, K and V into rings in shared memory; {variant.warpgroups} consumer "
        f"warpgroup{'s' if variant.warpgroups > 1 else ''} of {ROWS} query rows {'share' if variant.warpgroups > 1 else 'reads'} them.",
        _RESCALE_TEXT[variant.rescale].format(threshold=variant.rescale_threshold),
    ]
    if variant.overlap:
        how.append("Each warpgroup issues Q K^T of the next key block together with P V of this one and works on the next softmax while P V runs.")  # fmt: skip
    if variant.ping_pong and variant.warpgroups > 1:
        how.append("Warpgroups take turns at issuing matrix products, so that one's softmax runs under another's products.")  # fmt: skip
    if variant.emulated_share:
        how.append(f"A share of {variant.emulated_share:g} of the exponentials is a polynomial on the FMA pipe.")
    where = _MASK_TEXT[workload.mask] + "  Queries and keys are aligned bottom right"
    where += "." if workload.mask == "none" else "; a query that sees no key gives zeros and a log-sum-exp of -inf."
    return "\n\n".join(textwrap.fill(text, _DOCSTRING_WIDTH) for text in ("  ".join(how), where))
