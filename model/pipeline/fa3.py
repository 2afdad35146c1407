"""FlashAttention-3 forward on Hopper: a copy producer and wgmma consumer warpgroups of 64 query rows each.

With intra-warpgroup overlap a warpgroup issues QK of block j+1 and PV of block j together, then works on the
softmax of block j+1 while PV still runs; the O rescale waits for that PV.  With rescale="anchored" the steady state
has neither row max nor rescale: exponentials take the row max of the first blocks as their reference.  That is the
cost of even scores; blocks in which some row of a warp outgrows its reference pay for row max, rescale and a second
scaling of P, which no forecast charges because it depends on the data (docs/kernels.md measures it).  Ping-pong adds a turn-taking barrier
between warpgroups so that one's softmax runs under the other's GEMMs.  Accumulators live in registers: the score
layout puts a row on four threads, so each row reduction ends in two shuffles.

Machine code does not always wait where its source does.  Of the recorded loops of generated kernels, those with overlap and
"conditional" wait for PV before their exponentials, "anchored" ones before two thirds of them (tile_n 64; 32: two fifths) and
are taken to wait before all; unmasked ones without overlap have the softmax between the two products.
FlashAttention-3's own step ("always") is taken as its authors show it, under PV.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import inf

from tilecast.model.kernel.alike import with_knobs
from tilecast.model.kernel.variants.fa3 import ALIKE, Fa3Variant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.pipeline import softmax_cost as common
from tilecast.model.pipeline.graph import Buffer, Edge, Op, Pipeline, Role, Step, of_tile
from tilecast.model.pipeline.rescaling import rescale_share
from tilecast.model.pipeline.tensor_core import (
    INSTRUCTIONS_PER_MMA,
    mma_completion_latency_cycles,
    mma_smem_bytes,
    mma_tile_cycles,
)

_ROWS = 64
#: Why a load waits for a product.
_SLOTS = ("K slot", "V slot")
#: Why exponentials wait for PV though the source does not say so: where Triton's compiler puts the wait (module docstring).
COMPILED_WAIT = "wait for O as compiled"
#: Instructions of an anchored step that do not scale with the tile, and those of them on the ALU pipe: counted in the
#: machine code of the generated kernels (`tilecast inspect`, head_dim 64 and 128, Triton 3.9).
_ANCHORED_INSTRUCTIONS = 56
_ANCHORED_ALU_INSTRUCTIONS = 4
#: End of a tile: sums across a quad, reciprocal, logarithm, addresses; stall counts of the generated kernels' machine code.
_STATISTICS_CYCLES = 450.0
#: Barriers of a warpgroup and polls of an mbarrier in one step (machine code of the generated kernels).
_BARRIERS_PER_STEP, _POLLS_PER_STEP = 3, 2
#: FP8 PV needs V transposed in shared memory and P permuted in registers: one byte permute and one shuffle for
#: every four elements of P (FlashAttention-3's in-kernel layout conversion).
_FP8_PERMUTES_PER_ELEMENT = 0.5


def build(workload: Workload, variant: Fa3Variant, machine: Machine) -> Pipeline:
    """The forward loop of ``variant``; legality is the caller's business (`variant.legality`)."""
    loosest = _build(workload, with_knobs(variant, ALIKE.least_waiting), machine)
    return replace(
        loosest, edges=_waiting(loosest.edges, variant), buffers=_buffers(workload, variant),
        prologue_cycles=_prologue_cycles(variant, machine), query_ahead=variant.q_stages > 1,
    )  # fmt: skip


@lru_cache(maxsize=2048)
def _build(workload: Workload, variant: Fa3Variant, machine: Machine) -> Pipeline:
    """What variants share that differ only in how long they wait (`ALIKE.least_waiting`)."""
    groups = range(variant.warpgroups)
    # A warpgroup does the same whatever others there are, but for taking turns with them.
    turns = variant.ping_pong and variant.warpgroups > 1
    alone = with_knobs(variant, {"warpgroups": 2 if turns else 1, "ping_pong": turns})
    first = _group_ops(workload, alone, machine)
    load = Role("load", (Step("load_k"), Step("load_v")), 1, 24)
    registers = 240 if variant.warpgroups == 2 else 160
    edges = [edge for g in groups for edge in _group_edges(workload, variant, machine, g)]
    rows = _ROWS * variant.warpgroups
    size = workload.dtype_bytes
    o = rows * workload.head_dim_v
    return Pipeline(
        name=f"fa3 {rows}x{variant.tile_n}"
        + (" overlap" if variant.overlap else "")
        + (" ping-pong" if variant.ping_pong and variant.warpgroups > 1 else ""),
        machine=machine.name,
        ops=(*_load_ops(workload, variant, machine), *(of_tile(op, g) for g in groups for op in first)),
        edges=tuple(edges),
        roles=(load, *(Role(f"consumer{g}", _program(workload, variant, machine, g), 4, registers) for g in groups)),
        buffers=_buffers(workload, variant),
        rows_per_cta=rows,
        keys_per_iteration=variant.tile_n,
        ctas_per_sm=1,
        prologue_cycles=_prologue_cycles(variant, machine),
        epilogue_cycles=_STATISTICS_CYCLES + o / machine["fma.lanes"] + o / 2.0 / machine["alu.lanes"],
        edge_read_bytes=rows * workload.head_dim_qk * size, edge_write_bytes=o * 2.0,
        tiles_overlap=False, query_ahead=variant.q_stages > 1,
        mask_demand=tuple((f"{_first_step(variant)}{g}", common.mask_work(machine, _ROWS * variant.tile_n * 2.0)) for g in groups),
        facts_used=("regs.mma_share", "tensor.mma_latency_cycles", common.packing_fact(workload), "sync.mbarrier_roundtrip_cycles"),
    )  # fmt: skip


def _waiting(loosest: tuple[Edge, ...], variant: Fa3Variant) -> tuple[Edge, ...]:
    """Edges from those of the variant that waits least: a slot of the ring is there again after ``kv_stages`` blocks."""
    return tuple([e._replace(distance=variant.kv_stages) if e.why in _SLOTS else e for e in loosest])


def _buffers(workload: Workload, variant: Fa3Variant) -> tuple[Buffer, ...]:
    rows, size = _ROWS * variant.warpgroups, workload.dtype_bytes
    return (
        Buffer("Q", "smem", rows * workload.head_dim_qk * size, variant.q_stages, "", "qk0"),
        Buffer("K", "smem", variant.tile_n * workload.head_dim_qk * size, variant.kv_stages, "load_k", "qk0"),
        Buffer("V", "smem", variant.tile_n * workload.head_dim_v * size, variant.kv_stages, "load_v", "pv0"),
    )


def _prologue_cycles(variant: Fa3Variant, machine: Machine) -> float:
    """A CTA from its start to its first copy: two barriers for each slot of K, V and Q, then the roles' hand-over."""
    barriers = 4 * variant.kv_stages + 2 * variant.q_stages * variant.warpgroups
    per_barrier = machine.get("launch.barrier_setup_cycles", 0.0)
    return machine["launch.cta_start_cycles"] + machine.get("launch.cta_setup_cycles", 0.0) + barriers * per_barrier


def _first_step(variant: Fa3Variant) -> str:
    """The softmax operation that reads S first."""
    return "exp" if variant.rescale == "anchored" else "max"


def _mma(w: Workload, m: Machine, name: str, kind: str, g: int, n: int, k: int, a_home: str) -> Op:
    cycles = mma_tile_cycles(m, _ROWS, n, k, w.dtype, a_home, 1)
    read = mma_smem_bytes(_ROWS, n, k, w.dtype, a_home, 1) / m["smem.bytes_per_clk"]
    steps = k * w.dtype_bytes / 32
    # A warpgroup instruction is issued by all four warps, one on each sub-partition.
    count = steps * INSTRUCTIONS_PER_MMA
    demand = [("tensor", cycles), ("smem", min(read, cycles)), ("issue", min(count, cycles))]
    if m.has("regs.mma_share"):
        demand.append(("regs", cycles * m["regs.mma_share"]))
    return Op(
        name, kind, f"consumer{g}", tuple(demand), cycles, engine="tensor", issue_cycles=count,
        hidden_fma=m.get("tensor.mma_hidden_fma_share", inf), tile=g, instructions=(("other", count),),
    )  # fmt: skip


@lru_cache(maxsize=2048)
def _group_ops(w: Workload, v: Fa3Variant, m: Machine) -> list[Op]:
    """Operations of warpgroup 0."""
    g = 0
    role = f"consumer{g}"
    elements = float(_ROWS * v.tile_n)
    step = common.add(common.row_max_work(m, elements), common.bookkeeping_work(m))
    # Rows sit on quads of threads: two dependent shuffle + max steps close each reduction.
    quad = 2 * (m["shuffle.latency_cycles"] + m["alu.latency_cycles"])
    exp = common.exp_work(m, w, elements, v.emulated_share, v.poly_degree)
    if w.dtype == "fp8":
        permutes = elements * _FP8_PERMUTES_PER_ELEMENT
        exp = common.add(exp, common.work(m, {"alu": permutes / m["alu.lanes"]}, {"alu": permutes / 128}))
    total = common.row_sum_work(m, elements)
    if v.rescale == "anchored":
        exp = common.add(exp, common.bookkeeping_work(m, _ANCHORED_ALU_INSTRUCTIONS, _ANCHORED_INSTRUCTIONS))
    o_cycles, o_count = common.fma_cost(m, _ROWS * w.head_dim_v)
    rescale = common.work(m, {"fma": o_cycles}, {"fma": o_count})
    vote = 0.0
    if v.rescale == "conditional":
        rescale = rescale.scaled(rescale_share(v.rescale_threshold))
        # Whether any row of the warpgroup moved: three shuffles, through shared memory and back, two more, a vote.
        vote = 5 * m["shuffle.latency_cycles"] + 2 * m["smem.latency_cycles"] + m.get("sync.barrier_cycles", 0.0)
    sync = _BARRIERS_PER_STEP * m.get("sync.barrier_cycles", 0.0) + _POLLS_PER_STEP * m.get(
        "sync.wait_done_cycles", 0.0
    )
    ops = [
        _mma(w, m, f"qk{g}", "qk", g, v.tile_n, w.head_dim_qk, "smem"),
        Op(f"max{g}", "row max", role, (*step.cycles, ("mufu", _ROWS / m["mufu.ex2_per_clk"])),
           step.busiest() + quad + common.statistics_latency(m), tile=g,
           instructions=(*step.instructions, ("mufu", _ROWS / 128.0))),
        Op(f"exp{g}", "exp", role, exp.cycles, common.one_warp_cycles(m, exp) + common.ramp_latency(m), tile=g,
           instructions=exp.instructions),
        Op(f"sum{g}", "row sum", role, total.cycles, total.busiest(), tile=g, instructions=total.instructions),
        Op(f"rescale{g}", "rescale", role, rescale.cycles, rescale.busiest() + m["fma.latency_cycles"] + vote, tile=g,
           instructions=rescale.instructions),
        _mma(w, m, f"pv{g}", "pv", g, w.head_dim_v, v.tile_n, "register"),
    ]  # fmt: skip
    if v.rescale == "anchored":
        ops = [op for op in ops if op.kind not in ("row max", "rescale")]
    if sync:
        ops.append(Op(f"sync{g}", "barrier", role, (), sync, tile=g))
    if v.ping_pong and v.warpgroups > 1:
        ops += [Op(f"{name}{g}", "barrier", role, (), 0.0, tile=g) for name in ("turn", "pass")]
    if not v.overlap:
        ops += [Op(f"{name}{g}", "barrier", role, (), 0.0, tile=g) for name in ("have_s", "have_o")]
    return ops


def _program(w: Workload, v: Fa3Variant, m: Machine, g: int) -> tuple[Step, ...]:
    """One lap: QK of the next block and PV of this one, then the next block's softmax and the rescale of O.

    Warpgroups that take turns hold theirs until both products are issued, without overlap until they are waited for.  Where no
    mask stands between them Triton's compiler then puts the softmax between the products (module docstring).
    """
    turns = v.ping_pong and v.warpgroups > 1
    sync = (Step(f"sync{g}", 1),) if m.has("sync.barrier_cycles") else ()
    take, hand_over = ((Step(f"turn{g}", 1),), (Step(f"pass{g}", 1),)) if turns else ((), ())
    kinds = ("exp", "sum") if v.rescale == "anchored" else ("max", "exp", "sum")
    softmax = tuple(Step(f"{kind}{g}", 1) for kind in kinds)
    rescale = () if v.rescale == "anchored" else (Step(f"rescale{g}", 1),)
    if v.overlap:
        return (*sync, *take, Step(f"qk{g}", 1), Step(f"pv{g}"), *hand_over, *softmax, *rescale)
    qk, pv = (Step(f"qk{g}", 1), Step(f"have_s{g}", 1)), (Step(f"pv{g}"), Step(f"have_o{g}"))
    if turns and w.mask == "none" and v.rescale != "always":
        return (*sync, *take, *qk, *softmax, *pv, *hand_over, *rescale)
    return (*sync, *take, *qk, *pv, *hand_over, *softmax, *rescale)


def _group_edges(w: Workload, v: Fa3Variant, m: Machine, g: int) -> list[Edge]:
    arrive = m["sync.mbarrier_roundtrip_cycles"]
    done_qk = mma_completion_latency_cycles(m, _ROWS, v.tile_n, w.dtype, "smem", 1)
    done_pv = mma_completion_latency_cycles(m, _ROWS, w.head_dim_v, w.dtype, "register", 1)
    landed = m["tma.latency_l2_cycles"]
    edges = [
        Edge("load_k", f"qk{g}", 0, landed, "data", "K tile"),
        Edge("load_v", f"pv{g}", 0, landed, "data", "V tile"),
        Edge(f"qk{g}", f"max{g}", 0, done_qk, "data", "S accumulator"),
        Edge(f"pv{g}", f"rescale{g}", 1, done_pv, "data", "O accumulator"),
        Edge(f"rescale{g}", f"pv{g}", 0, 0.0, "data", "O rescaled"),
        Edge(f"exp{g}", f"pv{g}", 0, 0.0, "data", "P registers"),
        Edge(f"max{g}", f"exp{g}", 0, 0.0, "data", "row max"),
        Edge(f"max{g}", f"rescale{g}", 0, 0.0, "data", "scale"),
        Edge(f"exp{g}", f"sum{g}", 0, 0.0, "data", "exponentials"),
        Edge(f"qk{g}", "load_k", v.kv_stages, done_qk + arrive, "buffer", _SLOTS[0]),
        Edge(f"pv{g}", "load_v", v.kv_stages, done_pv + arrive, "buffer", _SLOTS[1]),
    ]
    if v.rescale == "anchored":
        gone = (f"max{g}", f"rescale{g}")
        edges = [edge for edge in edges if edge.src not in gone and edge.dst not in gone]
        edges.append(Edge(f"qk{g}", f"exp{g}", 0, done_qk, "data", "S accumulator"))
        # The warpgroup waits for PV at the end of its step: P's registers are written again in the next.
        edges.append(Edge(f"pv{g}", f"qk{g}", 2, done_pv, "buffer", "P registers"))
    if v.overlap and v.rescale != "always":
        edges.append(Edge(f"pv{g}", f"exp{g}", 1, done_pv, "order", COMPILED_WAIT))
    if not v.overlap:
        edges.append(Edge(f"qk{g}", f"have_s{g}", 0, done_qk, "data", "S accumulator"))
        edges.append(Edge(f"pv{g}", f"have_o{g}", 0, done_pv, "data", "O accumulator"))
    if v.ping_pong and v.warpgroups > 1:
        before = (g - 1) % v.warpgroups
        edges.append(Edge(f"pass{before}", f"turn{g}", 0 if g else 1, m["sync.named_barrier_cycles"], "order", "turn"))
    return edges


def _load_ops(w: Workload, v: Fa3Variant, m: Machine) -> list[Op]:
    out = []
    for name, width in (("load_k", w.head_dim_qk), ("load_v", w.head_dim_v)):
        busy = common.load_cycles(m, v.tile_n * width * w.dtype_bytes)
        out.append(Op(name, "load", "load", (("tma", busy),), busy, engine="tma", issue_cycles=m["tma.issue_cycles"],
                      instructions=(("other", 2.0),)))  # fmt: skip
    return out
