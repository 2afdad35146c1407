"""Unfused attention: S = Q K^T to memory, row softmax over S, O = P V, three kernels with N^2 traffic.

Each kernel is a pipeline of its own, streamed through HBM; the forecast adds them up.  This is the argument of the
FlashAttention-1 paper: the score matrix goes to memory and back twice, so HBM bandwidth sets the time.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilecast.model.kernel.variants.unfused import UnfusedVariant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.pipeline import softmax_cost as common
from tilecast.model.pipeline.graph import Buffer, Edge, Op, Pipeline, Role, Step

#: K-step of the two matrix kernels (elements) and rows a softmax CTA handles at a time.
_K_STEP = 64
_TILE = 128


@dataclass(frozen=True, slots=True)
class UnfusedKernel:
    """One of the three kernels: its loop, how many iterations in all, and the bytes it moves."""

    name: str
    pipeline: Pipeline
    iterations: float
    tensor_flop: float
    read_bytes: float
    write_bytes: float


def kernels(workload: Workload, variant: UnfusedVariant, machine: Machine) -> tuple[UnfusedKernel, ...]:
    """The three kernels in launch order.

    Frameworks compute the full score matrix and mask it, so causal saves nothing here.
    """
    w = workload
    size = w.dtype_bytes
    middle = variant.intermediate_bytes or max(2, size)
    heads = w.batch * w.heads_q
    scores = float(heads) * w.seqlen_q * w.seqlen_k
    q, kv = heads * w.seqlen_q, w.batch * w.heads_kv * w.seqlen_k
    tiles = heads * -(-w.seqlen_q // _TILE)
    columns = -(-w.seqlen_k // _TILE)
    steps_qk = -(-w.head_dim_qk // _K_STEP)
    return (
        UnfusedKernel(
            "S = Q K^T", _gemm("unfused qk", w, machine, _TILE, middle / steps_qk),
            tiles * columns * float(steps_qk), 2.0 * scores * w.head_dim_qk,
            float(size) * (q + kv) * w.head_dim_qk, scores * middle,
        ),
        UnfusedKernel(
            "P = softmax(S)", _softmax(w, machine, middle), scores / _TILE / _TILE, 0.0, scores * middle, scores * middle
        ),
        UnfusedKernel(
            "O = P V", _gemm("unfused pv", w, machine, w.head_dim_v, 0.0),
            tiles * float(-(-w.seqlen_k // _K_STEP)), 2.0 * scores * w.head_dim_v,
            scores * middle + float(size) * kv * w.head_dim_v, 2.0 * q * w.head_dim_v,
        ),
    )  # fmt: skip


def _gemm(name: str, w: Workload, m: Machine, n: int, stored: float) -> Pipeline:
    """One K-step of a 128 x n output tile; ``stored`` is the output bytes per element and step."""
    rate = m[f"tensor.{w.dtype}_flop_per_clk"]
    cycles = 2.0 * _TILE * n * _K_STEP / rate
    fill = common.load_cycles(m, (_TILE + n) * _K_STEP * w.dtype_bytes)
    read = (_TILE + n) * _K_STEP * w.dtype_bytes / m["smem.bytes_per_clk"]
    ops = [
        Op("load", "load", "load", (("tma", fill),), fill, engine="tma"),
        Op("mma", "mma", "mma", (("tensor", cycles), ("smem", min(read, cycles))), cycles, engine="tensor"),
    ]
    if stored:
        write = _TILE * n * stored / m["smem.bytes_per_clk"]
        ops.append(Op("store", "store", "store", (("smem", write),), write))
    edges = [
        Edge("load", "mma", 0, m["l2.latency_cycles"], "data", "tiles"),
        Edge("mma", "load", 4, 0.0, "buffer", "tile slot"),
    ]
    if stored:
        edges.append(Edge("mma", "store", 0, 0.0, "data", "accumulator"))
    roles = tuple(Role(op.role, (Step(op.name),)) for op in ops)
    stage = (_TILE + n) * _K_STEP * w.dtype_bytes
    return Pipeline(
        name, m.name, tuple(ops), tuple(edges), roles, (Buffer("tiles", "smem", stage, 4, "load", "mma"),),
        _TILE, n, 1, m["launch.cta_start_cycles"], m["l2.latency_cycles"],
    )  # fmt: skip


def _softmax(w: Workload, m: Machine, middle: int) -> Pipeline:
    """128 x 128 elements of S: read, maximum, exponential, sum, write."""
    elements = float(_TILE * _TILE)
    work = common.add(
        common.row_max_work(m, elements),
        common.exp_work(m, w, elements, 0.0, 3),
        common.row_sum_work(m, elements),
    )
    load = common.load_cycles(m, elements * middle)
    ops = (
        Op("load", "load", "load", (("tma", load),), load, engine="tma"),
        Op("softmax", "exp", "warps", work.cycles, work.busiest(), instructions=work.instructions),
        Op("store", "store", "store", (("tma", load),), load, engine="tma"),
    )
    edges = (
        Edge("load", "softmax", 0, m["l2.latency_cycles"], "data", "scores"),
        Edge("softmax", "load", 2, 0.0, "buffer", "row slot"),
        Edge("softmax", "store", 0, 0.0, "data", "probabilities"),
    )
    roles = tuple(Role(op.role, (Step(op.name),)) for op in ops)
    return Pipeline(
        "unfused softmax", m.name, ops, edges, roles,
        (Buffer("rows", "smem", int(elements * middle), 2, "load", "softmax"),),
        _TILE, _TILE, 1, m["launch.cta_start_cycles"], m["l2.latency_cycles"],
    )  # fmt: skip
