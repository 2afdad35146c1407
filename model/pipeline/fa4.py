"""FlashAttention-4 forward on Blackwell: roles, barriers and tensor memory of flash_fwd_sm100.py (FA4C) as a Pipeline.

Two softmax warpgroups own one score tile each.  With ``split="q"`` the tiles are two query tiles and meet the same
keys; with ``split="k"`` they are alternate key blocks of one query tile, which fits head dimensions whose two O
accumulators would not.  The matrix role issues PV of a tile and then QK of its next block, because S and P share
tensor memory: that, and the row-statistics hand-shake through the correction warps, shape the recurrences.
"""

from __future__ import annotations

from functools import lru_cache

from tilecast.model.kernel.alike import with_knobs
from tilecast.model.kernel.variants.fa4 import ALIKE, Fa4Variant
from tilecast.model.kernel.variants.fa4 import smem_bytes as fa4_smem_bytes
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

#: Share of the P columns written before the matrix role may start PV (FA4C, split_P_arrive).
_FIRST_PART = 0.75
#: (ALU, all) instructions that masking takes a score, by where it is done and whether one side bounds the keys or two.  Counted: in
#: the masked loops of flash-attn-4 4.0.0b36 beyond its plain ones (164 and 175 of 128 scores, windows 179 and 192: a select each and
#: R2P; 62 FMNMX3 more on sm_103), and in what kernels of our template skip in plain blocks (274 and 295, windows 305 and 330, alike for head_dim 64, 128
#: and 256, 16 and 8 bits: a select and nearly a LOP3 each), which loads and stores the scores in four pieces, one after the other.
_MASKS = {
    "registers": {"causal": (1.28, 1.37), "window": (1.40, 1.50)},
    "tmem": {"causal": (2.14, 2.30), "window": (2.38, 2.58)},
}
_MASKED_PIECES = 4
#: Knobs that leave the operations of a tile alone.
_ONE_TILE = {**ALIKE.least_waiting, "softmax_tiles": 1, "split": "q"}
#: Knobs that leave the dependences alone.
_SAME_EDGES = {
    "emulated_share": 0.0,
    "poly_degree": 3,
    "load_max": False,
    "rescale_threshold": 8.0,
    "scheduler": "grid",
}
#: The barrier of edges that free a slot of row statistics; the template's order of steps is read from them.
STATISTICS_SLOT = "statistics slot"


def build(workload: Workload, variant: Fa4Variant, machine: Machine) -> Pipeline:
    """The forward loop of ``variant``; legality is the caller's business (`variant.legality`)."""
    least = with_knobs(variant, ALIKE.least_waiting)
    loosest = _build(workload, least, machine)
    if least is variant:
        return loosest
    parts = _Parts(workload, variant, machine)
    return loosest.waiting(parts.waiting(loosest.edges), buffers=parts.ring(loosest.buffers))


@lru_cache(maxsize=2048)
def _build(workload: Workload, variant: Fa4Variant, machine: Machine) -> Pipeline:
    """What variants share that differ only in how long they wait (`ALIKE.least_waiting`)."""
    parts = _Parts(workload, variant, machine)
    tiles = range(variant.softmax_tiles)
    one_tile = with_knobs(variant, _ONE_TILE)
    edges = _edges(workload, with_knobs(variant, _SAME_EDGES), machine)
    by_q = variant.split == "q"
    return Pipeline(
        name=f"fa4 {'2-CTA' if variant.cta_group == 2 else '1-CTA'} "
        f"{variant.softmax_tiles}x{variant.tile_m}x{variant.tile_n} split-{variant.split}",
        machine=machine.name,
        ops=(*(op for s in tiles for op in _tile_ops(workload, one_tile, machine, s)), *parts.load_ops()),
        edges=edges,
        roles=_roles(variant.softmax_tiles, variant.split_p),
        buffers=parts.buffers(),
        rows_per_cta=parts.query_rows,
        keys_per_iteration=variant.tile_n * (1 if by_q else variant.softmax_tiles),
        ctas_per_sm=1,
        cta_group=variant.cta_group,
        prologue_cycles=machine["launch.cta_start_cycles"],
        epilogue_cycles=parts.epilogue_cycles(),
        edge_read_bytes=parts.query_rows * workload.head_dim_qk * workload.dtype_bytes,
        edge_write_bytes=parts.query_rows * workload.head_dim_v * 2.0,
        query_ahead=False,
        mask_demand=tuple((f"max{s}", parts.mask_work()) for s in tiles),
        first_block_masked=variant.mask_home == "registers",
        notes=(
            ("exponentials on the FMA pipe", variant.emulated_share),
            ("rescale share", rescale_share(variant.rescale_threshold)),
        ),
    )


@lru_cache(maxsize=2048)
def _tile_ops(workload: Workload, variant: Fa4Variant, machine: Machine, tile: int) -> list[Op]:
    """Operations of a query tile, whatever tiles there are beside it."""
    if tile:
        return [of_tile(op, tile) for op in _tile_ops(workload, variant, machine, 0)]
    return _Parts(workload, variant, machine).tile_ops()


@lru_cache(maxsize=2048)
def _edges(workload: Workload, variant: Fa4Variant, machine: Machine) -> tuple[Edge, ...]:
    """Dependences of a tile's operations, whatever work these are."""
    return tuple(_Parts(workload, variant, machine).edges())


@lru_cache(maxsize=16)
def _roles(softmax_tiles: int, split_p: bool) -> tuple[Role, ...]:
    parts = ("a", "b") if split_p else ("a",)
    tiles = range(softmax_tiles)
    matrix: list[Step] = []
    for s in tiles:
        matrix += [Step(f"pv{s}{p}") for p in parts]
        matrix.append(Step(f"qk{s}", 1))
    softmax = []
    for s in tiles:
        # The row sum of a block runs at the head of the next step, after the statistics slot is free.
        program = (Step(f"sum{s}"), Step(f"max{s}"), *(Step(f"exp{s}{p}") for p in parts))
        softmax.append(Role(f"softmax{s}", program, 4, 176))
    return (
        Role("load", (Step("load_k"), Step("load_v")), 1, 72),
        Role("mma", tuple(matrix), 1, 72),
        *softmax,
        Role("correction", tuple(Step(f"correct{s}") for s in tiles), 4, 88),
    )


class _Parts:
    """The pieces of one FA4 pipeline; a namespace for values that most pieces need."""

    def __init__(self, workload: Workload, variant: Fa4Variant, machine: Machine) -> None:
        self.w, self.v, self.m = workload, variant, machine
        self.elements = float(variant.tile_m * variant.tile_n)
        #: Rows of a CTA.
        self.query_rows = variant.tile_m * (variant.softmax_tiles if variant.split == "q" else 1)
        self.pair = variant.cta_group
        self.arrive = machine["sync.mbarrier_roundtrip_cycles"]
        if self.pair == 2:
            # The leader's matrix warp waits for both CTAs: the farther arrival crosses to the other SM.
            self.arrive = max(self.arrive, machine["sync.cluster_arrive_cycles"])

    # -- operations --------------------------------------------------------------------------------------------

    def mma(self, name: str, kind: str, tile: int, n: int, k: int, a_home: str) -> Op:
        m, dtype = self.v.tile_m * self.pair, self.w.dtype
        cycles = mma_tile_cycles(self.m, m, n, k, dtype, a_home, self.pair)
        read = mma_smem_bytes(m, n, k, dtype, a_home, self.pair) / self.m["smem.bytes_per_clk"]
        steps = k * self.w.dtype_bytes / 32
        # The leader CTA issues for both: half the instructions per SM.
        count = steps * INSTRUCTIONS_PER_MMA / 4 / self.pair
        return Op(
            name, kind, "mma", (("tensor", cycles), ("smem", min(read, cycles)), ("issue", count)), cycles,
            engine="tensor", issue_cycles=steps, tile=tile, instructions=(("other", count),),
        )  # fmt: skip

    def tile_ops(self) -> list[Op]:
        """Of query tile 0."""
        s, v, w, m = 0, self.v, self.w, self.m
        first = v.tile_n * _FIRST_PART if v.split_p else v.tile_n
        softmax = f"softmax{s}"
        max_work = common.row_max_work(m, self.elements if not v.load_max else self.elements / 32)
        overhead = common.bookkeeping_work(m)
        read = self.elements * 4 / m["tmem.read_bytes_per_clk"]
        # Loads stream ahead of the maxima: latency once, then the slower of port and ALU.
        max_time = m["tmem.load_latency_cycles"] + max(read, max_work.busiest()) + common.statistics_latency(m)
        scale_mufu = v.tile_m / m["mufu.ex2_per_clk"]
        ops = [
            self.mma(f"qk{s}", "qk", s, v.tile_n, w.head_dim_qk, "smem"),
            Op(f"max{s}", "row max", softmax, (*max_work.cycles, ("tmem_read", read), ("mufu", scale_mufu)), max_time,
               tile=s, instructions=(*max_work.instructions, ("mufu", v.tile_m / 128.0))),
        ]  # fmt: skip
        exp = common.exp_work(m, w, self.elements, v.emulated_share, v.poly_degree)
        p_bytes = self.elements * w.dtype_bytes
        parts = (("a", first / v.tile_n), ("b", 1 - first / v.tile_n)) if v.split_p else (("a", 1.0),)
        for suffix, share in parts:
            part = exp.scaled(share)
            write = p_bytes * share / m["tmem.write_bytes_per_clk"]
            ramp = common.ramp_latency(m) if suffix == "a" else 0.0
            ops.append(
                Op(f"exp{s}{suffix}", "exp", softmax, (*part.cycles, ("tmem_write", write)),
                   max(common.one_warp_cycles(m, part), write) + ramp, tile=s, instructions=part.instructions)
            )  # fmt: skip
            ops.append(
                self.mma(f"pv{s}{suffix}", "pv", s, w.head_dim_v, round(v.tile_n * share), "tmem"),
            )
        # Barrier polls, addresses and loop control of the step sit beside the row sum, off the path from S to P.
        total = common.add(common.row_sum_work(m, self.elements), overhead)
        ops.append(
            Op(f"sum{s}", "row sum", softmax, total.cycles, total.busiest(), tile=s, instructions=total.instructions)
        )
        ops.append(self.correction(s))
        return ops

    def mask_work(self) -> common.Pairs:
        """Extra demand of a tile's block that runs the code of masked blocks."""
        m, v = self.m, self.v
        alu, instructions = _MASKS[v.mask_home]["window" if self.w.mask == "window" else "causal"]
        demand = {"alu": self.elements * alu / m["alu.lanes"], "issue": self.elements / 128 * instructions}
        if v.mask_home == "tmem":
            # A piece is loaded, hidden and stored before the next is loaded.
            demand["tmem_read"] = self.elements * 4 / m["tmem.read_bytes_per_clk"]
            demand["tmem_write"] = self.elements * 4 / m["tmem.write_bytes_per_clk"]
            demand[""] = _MASKED_PIECES * m["tmem.load_latency_cycles"]
        elif v.load_max:
            # The maxima that came with the load know nothing of the mask.
            for unit, cycles in common.row_max_work(m, self.elements).cycles:
                demand[unit] += cycles
        return tuple(demand.items())

    def correction(self, s: int) -> Op:
        m = self.m
        share = rescale_share(self.v.rescale_threshold)
        o_elements = self.v.tile_m * self.w.head_dim_v * share
        multiply, count = common.fma_cost(m, o_elements)
        read, write = o_elements * 4 / m["tmem.read_bytes_per_clk"], o_elements * 4 / m["tmem.write_bytes_per_clk"]
        fixed = common.work(
            m, {"alu": common.CORRECTION_ALU_INSTRUCTIONS * 128 / m["alu.lanes"], "fma": multiply},
            {"alu": common.CORRECTION_ALU_INSTRUCTIONS, "fma": count,
             "other": common.CORRECTION_INSTRUCTIONS - common.CORRECTION_ALU_INSTRUCTIONS},
        )  # fmt: skip
        # A rescale walks O in 16-column pieces, each a load, a multiply and a store in turn.  Each warp decides for its
        # own 32 rows, but the barriers wait for all four: the step takes long when any of them rescales.
        any_warp = 1.0 - (1.0 - share) ** 4
        pieces = self.w.head_dim_v / 16
        whole = self.v.tile_m * self.w.head_dim_v * 4.0
        port = whole / m["tmem.read_bytes_per_clk"] + whole / m["tmem.write_bytes_per_clk"]
        walk = any_warp * (pieces * m["tmem.load_latency_cycles"] / 2 + port)
        # Read the scale, then arrive on two barriers (each a shared-memory round trip) after the vote.
        alone = 3 * m["smem.latency_cycles"] + max(fixed.busiest(), common.CORRECTION_INSTRUCTIONS) + walk
        return Op(
            f"correct{s}", "correction", "correction",
            (*fixed.cycles, ("tmem_read", read), ("tmem_write", write)), alone, tile=s,
            instructions=fixed.instructions,
        )  # fmt: skip

    def load_ops(self) -> list[Op]:
        w, v, m = self.w, self.v, self.m
        blocks = 1 if v.split == "q" else v.softmax_tiles
        out = []
        for name, width in (("load_k", w.head_dim_qk), ("load_v", w.head_dim_v)):
            size = blocks * v.tile_n * width * w.dtype_bytes / self.pair
            busy = common.load_cycles(m, size)
            out.append(
                Op(name, "load", "load", (("tma", busy),), busy, engine="tma", issue_cycles=m["tma.issue_cycles"],
                   instructions=(("other", 2.0),))
            )  # fmt: skip
        return out

    # -- dependences ---------------------------------------------------------------------------------------------

    def edges(self) -> list[Edge]:
        v, m = self.v, self.m
        last = "b" if v.split_p else "a"
        parts = ("a", "b") if v.split_p else ("a",)
        handoff = m["sync.named_barrier_cycles"]
        mma_m = v.tile_m * self.pair
        s_ready = mma_completion_latency_cycles(m, mma_m, v.tile_n, self.w.dtype, "smem", self.pair)
        landed = m["tma.latency_l2_cycles"]
        edges: list[Edge] = []
        for s in range(v.softmax_tiles):
            before = s - 1 if s else v.softmax_tiles - 1
            lap = 0 if s else 1
            edges += [
                Edge("load_k", f"qk{s}", 0, landed, "data", "K tile"),
                Edge("load_v", f"pv{s}a", 0, landed, "data", "V tile"),
                Edge(f"qk{s}", f"max{s}", 0, s_ready, "data", "S full"),
                Edge(f"max{s}", f"correct{s}", 0, handoff, "data", "row statistics"),
                # The correction step of one tile releases the statistics slot of the other (FA4C).
                Edge(
                    f"correct{before}",
                    f"sum{s}",
                    lap + v.stats_slots - 1,
                    self.arrive_local(),
                    "order",
                    STATISTICS_SLOT,
                ),
            ]
            if v.split == "k":
                # Alternate key blocks of one query tile: the running maximum passes from group to group.
                edges.append(Edge(f"max{before}", f"max{s}", lap, handoff, "data", "running max"))
            edges.append(Edge(f"correct{s}", f"pv{s}a", 0, self.arrive, "data", "O rescaled"))
            for part in parts:
                edges.append(Edge(f"exp{s}{part}", f"pv{s}{part}", 0, self.arrive, "data", f"P full ({part})"))
            edges.append(Edge(f"pv{s}{last}", f"qk{s}", 1, 0.0, "buffer", "S/P tensor memory"))
            # Values inside a warpgroup: program order already keeps them, a free-order schedule must as well.
            edges.append(Edge(f"max{s}", f"exp{s}a", 0, 0.0, "data", "row max"))
            edges.append(Edge(f"exp{s}{last}", f"sum{s}", 1, 0.0, "data", "exponentials"))
            if v.split_p:
                edges.append(Edge(f"exp{s}a", f"exp{s}b", 0, 0.0, "order", "columns in turn"))
                edges.append(Edge(f"pv{s}a", f"pv{s}b", 0, 0.0, "order", "O accumulator"))
        return edges + self.ring_edges()

    def waiting(self, loosest: tuple[Edge, ...]) -> tuple[Edge, ...]:
        """`edges` from those of the variant that waits least: slots are there again later."""
        sooner = int(str(ALIKE.least_waiting["stats_slots"])) - self.v.stats_slots
        rings = self.ring_edges()
        kept = loosest[: len(loosest) - len(rings)]
        if sooner:
            kept = tuple([e._replace(distance=e.distance - sooner) if e.why == STATISTICS_SLOT else e for e in kept])
        return (*kept, *rings)

    def arrive_local(self) -> float:
        """Hand-over through an mbarrier inside the CTA."""
        return self.m["sync.mbarrier_roundtrip_cycles"]

    def ring_edges(self) -> list[Edge]:
        """K and V share one ring of slots: load number i waits for the release of number i - slots."""
        _, _, slots = fa4_smem_bytes(self.v, self.w, self.m)
        final = self.v.softmax_tiles - 1
        users = (f"qk{final}", f"pv{final}{'b' if self.v.split_p else 'a'}")
        blocks = 1 if self.v.split == "q" else self.v.softmax_tiles
        slots = max(2, slots // blocks)
        edges = []
        for item, load in enumerate(("load_k", "load_v")):
            back = item - slots
            edges.append(Edge(users[back % 2], load, -(back // 2), self.arrive_local(), "buffer", "K/V ring slot"))
        return edges

    # -- programs, storage -----------------------------------------------------------------------------------------

    def buffers(self) -> tuple[Buffer, ...]:
        query, slot, slots = fa4_smem_bytes(self.v, self.w, self.m)
        column = 512
        out = [
            Buffer("Q", "smem", query, 1, "", "qk0"),
            Buffer("K/V ring", "smem", slot, slots, "load_k", "qk0"),
        ]
        tiles_o = self.v.softmax_tiles if self.v.split == "q" else 1
        last = "b" if self.v.split_p else "a"
        out += [
            Buffer(f"S/P {s}", "tmem", self.v.tile_n * column, 1, f"qk{s}", f"pv{s}{last}")
            for s in range(self.v.softmax_tiles)
        ]
        out += [
            Buffer(f"O {s}", "tmem", self.w.head_dim_v * column, 1, f"pv{s}a", f"correct{s}") for s in range(tiles_o)
        ]
        return tuple(out)

    def ring(self, loosest: tuple[Buffer, ...]) -> tuple[Buffer, ...]:
        """`buffers` from those of the variant that waits least: the ring of K and V has fewer slots."""
        _, _, slots = fa4_smem_bytes(self.v, self.w, self.m)
        query, ring, *rest = loosest
        return (query, ring._replace(depth=slots), *rest)

    def epilogue_cycles(self) -> float:
        """Read O, divide by the row sum, convert, write to shared memory, and hand it to the copy engine."""
        m = self.m
        o = self.query_rows * self.w.head_dim_v
        wait = mma_completion_latency_cycles(
            m, self.v.tile_m * self.pair, self.w.head_dim_v, self.w.dtype, "tmem", self.pair
        )
        compute = o * 4 / m["tmem.read_bytes_per_clk"] + o / m["fma.lanes"] + o * 2 / m["smem.bytes_per_clk"]
        return wait + m["tmem.load_latency_cycles"] + compute + m["l2.latency_cycles"]
