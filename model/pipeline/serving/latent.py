"""The loops of the latent kernel on Hopper (`hopper_mla`): one block of keys is multiplied twice, by two warpgroups.

One warpgroup makes the scores and the left half of O; P and what rows are rescaled by go through shared memory to another one, which
makes the right half.  A block's place is free once both have multiplied by it.  What goes through shared memory waits for its turn beside
the left half's product, so that the next block's scores have begun when the right half's product comes: the tensor core takes the
instructions of both in turns, here the right half's between the two parts of the scores.  Counts beyond those of `fa3`'s softmax are
those of the machine code of Triton 3.6 for sm_90a (`tilecast inspect kernels/generated/hopper_mla_d576_512.py --arch sm_90a`).

Splits of few rows have a loop of their own (`build_turned`): keys are the M of its products, and one warpgroup makes all of O.
"""

from __future__ import annotations

from dataclasses import replace

from tilecast.model.kernel.variants.fa3 import Fa3Variant
from tilecast.model.kernel.variants.hopper.mla import KEYS, TURNED_ROWS, HopperMlaVariant
from tilecast.model.kernel.variants.hopper.serving import ROWS
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.pipeline import fa3
from tilecast.model.pipeline import softmax_cost as common
from tilecast.model.pipeline.graph import Buffer, Edge, Op, Pipeline, Role, Step
from tilecast.model.pipeline.tensor_core import K_BYTES, mma_completion_latency_cycles

#: Instructions of a warp of the right warpgroup in a block, beside its products: waits, factors, addresses.  Stall counts of those before
#: its first product, the barriers that it waits at and that its warps meet at there.
_RIGHT_INSTRUCTIONS, _RIGHT_STALLS, _RIGHT_WAITS, _RIGHT_BARRIERS = 60, 143.0, 2, 1
#: Stall counts from a product of P's issue to its store: addresses, and whether the right warpgroup has done with the block before.
_GIVING_STALLS = 37.0
#: Instructions between P's packing and its product by the left half: P's words are copied, so that both instructions' columns have their
#: own, and descriptors are moved to uniform registers; a barrier meets the warps there once more.
_COPIES_OF_P = 32 + 17
#: Columns of an instruction of the products with P.
_COLUMNS = 128
#: Of the loop of few rows: rows whose softmax a warpgroup does, for each of its four warps does that of all eight, and barriers around
#: shared memory through which scores become (row, key).
_TURNED_SOFTMAX, _TURNING_BARRIERS = 32, 2
#: Barriers of a warpgroup around what it hands over: all have written before one says so, all have read before one does.
_BARRIERS = 2


def build(workload: Workload, variant: HopperMlaVariant, machine: Machine) -> Pipeline:
    """The loop of one program with a tile of 64 rows; V is the first ``head_dim_v`` columns of K."""
    m, half, size = machine, workload.head_dim_v // 2, workload.dtype_bytes
    like = Fa3Variant(
        warpgroups=1, tile_n=KEYS, kv_stages=variant.kv_stages, overlap=False, ping_pong=False, rescale="always"
    )
    made = fa3.build(replace(workload, head_dim_v=half, mask="causal", window=None), like, machine)
    barrier = common.barrier_cycles(m) + m.get("sync.barrier_spread_cycles", 0.0) / 2
    vote = m["warp.vote_latency_cycles"] + 2.0 * m["alu.latency_cycles"]
    poll = m.get("sync.wait_done_cycles", 0.0)
    port = m["smem.bytes_per_clk"]
    written = ROWS * KEYS * size / port
    # Beside the product the port has less to give.
    stored = ROWS * KEYS * size / m.get("smem.store_bytes_per_clk_under_mma", port)
    handing = poll + _GIVING_STALLS + stored + m["smem.latency_cycles"] + _BARRIERS * barrier
    taking = _RIGHT_STALLS + _RIGHT_WAITS * poll + m["smem.latency_cycles"] + vote + _RIGHT_BARRIERS * barrier
    total = common.row_sum_work(m, float(ROWS * KEYS))
    left = {op.name: op for op in made.ops}
    copies = common.bookkeeping_work(m, _COPIES_OF_P, _COPIES_OF_P)
    packed = common.Work(left["pack0"].demand, left["pack0"].instructions)
    both = common.add(packed, copies)
    scores = {
        name: _held(
            m, fa3.product(workload, m, name, "qk", "consumer0", 0, KEYS, depth, "smem"), depth * size // K_BYTES
        )
        for name, depth in (("qk0", half), ("qk_rest0", workload.head_dim_qk - half))
    }
    ops = (
        *(op for op in made.ops if op.name not in ("load_v", "pack0", "rescale0", "qk0", "pv0", "ahead0", "have_s0")),
        *scores.values(),
        # The warps meet once a product is there; what they wait for is there by then, as V is, which came with K.
        left["ahead0"]._replace(min_cycles=left["ahead0"].min_cycles - barrier),
        left["have_s0"]._replace(min_cycles=barrier),
        _held(m, left["pv0"], KEYS * size // K_BYTES * max(1, half // _COLUMNS)),
        left["pack0"]._replace(
            demand=both.cycles, min_cycles=left["pack0"].min_cycles + copies.busiest() + barrier, instructions=both.instructions,
            beside_mma_cycles=common.beside_mma_cycles(m, both) + barrier,
        ),
        # Rows whose maximum has hardly moved keep their scale: a vote finds that out.
        left["rescale0"]._replace(
            demand=total.cycles, min_cycles=total.busiest() + vote, instructions=total.instructions,
            beside_mma_cycles=common.beside_mma_cycles(m, total) + vote,
        ),
        Op("give0", "barrier", "consumer0", (("smem", written),), handing, tile=0),
        Op(
            "take1", "barrier", "consumer1", (("issue", _RIGHT_INSTRUCTIONS),), taking, tile=1,
            instructions=(("other", _RIGHT_INSTRUCTIONS),),
        ),
        fa3.product(workload, m, "pv1", "pv", "consumer1", 1, half, KEYS, "smem"),
        Op("have_o1", "barrier", "consumer1", (), barrier, tile=1),
    )  # fmt: skip
    done, arrive = (
        mma_completion_latency_cycles(m, ROWS, half, workload.dtype, "smem", 1),
        m["sync.mbarrier_roundtrip_cycles"],
    )
    edges = (
        *(
            edge._replace(src="qk_rest0") if edge.src == "qk0" else edge
            for edge in made.edges
            if "load_v" not in (edge.src, edge.dst) and edge.dst != "load_k"
        ),
        Edge("load_k", "pv1", 0, m["tma.latency_l2_cycles"], "data", "K tile"),
        Edge("exp0", "give0", 0, 0.0, "data", "P registers"),
        Edge("give0", "take1", 0, arrive, "data", "P tile"),
        # P and the factors have one place: it is free when the right half of the block before is done.
        Edge("pv1", "give0", 1, done + arrive, "buffer", "P slot"),
        Edge("pv1", "have_o1", 0, done, "data", "O accumulator"),
        *(Edge(f"pv{g}", "load_k", variant.kv_stages, done + arrive, "buffer", "K slot") for g in (0, 1)),
    )
    names = ("ahead", "qk", "qk_rest", "have_s", "max", "exp", "pack", "rescale", "pv", "give", "have_o")
    roles = (
        Role("load", (Step("load_k"),), 1, 40),
        Role("consumer0", tuple(Step(f"{name}0") for name in names), 4, 208),
        Role("consumer1", tuple(Step(f"{name}1") for name in ("take", "pv", "have_o")), 4, 160),
    )
    rows = ROWS * size
    return replace(
        made, name=f"latent on Hopper {ROWS}x{KEYS}", ops=ops, edges=edges, roles=roles,
        buffers=(
            Buffer("Q", "smem", rows * workload.head_dim_qk, 1, "", "qk0"), Buffer("P", "smem", rows * KEYS, 1, "give0", "pv1"),
            Buffer("K", "smem", KEYS * workload.head_dim_qk * size, variant.kv_stages, "load_k", "qk0"),
        ),
        keys_per_iteration=KEYS, rows_per_cta=ROWS, mask_demand=(),
        edge_read_bytes=float(rows * workload.head_dim_qk), edge_write_bytes=float(rows * workload.head_dim_v),
    )  # fmt: skip


def _held(m: Machine, op: Op, instructions: int) -> Op:
    """A product of so many instructions, whose warps are held at issue until no more are left than the queue takes."""
    beyond = max(0.0, instructions - m.get("tensor.mma_queue_depth", instructions))
    return op._replace(issue_cycles=op.issue_cycles + beyond * op.min_cycles / instructions)


def build_turned(workload: Workload, variant: HopperMlaVariant, machine: Machine) -> Pipeline:
    """The loop of one program with a tile of up to `TURNED_ROWS` rows: scores are made as (key, row), and O as
    (column, row), all by the other warpgroup."""
    m, size, values = machine, workload.dtype_bytes, workload.head_dim_v
    made = build(workload, variant, machine)
    ops = {op.name: op for op in made.ops}
    barrier = ops["have_s0"].min_cycles
    part = _TURNED_SOFTMAX / ROWS
    small = ("max0", "exp0", "pack0", "rescale0")
    turning = 2 * m["smem.latency_cycles"] + _TURNING_BARRIERS * barrier
    given = TURNED_ROWS * KEYS * size / m["smem.bytes_per_clk"]
    outputs = fa3.product(
        workload, m, "pv1", "pv", "consumer1", 1, TURNED_ROWS, KEYS * values // ROWS, "smem"
    )  # each 64 columns are the M of a product
    changed = (
        *(_scaled(ops[name], part) for name in small),
        fa3.product(workload, m, "qk0", "qk", "consumer0", 0, TURNED_ROWS, workload.head_dim_qk, "smem"),
        ops["have_s0"]._replace(min_cycles=barrier + turning),
        ops["give0"]._replace(demand=(("smem", given),)),
        outputs,
    )
    kept = tuple(ops[name] for name in ("load_k", "take1", "have_o1"))
    there = {op.name for op in (*changed, *kept)}
    return replace(
        made,
        name=f"latent on Hopper {TURNED_ROWS}x{KEYS}",
        ops=(*kept, *changed),
        edges=tuple(
            edge
            for edge in (e._replace(src="qk0") if e.src == "qk_rest0" else e for e in made.edges)
            if edge.src in there and edge.dst in there
        ),
        roles=(
            made.roles[0],
            replace(
                made.roles[1],
                program=tuple(Step(name) for name in ("qk0", "have_s0", *small, "give0")),
            ),
            made.roles[2],
        ),
        buffers=(
            Buffer("Q", "smem", TURNED_ROWS * workload.head_dim_qk * size, 1, "", "qk0"),
            Buffer("P", "smem", TURNED_ROWS * KEYS * size, 1, "give0", "pv1"),
            made.buffers[2],
        ),
        rows_per_cta=TURNED_ROWS,
        edge_read_bytes=float(TURNED_ROWS * workload.head_dim_qk * size),
        edge_write_bytes=float(TURNED_ROWS * values * size),
    )


def _scaled(op: Op, part: float) -> Op:
    """An operation on so large a part of the elements."""
    return op._replace(
        demand=tuple((unit, cycles * part) for unit, cycles in op.demand), min_cycles=op.min_cycles * part,
        instructions=tuple((kind, count * part) for kind, count in op.instructions), beside_mma_cycles=op.beside_mma_cycles * part,
    )  # fmt: skip
