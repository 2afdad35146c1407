"""FlashAttention-3 forward on Hopper: a copy producer and wgmma consumer warpgroups of 64 query rows each.

With intra-warpgroup overlap a warpgroup issues QK of block j+1 and PV of block j together, then works on the
softmax of block j+1 while PV still runs; the O rescale waits for that PV.  With rescale="anchored" the steady state
has neither row max nor rescale: exponentials take the row max of the first blocks as their reference.  That is the
cost of even scores; blocks in which some row of a warp outgrows its reference pay for row max, rescale and a second
scaling of P, which no forecast charges because it depends on the data (docs/kernels.md measures it).  Ping-pong adds a turn-taking barrier
between warpgroups so that one's softmax runs under the other's GEMMs.  Accumulators live in registers: the score
layout puts a row on four threads, so each row reduction ends in two shuffles.

Machine code does not always wait where its source does: `hopper.order` has the order of a step.  "conditional" rescales in
every step of a 16-bit kernel: the old reference times the scale is one fused multiply-add with the new one, whose rounding
makes the factor of some row of 64 less than 1 (fp8's has a term of its own and is exact).
"""

from __future__ import annotations

from functools import lru_cache
from math import inf

from tilecast.model.kernel.alike import with_knobs
from tilecast.model.kernel.variants.fa3 import ALIKE, Fa3Variant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.pipeline import softmax_cost as common
from tilecast.model.pipeline.graph import Buffer, Edge, Op, Pipeline, Role, Step, of_tile
from tilecast.model.pipeline.hopper.order import (
    ROWS,
    adds_first,
    exp_parts,
    program,
    pv_parts,
    quad_cycles,
    same_order,
    takes_turns,
)
from tilecast.model.pipeline.hopper.registers import spill_demand
from tilecast.model.pipeline.rescaling import rescale_share
from tilecast.model.pipeline.tensor_core import (
    INSTRUCTIONS_PER_MMA,
    mma_completion_latency_cycles,
    mma_smem_bytes,
    mma_tile_cycles,
)

#: Why a load waits for a product.
_SLOTS = ("K slot", "V slot")
#: Why exponentials wait for PV though the source does not say so: where Triton's compiler puts the wait (module docstring).
COMPILED_WAIT = "wait for O as compiled"
#: Instructions of a warp in a softmax step that do not scale with its tile (ALU, FMA, others), and ALU and FMA instructions
#: beside those of the polynomial (`exp_work`) for each exponential of a thread that it emulates: counted in the machine code of the generated kernels.
_STEP = {"always": (14.0, 8.0, 14.0), "conditional": (26.0, 13.0, 14.0), "anchored": (4.0, 3.0, 52.0)}
_OF_EMULATION = (0.7, 1.0)
#: End of a tile: sums across a quad, reciprocal, logarithm, addresses; stall counts of the generated kernels' machine code.
_STATISTICS_CYCLES = 450.0
#: Stall counts of addresses and descriptors ahead of the two products, and barriers of a warpgroup in the vote of "conditional":
#: the machine code of the generated kernels, whatever their tile, head_dim or mask (so are the barriers of `_hand_overs`).
AHEAD_OF_QK_CYCLES, _AHEAD_OF_PV_CYCLES, _BARRIERS_OF_VOTE = 55.0, 15.0, 3
#: Shuffles of a warp that close its rows' maxima, and its shuffles, stores and loads in the vote: the same listings.
_SHUFFLES_OF_MAX, _EXCHANGES_OF_VOTE = 4, 9
#: FP8 PV needs V transposed in shared memory and P permuted in registers: one byte permute and one shuffle for
#: every four elements of P (FlashAttention-3's in-kernel layout conversion).
_FP8_PERMUTES_PER_ELEMENT = 0.5


def build(workload: Workload, variant: Fa3Variant, machine: Machine) -> Pipeline:
    """The forward loop of ``variant``; legality is the caller's business (`variant.legality`)."""
    least = with_knobs(variant, ALIKE.least_waiting)
    loosest = _build(workload, least, machine)
    if least is variant:
        return loosest
    return loosest.waiting(
        _waiting(loosest.edges, variant), buffers=_buffers(workload, variant),
        prologue_cycles=_prologue_cycles(variant, machine), query_ahead=variant.q_stages > 1,
    )  # fmt: skip


@lru_cache(maxsize=2048)
def _build(workload: Workload, variant: Fa3Variant, machine: Machine) -> Pipeline:
    """What variants share that differ only in how long they wait (`ALIKE.least_waiting`)."""
    groups = range(variant.warpgroups)
    # A warpgroup does the same whatever others there are, but for taking turns with them.
    turns = takes_turns(variant)
    alone = with_knobs(variant, {"warpgroups": 2 if turns else 1, "ping_pong": turns})
    spills = spill_demand(workload, variant, machine)
    spill = Op("spill0", "spill", "consumer0", spills, sum(cycles for _, cycles in spills), tile=0)
    ops = _load_ops(workload, variant, machine)
    for g in groups:
        ops += [*_group_ops(workload, alone, machine, g), *((of_tile(spill, g),) if spills else ())]
    alike = same_order(workload, variant)
    rows = ROWS * variant.warpgroups
    size = workload.dtype_bytes
    o = rows * workload.head_dim_v
    masked = _mask_work(workload, variant, machine)
    return Pipeline(
        name=f"fa3 {rows}x{variant.tile_n}"
        + (" overlap" if variant.overlap else "")
        + (" ping-pong" if takes_turns(variant) else ""),
        machine=machine.name,
        ops=tuple(ops),
        edges=_edges(workload, alike, machine),
        roles=_roles(_program(workload, alike, machine, bool(spills)), variant.warpgroups),
        buffers=_buffers(workload, variant),
        rows_per_cta=rows,
        keys_per_iteration=variant.tile_n,
        ctas_per_sm=1,
        prologue_cycles=_prologue_cycles(variant, machine),
        epilogue_cycles=_STATISTICS_CYCLES + o / machine["fma.lanes"] + o / 2.0 / machine["alu.lanes"],
        edge_read_bytes=rows * workload.head_dim_qk * size, edge_write_bytes=o * 2.0,
        tiles_overlap=False, query_ahead=variant.q_stages > 1,
        mask_demand=tuple((_first_step(workload, variant, machine, g), masked) for g in groups),
    )  # fmt: skip


@lru_cache(maxsize=2048)
def _edges(workload: Workload, variant: Fa3Variant, machine: Machine) -> tuple[Edge, ...]:
    """Dependences of all warpgroups' operations, whatever work these are."""
    return tuple(edge for g in range(variant.warpgroups) for edge in _group_edges(workload, variant, machine, g))


@lru_cache(maxsize=2048)
def _program(workload: Workload, variant: Fa3Variant, machine: Machine, spills: bool) -> tuple[Step, ...]:
    return program(workload, variant, machine, spills=spills)


@lru_cache(maxsize=256)
def _roles(program: tuple[Step, ...], warpgroups: int) -> tuple[Role, ...]:
    """The producer, and consumers whose first has this program."""
    registers = 240 if warpgroups == 2 else 160
    programs = (tuple(step._replace(op=step.op.replace("0", str(g))) for step in program) for g in range(warpgroups))
    load = Role("load", (Step("load_k"), Step("load_v")), 1, 24)
    return load, *(Role(f"consumer{g}", own, 4, registers) for g, own in enumerate(programs))


def _waiting(loosest: tuple[Edge, ...], variant: Fa3Variant) -> tuple[Edge, ...]:
    """Edges from those of the variant that waits least: a slot of the ring is there again after ``kv_stages`` blocks."""
    return tuple([e._replace(distance=variant.kv_stages) if e.why in _SLOTS else e for e in loosest])


def _buffers(workload: Workload, variant: Fa3Variant) -> tuple[Buffer, ...]:
    rows, size = ROWS * variant.warpgroups, workload.dtype_bytes
    return (
        Buffer("Q", "smem", rows * workload.head_dim_qk * size, variant.q_stages, "", "qk0"),
        Buffer("K", "smem", variant.tile_n * workload.head_dim_qk * size, variant.kv_stages, "load_k", "qk0"),
        Buffer(
            "V",
            "smem",
            variant.tile_n * workload.head_dim_v * size,
            variant.kv_stages,
            "load_v",
            f"pv0{next(iter(pv_parts(workload, variant)))}",
        ),
    )


def _prologue_cycles(variant: Fa3Variant, machine: Machine) -> float:
    """A CTA from its start to its first copy: two barriers for each slot of K, V and Q, then the roles' hand-over."""
    barriers = 4 * variant.kv_stages + 2 * variant.q_stages * variant.warpgroups
    per_barrier = machine.get("launch.barrier_setup_cycles", 0.0)
    return machine["launch.cta_start_cycles"] + machine.get("launch.cta_setup_cycles", 0.0) + barriers * per_barrier


def _first_step(w: Workload, v: Fa3Variant, m: Machine, g: int) -> str:
    """The softmax operation that reads S first."""
    return f"exp{g}{next(iter(exp_parts(w, v, m)))}" if v.rescale == "anchored" else f"max{g}"


def product(
    w: Workload, m: Machine, name: str, kind: str, role: str, tile: int, n: int, k: int, a_home: str, reads: float = 1.0
) -> Op:
    """A product of a warpgroup, `ROWS` x ``n`` over ``k``, asynchronous; ``a_home`` is "smem", which is read so many times, or "register"."""
    cycles = mma_tile_cycles(m, ROWS, n, k, w.dtype, a_home, 1)
    read = mma_smem_bytes(ROWS, n, k, w.dtype, a_home, 1) / m["smem.bytes_per_clk"]
    if reads > 1:
        read += (reads - 1) * ROWS * k * w.dtype_bytes / m["smem.bytes_per_clk"]
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
    """Every thread of a row's quad takes it."""
    return common.Work((("mufu", 4 * ROWS / m["mufu.ex2_per_clk"]),), (("mufu", 4 * ROWS / 128.0),))


@lru_cache(maxsize=2048)
def _group_ops(w: Workload, v: Fa3Variant, m: Machine, g: int) -> list[Op]:
    """Operations of a warpgroup."""
    if g:
        return [of_tile(op, g) for op in _group_ops(w, v, m, 0)]
    role = f"consumer{g}"
    elements = float(ROWS * v.tile_n)
    pack = common.pack_work(m, w, elements)
    if w.dtype == "fp8":
        permutes = elements * _fp8_permutes(w, v)
        pack = common.add(pack, common.work(m, {"alu": permutes / m["alu.lanes"]}, {"alu": permutes / 128}))
    total = common.row_sum_work(m, elements)
    rescale = common.add(total, _rescale_work(w, m, rescale_share(v.rescale_threshold) if _skips(w, v) else 1.0))
    exp = common.add(common.exp_work(m, w, elements, v.emulated_share, v.poly_degree, packed=False), _step_work(v, m))
    if w.dtype == "fp8":
        # The loops counted that pack behind QK are 16-bit ones; no 8-bit one was read.
        exp, pack = common.add(exp, pack), common.Work((), ())
    holds = _hand_overs(v, m)
    begins, exchanges, vote = 0.0, 0, 0.0
    if v.rescale == "anchored":
        exp = common.add(exp, total)
    else:
        exp = common.add(exp, _one_ex2_a_row(m))
        begins, exchanges = quad_cycles(m) + 2 * m["fma.latency_cycles"], _SHUFFLES_OF_MAX
    if v.rescale == "conditional":
        # Whether any row of the warpgroup moved: three shuffles, through shared memory and back, two more, and once more.
        vote = 5 * m["shuffle.latency_cycles"] + 2 * m["smem.latency_cycles"] + _BARRIERS_OF_VOTE * holds["have_o"]
    have_v = m.get("sync.wait_done_cycles", 0.0) + _AHEAD_OF_PV_CYCLES if v.overlap else 0.0
    parts = exp_parts(w, v, m)
    first, *_, last = (*parts, *parts)
    ops = [
        _mma(w, m, f"qk{g}", "qk", g, v.tile_n, w.head_dim_qk, "smem"),
        _arithmetic(m, f"max{g}", "row max", g, common.row_max_work(m, elements), 0.0),
    ]
    for part, share in parts.items():
        done = exp.scaled(share)
        latency = (begins if part == first else 0.0) + (common.ramp_latency(m) if part == last else 0.0)
        alone = common.one_warp_cycles(m, done)
        ops.append(_arithmetic(m, f"exp{g}{part}", "exp", g, done, latency, alone, exchanges if part == first else 0))
    ops += [
        _arithmetic(m, f"pack{g}", "pack", g, pack, have_v),
        _arithmetic(
            m, f"rescale{g}", "rescale", g, rescale, m["fma.latency_cycles"] + vote, exchanges=_EXCHANGES_OF_VOTE if vote else 0
        ),
        *(_mma(w, m, f"pv{g}{part}", "pv", g, w.head_dim_v, keys, "register") for part, keys in pv_parts(w, v).items()),
    ]  # fmt: skip
    if v.rescale == "anchored":
        ops = [op for op in ops if op.kind not in ("row max", "rescale")]
    return [*ops, *(Op(f"{name}{g}", "barrier", role, (), cycles, tile=g) for name, cycles in holds.items())]


def _fp8_permutes(w: Workload, v: Fa3Variant) -> float:
    """Permutes and shuffles of an element of P in e4m3: kernels that we write have none to shuffle, and with two warpgroups pack words
    as they are (their machine code)."""
    return (0.25 if v.warpgroups > 2 else 0.0) if adds_first(w, v) else _FP8_PERMUTES_PER_ELEMENT


def _skips(w: Workload, v: Fa3Variant) -> bool:
    """Whether a step that need not rescale does not (module docstring)."""
    return v.rescale == "conditional" and w.dtype == "fp8"


def _rescale_work(w: Workload, m: Machine, share: float = 1.0) -> common.Work:
    cycles, count = common.fma_cost(m, ROWS * w.head_dim_v)
    return common.work(m, {"fma": cycles}, {"fma": count}).scaled(share)


def _step_work(v: Fa3Variant, m: Machine) -> common.Work:
    """What a softmax step does beside its elements."""
    alu, fma, others = _STEP[v.rescale]
    emulated = ROWS * v.tile_n * v.emulated_share / 128
    alu, fma = alu + _OF_EMULATION[0] * emulated, fma + _OF_EMULATION[1] * emulated
    return common.add(
        common.bookkeeping_work(m, alu, alu + others), common.work(m, {"fma": fma * 128 / m["fma.lanes"]}, {"fma": fma})
    )


def _mask_work(w: Workload, v: Fa3Variant, m: Machine) -> common.Pairs:
    """Extra demand of a masked block; those of "anchored" kernels have row maxima and a rescale."""
    elements = float(ROWS * v.tile_n)
    extra = dict(common.mask_work(m, elements * common.mask_instructions(w)))
    if v.rescale == "anchored":
        for unit, cycles in common.add(common.row_max_work(m, elements), _rescale_work(w, m)).cycles:
            extra[unit] = extra.get(unit, 0.0) + cycles
    return tuple(extra.items())


def _hand_overs(v: Fa3Variant, m: Machine) -> dict[str, float]:
    """Operations of a step that compute nothing -> cycles they hold their warpgroup.

    "begin" and "ahead" come before QK, the former before the warpgroup's turn; "have_s" and "have_o" when a product is there.
    """
    barrier = m.get("sync.barrier_cycles", 0.0) + m.get("sync.barrier_spread_cycles", 0.0) / 2
    poll = m.get("sync.wait_done_cycles", 0.0)
    found = {"ahead": poll + AHEAD_OF_QK_CYCLES, "have_s": barrier, "have_o": barrier}
    if not v.overlap:
        found["have_s"] += barrier + poll + _AHEAD_OF_PV_CYCLES
    if takes_turns(v):
        found |= {"begin": barrier, "turn": 0.0, "pass": barrier}
    else:
        found["ahead"] += barrier
    return found


def _group_edges(w: Workload, v: Fa3Variant, m: Machine, g: int) -> list[Edge]:
    arrive = m["sync.mbarrier_roundtrip_cycles"]
    done_qk = mma_completion_latency_cycles(m, ROWS, v.tile_n, w.dtype, "smem", 1)
    done_pv = mma_completion_latency_cycles(m, ROWS, w.head_dim_v, w.dtype, "register", 1)
    landed = m["tma.latency_l2_cycles"]
    parts = list(exp_parts(w, v, m))
    first, last = f"exp{g}{parts[0]}", f"exp{g}{parts[-1]}"
    first_added = adds_first(w, v)
    issued = [f"pv{g}{part}" for part in pv_parts(w, v)]
    pv, through = issued[0], issued[-1]
    edges = [
        Edge("load_k", f"qk{g}", 0, landed, "data", "K tile"),
        Edge("load_v", pv, 0, landed, "data", "V tile"),
        *(Edge(f"exp{g}{part}", f"pack{g}", 0, 0.0, "data", "exponentials") for part in parts),
        Edge(f"pack{g}", pv, 0, 0.0, "data", "P registers"),
        Edge(f"qk{g}", "load_k", v.kv_stages, done_qk + arrive, "buffer", _SLOTS[0]),
        Edge(through, "load_v", v.kv_stages, done_pv + arrive, "buffer", _SLOTS[1]),
    ]
    if v.rescale == "anchored":
        edges.append(Edge(f"qk{g}", first, 0, done_qk, "data", "S accumulator"))
        # The warpgroup waits for PV at the end of its step: P's registers are written again in the next.
        edges.append(Edge(through, f"qk{g}", 2, done_pv, "buffer", "P registers"))
    else:
        edges += [
            Edge(f"qk{g}", f"max{g}", 0, done_qk, "data", "S accumulator"),
            Edge(f"max{g}", first, 0, 0.0, "data", "row max"),
            Edge(last, f"rescale{g}", 0, 0.0, "data", "exponentials"),
            Edge(through, f"rescale{g}", 0 if first_added else 1, done_pv, "data", "O accumulator"),
            Edge(f"rescale{g}", pv, 1 if first_added else 0, 0.0, "data", "O rescaled"),
        ]
    edges.append(Edge(f"qk{g}", f"have_s{g}", 0, done_qk, "data", "S accumulator"))
    if v.overlap:
        edges.append(Edge(through, f"have_o{g}", 0, done_pv, "order", COMPILED_WAIT))
    else:
        edges.append(Edge(through, f"have_o{g}", 0, done_pv, "data", "O accumulator"))
    if takes_turns(v):
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
