"""FlashAttention-3 forward on Hopper: a copy producer and wgmma consumer warpgroups of 64 query rows each.

With intra-warpgroup overlap a warpgroup issues QK of block j+1 and PV of block j together, then works on the
softmax of block j+1 while PV still runs; the O rescale waits for that PV.  With rescale="anchored" the steady state
has neither row max nor rescale: exponentials take the row max of the first blocks as their reference.  That is the
cost of even scores; blocks in which some row of a warp outgrows its reference pay for row max, rescale and a second
scaling of P, which no forecast charges because it depends on the data (docs/kernels.md measures it).  Ping-pong adds a turn-taking barrier
between warpgroups so that one's softmax runs under the other's GEMMs.  Accumulators live in registers: the score
layout puts a row on four threads, so each row reduction ends in two shuffles.

Machine code does not always wait where its source does.  With overlap, exponentials come after the wait for PV, the row max
before it: in the recorded loops of generated kernels (of masked "always" ones the row max comes after, too), and in
FlashAttention-3's and FlashAttention-4's own for Hopper, of whose exponentials 15 to 35 % stand before.  Unmasked "anchored"
ones have half of them and more before where a block has up to 64 keys (128: a quarter); without overlap unmasked ones issue PV amid the exponentials.  "conditional" rescales in
every step of a 16-bit kernel: the old reference times the scale is one fused multiply-add with the new one, whose rounding
makes the factor of some row of 64 less than 1 (fp8's has a term of its own and is exact).
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

#: Rows of a wgmma, and so of a warpgroup.
ROWS = 64

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
#: Stall counts of addresses and descriptors ahead of the two products, and barriers of a warpgroup in the vote of "conditional":
#: the machine code of the generated kernels, whatever their tile, head_dim or mask (so are the barriers of `_hand_overs`).
_AHEAD_OF_QK_CYCLES, _AHEAD_OF_PV_CYCLES, _BARRIERS_OF_VOTE = 55.0, 15.0, 3
#: Shuffles of a warp that close its rows' maxima, and its shuffles, stores and loads in the vote: the same listings.
_SHUFFLES_OF_MAX, _EXCHANGES_OF_VOTE = 4, 9
#: Widest block of an unmasked anchored kernel that has half of its exponentials before the wait for PV (module docstring).
_HALF_BEFORE_UP_TO = 64
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
    rows = ROWS * variant.warpgroups
    size = workload.dtype_bytes
    o = rows * workload.head_dim_v
    return Pipeline(
        name=f"fa3 {rows}x{variant.tile_n}"
        + (" overlap" if variant.overlap else "")
        + (" ping-pong" if variant.ping_pong and variant.warpgroups > 1 else ""),
        machine=machine.name,
        ops=(*_load_ops(workload, variant, machine), *(of_tile(op, g) for g in groups for op in first)),
        edges=tuple(edges),
        roles=(load, *(Role(f"consumer{g}", _program(workload, variant, g), 4, registers) for g in groups)),
        buffers=_buffers(workload, variant),
        rows_per_cta=rows,
        keys_per_iteration=variant.tile_n,
        ctas_per_sm=1,
        prologue_cycles=_prologue_cycles(variant, machine),
        epilogue_cycles=_STATISTICS_CYCLES + o / machine["fma.lanes"] + o / 2.0 / machine["alu.lanes"],
        edge_read_bytes=rows * workload.head_dim_qk * size, edge_write_bytes=o * 2.0,
        tiles_overlap=False, query_ahead=variant.q_stages > 1,
        mask_demand=tuple((_first_step(workload, variant, g), common.mask_work(machine, ROWS * variant.tile_n * 2.0)) for g in groups),
        facts_used=("regs.mma_share", "tensor.mma_latency_cycles", common.packing_fact(workload), "sync.mbarrier_roundtrip_cycles"),
    )  # fmt: skip


def _waiting(loosest: tuple[Edge, ...], variant: Fa3Variant) -> tuple[Edge, ...]:
    """Edges from those of the variant that waits least: a slot of the ring is there again after ``kv_stages`` blocks."""
    return tuple([e._replace(distance=variant.kv_stages) if e.why in _SLOTS else e for e in loosest])


def _buffers(workload: Workload, variant: Fa3Variant) -> tuple[Buffer, ...]:
    rows, size = ROWS * variant.warpgroups, workload.dtype_bytes
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


def _first_step(w: Workload, v: Fa3Variant, g: int) -> str:
    """The softmax operation that reads S first."""
    return f"exp{g}{_exp_parts(w)[0]}" if v.rescale == "anchored" else f"max{g}"


def _exp_parts(w: Workload) -> tuple[str, ...]:
    """Names of what the exponentials of a block are done in; compilers move products between those of unmasked ones."""
    return ("a", "b") if w.mask == "none" else ("",)


def product(w: Workload, m: Machine, name: str, kind: str, role: str, tile: int, n: int, k: int, a_home: str) -> Op:
    """A product of a warpgroup, `ROWS` x ``n`` over ``k``, asynchronous; ``a_home`` is "smem" or "register"."""
    cycles = mma_tile_cycles(m, ROWS, n, k, w.dtype, a_home, 1)
    read = mma_smem_bytes(ROWS, n, k, w.dtype, a_home, 1) / m["smem.bytes_per_clk"]
    steps = k * w.dtype_bytes / 32
    # A warpgroup instruction is issued by all four warps, one on each sub-partition.
    count = steps * INSTRUCTIONS_PER_MMA
    demand = [("tensor", cycles), ("smem", min(read, cycles)), ("issue", min(count, cycles))]
    if m.has("regs.mma_share"):
        demand.append(("regs", cycles * m["regs.mma_share"]))
    return Op(
        name, kind, role, tuple(demand), cycles, engine="tensor", issue_cycles=count,
        hidden_fma=m.get("tensor.mma_hidden_fma_share", inf), tile=tile, instructions=(("other", count),),
    )  # fmt: skip


def arithmetic(
    m: Machine,
    name: str,
    kind: str,
    role: str,
    tile: int,
    done: common.Work,
    latency: float,
    alone: float = 0.0,
    exchanges: int = 0,
) -> Op:
    """Work of a warpgroup whose last result is there ``latency`` later; ``alone``: cycles of the work with the SM to itself;
    ``exchanges``: instructions of a warp between its threads or through shared memory, which ``latency`` counts as alone."""
    beside = common.beside_mma_cycles(m, done, exchanges)
    return Op(
        name, kind, role, done.cycles, (alone or done.busiest()) + latency, tile=tile, instructions=done.instructions,
        beside_mma_cycles=beside + latency if beside else 0.0,
    )  # fmt: skip


def _mma(w: Workload, m: Machine, name: str, kind: str, g: int, n: int, k: int, a_home: str) -> Op:
    return product(w, m, name, kind, f"consumer{g}", g, n, k, a_home)


def _arithmetic(
    m: Machine, name: str, kind: str, g: int, done: common.Work, latency: float, alone: float = 0.0, exchanges: int = 0
) -> Op:
    return arithmetic(m, name, kind, f"consumer{g}", g, done, latency, alone, exchanges)


def _one_ex2_a_row(m: Machine) -> common.Work:
    return common.Work((("mufu", ROWS / m["mufu.ex2_per_clk"]),), (("mufu", ROWS / 128.0),))


@lru_cache(maxsize=2048)
def _group_ops(w: Workload, v: Fa3Variant, m: Machine) -> list[Op]:
    """Operations of warpgroup 0."""
    g = 0
    role = f"consumer{g}"
    elements = float(ROWS * v.tile_n)
    step = common.add(common.row_max_work(m, elements), common.bookkeeping_work(m))
    # Rows sit on quads of threads: two dependent shuffle + max steps close each reduction.
    quad = 2 * (m["shuffle.latency_cycles"] + m["alu.latency_cycles"])
    exp = common.exp_work(m, w, elements, v.emulated_share, v.poly_degree)
    if w.dtype == "fp8":
        permutes = elements * _FP8_PERMUTES_PER_ELEMENT
        exp = common.add(exp, common.work(m, {"alu": permutes / m["alu.lanes"]}, {"alu": permutes / 128}))
    parts = _exp_parts(w)
    total = common.row_sum_work(m, elements)
    if v.rescale == "anchored":
        exp = common.add(exp, common.bookkeeping_work(m, _ANCHORED_ALU_INSTRUCTIONS, _ANCHORED_INSTRUCTIONS))
    exp = exp.scaled(1.0 / len(parts))
    o_cycles, o_count = common.fma_cost(m, ROWS * w.head_dim_v)
    rescale = common.work(m, {"fma": o_cycles}, {"fma": o_count})
    ramp, holds = common.ramp_latency(m), _hand_overs(v, m)
    vote, exchanges = 0.0, 0
    if v.rescale == "conditional":
        if w.dtype == "fp8":
            rescale = rescale.scaled(rescale_share(v.rescale_threshold))
        # Whether any row of the warpgroup moved: three shuffles, through shared memory and back, two more, and once more.
        vote = 5 * m["shuffle.latency_cycles"] + 2 * m["smem.latency_cycles"] + _BARRIERS_OF_VOTE * holds["have_o"]
        exchanges = _EXCHANGES_OF_VOTE
    ops = [
        _mma(w, m, f"qk{g}", "qk", g, v.tile_n, w.head_dim_qk, "smem"),
        _arithmetic(m, f"max{g}", "row max", g, common.add(step, _one_ex2_a_row(m)), quad + common.statistics_latency(m), exchanges=_SHUFFLES_OF_MAX),
        *(
            _arithmetic(m, f"exp{g}{part}", "exp", g, exp, ramp if part == parts[-1] else 0.0, common.one_warp_cycles(m, exp))
            for part in parts
        ),
        _arithmetic(m, f"sum{g}", "row sum", g, total, 0.0),
        _arithmetic(m, f"rescale{g}", "rescale", g, rescale, m["fma.latency_cycles"] + vote, exchanges=exchanges),
        _mma(w, m, f"pv{g}", "pv", g, w.head_dim_v, v.tile_n, "register"),
    ]  # fmt: skip
    if v.rescale == "anchored":
        ops = [op for op in ops if op.kind not in ("row max", "rescale")]
    return [*ops, *(Op(f"{name}{g}", "barrier", role, (), cycles, tile=g) for name, cycles in holds.items())]


def _turns(v: Fa3Variant) -> bool:
    return v.ping_pong and v.warpgroups > 1


def _hand_overs(v: Fa3Variant, m: Machine) -> dict[str, float]:
    """Operations of a step that compute nothing -> cycles they hold their warpgroup.

    "begin" and "ahead" come before QK, the former before the warpgroup's turn; "have_s" and "have_o" when a product is there.
    """
    barrier = m.get("sync.barrier_cycles", 0.0) + m.get("sync.barrier_spread_cycles", 0.0) / 2
    poll = m.get("sync.wait_done_cycles", 0.0)
    found = {"ahead": poll + _AHEAD_OF_QK_CYCLES, "have_s": barrier, "have_o": barrier}
    if not v.overlap:
        found["have_s"] += barrier + poll + _AHEAD_OF_PV_CYCLES
    if _turns(v):
        found |= {"begin": barrier, "turn": 0.0, "pass": barrier}
    else:
        found["ahead"] += barrier
    return found


def _program(w: Workload, v: Fa3Variant, g: int) -> tuple[Step, ...]:
    """One lap: QK of the next block and PV of this one, then the next block's softmax and the rescale of O.

    Warpgroups that take turns hold theirs until both products are issued, without overlap until they are waited for.  Where
    the warpgroup waits for products, and what of the softmax stands before that, is as compiled (module docstring).
    """
    exps = [f"exp{part}" for part in _exp_parts(w)]
    maximum, rescale = ([], []) if v.rescale == "anchored" else (["max"], ["rescale"])
    if not v.overlap:
        if w.mask == "none":
            lap = ["qk", "have_s", *maximum, exps[0], "pv", *exps[1:], "sum", "have_o", "pass"]
        else:
            lap = ["qk", "have_s", "pv", "have_o", "pass", *maximum, *exps, "sum"]
    else:
        lap = ["qk", "pv", "pass", "have_s"]
        if v.rescale == "anchored" and w.mask == "none" and v.tile_n <= _HALF_BEFORE_UP_TO:
            lap += [exps[0], "have_o", *exps[1:]]
        else:
            lap += [*maximum, "have_o", *exps]
        lap.append("sum")
    lap = ["begin", "turn", "ahead", *lap, *rescale]
    left_out = set() if _turns(v) else {"begin", "turn", "pass"}
    return tuple(Step(_named(name, g), 0 if name in ("pv", "have_o") else 1) for name in lap if name not in left_out)


def _named(name: str, g: int) -> str:
    """The operation of warpgroup ``g``: the part, if any, comes last."""
    return f"exp{g}{name[3:]}" if name.startswith("exp") else f"{name}{g}"


def _group_edges(w: Workload, v: Fa3Variant, m: Machine, g: int) -> list[Edge]:
    arrive = m["sync.mbarrier_roundtrip_cycles"]
    done_qk = mma_completion_latency_cycles(m, ROWS, v.tile_n, w.dtype, "smem", 1)
    done_pv = mma_completion_latency_cycles(m, ROWS, w.head_dim_v, w.dtype, "register", 1)
    landed = m["tma.latency_l2_cycles"]
    parts = _exp_parts(w)
    first, last = parts[0], parts[-1]
    edges = [
        Edge("load_k", f"qk{g}", 0, landed, "data", "K tile"),
        Edge("load_v", f"pv{g}", 0, landed, "data", "V tile"),
        Edge(f"qk{g}", f"max{g}", 0, done_qk, "data", "S accumulator"),
        Edge(f"pv{g}", f"rescale{g}", 1, done_pv, "data", "O accumulator"),
        Edge(f"rescale{g}", f"pv{g}", 0, 0.0, "data", "O rescaled"),
        *(Edge(f"exp{g}{part}", f"pv{g}", 0, 0.0, "data", "P registers") for part in parts),
        Edge(f"max{g}", f"exp{g}{first}", 0, 0.0, "data", "row max"),
        Edge(f"max{g}", f"rescale{g}", 0, 0.0, "data", "scale"),
        Edge(f"exp{g}{last}", f"sum{g}", 0, 0.0, "data", "exponentials"),
        Edge(f"qk{g}", "load_k", v.kv_stages, done_qk + arrive, "buffer", _SLOTS[0]),
        Edge(f"pv{g}", "load_v", v.kv_stages, done_pv + arrive, "buffer", _SLOTS[1]),
    ]
    if v.rescale == "anchored":
        gone = (f"max{g}", f"rescale{g}")
        edges = [edge for edge in edges if edge.src not in gone and edge.dst not in gone]
        edges.append(Edge(f"qk{g}", f"exp{g}{first}", 0, done_qk, "data", "S accumulator"))
        # The warpgroup waits for PV at the end of its step: P's registers are written again in the next.
        edges.append(Edge(f"pv{g}", f"qk{g}", 2, done_pv, "buffer", "P registers"))
    edges.append(Edge(f"qk{g}", f"have_s{g}", 0, done_qk, "data", "S accumulator"))
    kind, why = ("order", COMPILED_WAIT) if v.overlap else ("data", "O accumulator")
    edges.append(Edge(f"pv{g}", f"have_o{g}", 0, done_pv, kind, why))
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
