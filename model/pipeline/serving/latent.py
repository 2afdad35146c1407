"""The loops of the latent kernel on Hopper (`hopper_mla`): one block of keys is multiplied twice, by two warpgroups.

One warpgroup makes the scores and the left half of O; P and what rows are rescaled by go through shared memory to another one, which
makes the right half.  A block's place is free once both have multiplied by it.  What goes through shared memory waits for its turn beside
the left half's product, so that the next block's scores have begun when the right half's product comes: the tensor core takes the
instructions of both in turns, here the right half's between the two parts of the scores.  Counts beyond those of `fa3`'s softmax are
those of the machine code of Triton 3.6 for sm_90a (`tilecast inspect kernels/generated/hopper_mla_d576_512.py --arch sm_90a`).

Splits of few rows have a loop of their own (`build_turned`): keys are the M of its products, one warpgroup makes all of O, and where each split has
a program of its own the one that merges does the softmax, for until the end it has nothing else to do.
"""

from __future__ import annotations

from dataclasses import replace

from tilecast.model.kernel.variants.fa3 import Fa3Variant
from tilecast.model.kernel.variants.hopper.mla import KEYS, TURNED_ROWS, HopperMlaTurned, HopperMlaVariant
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
#: Of the loop of few rows: rows whose softmax a warpgroup does (of 8 and 16 several warps do the same ones), and barriers around
#: shared memory through which scores become (row, key).
_TURNED_SOFTMAX, _TURNING_BARRIERS = 32, 2
#: Places of what one warpgroup hands another there: the scores, and P with its factors.
_HANDED = 2
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
    names = ("ahead", "qk", "qk_rest", "have_s", "max", "exp", "pack", "rescale", "pv", "give", "have_o")
    roles = (
        Role("load", (Step("load_k"),), 1, 40),
        Role("consumer0", tuple(Step(f"{name}0") for name in names), 4, 208),
        Role("consumer1", tuple(Step(f"{name}1") for name in ("take", "pv", "have_o")), 4, 160),
    )
    rows = ROWS * size
    return replace(
        made, name=f"latent on Hopper {ROWS}x{KEYS}", ops=ops, edges=_edges(made, workload, variant, m), roles=roles,
        buffers=(
            Buffer("Q", "smem", rows * workload.head_dim_qk, 1, "", "qk0"), Buffer("P", "smem", rows * KEYS, 1, "give0", "pv1"),
            Buffer("K", "smem", KEYS * workload.head_dim_qk * size, variant.kv_stages, "load_k", "qk0"),
        ),
        keys_per_iteration=KEYS, rows_per_cta=ROWS, mask_demand=(),
        edge_read_bytes=float(rows * workload.head_dim_qk), edge_write_bytes=float(rows * workload.head_dim_v),
    )  # fmt: skip


def _edges(made: Pipeline, workload: Workload, variant: HopperMlaVariant, m: Machine) -> tuple[Edge, ...]:
    """Those of the loop with one consumer, without its copies of V, and those of the right half of O."""
    half = workload.head_dim_v // 2
    done, arrive = (
        mma_completion_latency_cycles(m, ROWS, half, workload.dtype, "smem", 1),
        m["sync.mbarrier_roundtrip_cycles"],
    )
    return (
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


def _held(m: Machine, op: Op, instructions: int) -> Op:
    """A product of so many instructions, whose warps are held at issue until no more are left than the queue takes."""
    beyond = max(0.0, instructions - m.get("tensor.mma_queue_depth", instructions))
    return op._replace(issue_cycles=op.issue_cycles + beyond * op.min_cycles / instructions)


def build_turned(workload: Workload, variant: HopperMlaTurned, machine: Machine) -> Pipeline:
    """The loop of one program with a tile of few rows: scores are made as (key, row), and O as (column, row), all by the other warpgroup.

    The tensor core takes the instructions of both in turns, so each product is two here, the second one asked for when the first is done.  The parts
    of a sequence's heads ask for a block at the same time, so it comes from memory for all of them.
    """
    m, size, values, rows = machine, workload.dtype_bytes, workload.head_dim_v, variant.rows
    made = build(workload, variant, machine)
    ops = {op.name: op for op in made.ops}
    barrier, poll = ops["have_s0"].min_cycles, m.get("sync.wait_done_cycles", 0.0)
    softmax = "consumer2" if variant.apart else "consumer0"
    small, turning = ("max0", "exp0", "pack0", "rescale0"), m["smem.latency_cycles"]
    done = mma_completion_latency_cycles(m, ROWS, rows, workload.dtype, "smem", 1)
    arrive = m["sync.mbarrier_roundtrip_cycles"]
    # Votes about the factors of more rows.
    votes = (rows // TURNED_ROWS[0] - 1) * (m["warp.vote_latency_cycles"] + 2.0 * m["alu.latency_cycles"])
    halves = (
        *(fa3.product(workload, m, name, "qk", "consumer0", 0, rows, workload.head_dim_qk // 2, "smem") for name in ("qk0", "qk_rest0")),
        # Each 64 columns are the M of a product.
        *(fa3.product(workload, m, name, "pv", "consumer1", 1, rows, KEYS * values // ROWS // 2, "smem") for name in ("pv1", "pv_rest1")),
    )  # fmt: skip
    # Numbers of two rows lie in one bank, whichever way they are laid out.
    moved = 2 * rows * KEYS * 4 / m["smem.bytes_per_clk"]
    handed = (
        (
            Op("give_s0", "barrier", "consumer0", (), poll + turning + moved + _BARRIERS * barrier, tile=0),
            Op("take_s2", "barrier", "consumer2", (), poll + turning + moved + barrier, tile=0),
        )
        if variant.apart
        else ()
    )
    extra = 0.0 if variant.apart else 2 * (turning + moved) + _TURNING_BARRIERS * barrier
    edges: tuple[Edge, ...] = (
        Edge("load_k", "qk0", 0, m["tma.latency_hbm_cycles"], "data", "K tile"),
        Edge("qk0", "qk_rest0", 0, 0.0, "order", "instructions in turns"),
        Edge("pv1", "pv_rest1", 0, 0.0, "order", "instructions in turns"),
        Edge("qk_rest0", "have_s0", 0, done, "data", "S accumulator"),
        Edge("give0", "take1", 0, arrive, "data", "P tile"),
        Edge("pv_rest1", "give0", _HANDED, done + arrive, "buffer", "P slot"),
        Edge("pv_rest1", "have_o1", 0, done, "data", "O accumulator"),
        Edge("pv_rest1", "load_k", variant.kv_stages, done + arrive, "buffer", "K slot"),
    )
    if variant.apart:
        edges += (
            Edge("give_s0", "take_s2", 0, arrive, "data", "S tile"),
            Edge("take_s2", "give_s0", _HANDED, arrive, "buffer", "S slot"),
        )
    scores, weighing = ("qk0", "qk_rest0", "have_s0"), (*small, "give0")
    first = (*scores, "give_s0") if variant.apart else (*scores, *weighing)
    roles = (
        made.roles[0],
        replace(made.roles[1], program=tuple(Step(name) for name in first)),
        replace(made.roles[2], program=tuple(Step(name) for name in ("take1", "pv1", "pv_rest1", "have_o1"))),
        *([Role("consumer2", tuple(Step(name) for name in ("take_s2", *weighing)), 4, 104)] if variant.apart else []),
    )
    held = rows * size
    return replace(
        made,
        name=f"latent on Hopper {rows}x{KEYS}",
        ops=(
            ops["load_k"], ops["have_o1"], *halves, *handed,
            ops["take1"]._replace(min_cycles=ops["take1"].min_cycles + votes),
            ops["have_s0"]._replace(min_cycles=barrier + extra),
            *(_scaled(ops[name], _TURNED_SOFTMAX / ROWS)._replace(role=softmax) for name in small),
            ops["give0"]._replace(role=softmax, demand=()),
        ),
        edges=edges,
        roles=roles,
        buffers=(
            Buffer("Q", "smem", held * workload.head_dim_qk, 1, "", "qk0"),
            Buffer("P", "smem", held * KEYS, _HANDED, "give0", "pv1"),
            made.buffers[2],
        ),
        rows_per_cta=rows,
        edge_read_bytes=float(held * workload.head_dim_qk),
        edge_write_bytes=float(held * values),
    )  # fmt: skip


def _scaled(op: Op, part: float) -> Op:
    """An operation on so large a part of the elements."""
    return op._replace(
        demand=tuple((unit, cycles * part) for unit, cycles in op.demand), min_cycles=op.min_cycles * part,
        instructions=tuple((kind, count * part) for kind, count in op.instructions), beside_mma_cycles=op.beside_mma_cycles * part,
    )  # fmt: skip
