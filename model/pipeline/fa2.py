"""FlashAttention-2 forward with mma.sync (Ampere, sm_120): warps that load, multiply and exponentiate in turn.

Four warps, one on each sub-partition, form a stream; a CTA of eight warps and further CTAs on the SM are further
streams that share the units.  Within a stream everything is in order: overlap comes only from the other streams.

With wgmma (Hopper) products are asynchronous, as the machine code of the generated kernels has it: S is waited for at once, O
with the next S.  All warps of a CTA meet after S is there, before its softmax, and again after PV is issued, before one thread
asks for the tiles of a later block: the streams of a CTA go in step.  CTAs of one stream come apart, one's softmax under the
others' products, and stay so: nothing holds them together (followed in machine code, docs/notes/forecast-accuracy.md).  Those of more
do as they happen to start: taken as half-way between in step and as far apart as they come (assumed).
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from tilecast.model.kernel.variants.fa2 import Fa2Variant, by_wgmma, ctas_per_sm, rows_of_stream, tile_widths
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.pipeline import softmax_cost as common
from tilecast.model.pipeline.graph import Buffer, Edge, Op, Pipeline, Role, Step, of_tile
from tilecast.model.pipeline.tensor_core import (
    INSTRUCTIONS_PER_MMA,
    mma_completion_latency_cycles,
    mma_smem_bytes,
    mma_sync_tile_cycles,
    mma_tile_cycles,
)

#: mma.sync m16n8k16: FLOP of one warp instruction.
MMA_FLOP = 2 * 16 * 8 * 16
#: Hopper: stall counts of addresses and descriptors ahead of QK and behind PV in the machine code of the generated kernels
#: (42 to 56, and 25 to 70), whatever their tile, head_dim or mask; and instructions of a step that do not scale with its tile,
#: on the ALU, on the FMA pipe, and others (17 to 19, 17 to 24, 83 to 104), these around its products.
AHEAD_OF_QK_CYCLES, BEHIND_PV_CYCLES = 47.0, 50.0
_STEP_ALU, _STEP_FMA, _STEP_OTHERS = 18.0, 18.0, 88.0
#: Stall counts between two loops of a tile (223 to 370).
_BETWEEN_LOOPS_CYCLES = 300.0
#: Barriers of a step before QK, before the softmax, and before the copies of a later block; of loops that are not pipelined the
#: second row (machine code).
_BARRIERS = {True: (0, 1, 2), False: (5, 4, 1)}


def build(workload: Workload, variant: Fa2Variant, machine: Machine) -> Pipeline:
    """The forward loop of ``variant``; legality is the caller's business (`variant.legality`)."""
    ctas = ctas_per_sm(variant, workload, machine)
    made = build_of(workload, variant, machine, ctas)
    if ctas == 1 or variant.warps == 4 or not by_wgmma(variant, machine):
        return made
    one = build_of(workload, variant, machine, 1)
    mask = tuple((name, tuple((unit, ctas * cycles) for unit, cycles in extra)) for name, extra in one.mask_demand)
    return replace(made, in_step=replace(one, ops=tuple(_shared(op, ctas) for op in one.ops), mask_demand=mask))


def _shared(op: Op, ctas: int) -> Op:
    """``op`` while ``ctas`` CTAs do it at once."""
    busiest = max((cycles for _, cycles in op.demand), default=0.0)
    waits = op.min_cycles + (ctas - 1) * busiest
    demand = tuple((unit, ctas * cycles) for unit, cycles in op.demand)
    return op._replace(
        demand=demand,
        min_cycles=waits,
        beside_mma_cycles=max(waits, op.beside_mma_cycles) if op.beside_mma_cycles else 0.0,
    )


def build_of(workload: Workload, variant: Fa2Variant, machine: Machine, ctas: int) -> Pipeline:
    """The loop of ``ctas`` CTAs that do not keep step."""
    streams = ctas * variant.warps // 4
    rows = rows_of_stream(variant, machine)
    kind = _HopperStream if by_wgmma(variant, machine) else _Stream
    first = kind(workload, variant, machine, 0, rows).ops()
    edges: list[Edge] = []
    roles: list[Role] = []
    for s in range(streams):
        stream = kind(workload, variant, machine, s, rows)
        edges += stream.edges()
        roles += stream.roles()
    masked = common.mask_work(machine, rows * variant.tile_n * kind.mask_instructions(workload))
    size = workload.dtype_bytes
    ring = variant.tile_n * (workload.head_dim_qk + workload.head_dim_v) * size
    o = variant.tile_m * workload.head_dim_v
    return Pipeline(
        name=f"fa2 {variant.tile_m}x{variant.tile_n} {variant.warps} warps, {ctas} CTA/SM",
        machine=machine.name,
        ops=tuple(of_tile(op, s) for s in range(streams) for op in first),
        edges=tuple(edges),
        roles=tuple(roles),
        buffers=(
            Buffer("Q", "smem", variant.tile_m * workload.head_dim_qk * size * ctas, 1, "", "qk0"),
            Buffer("K/V", "smem", ring * ctas, variant.kv_stages, "load_k0", "qk0"),
        ),
        rows_per_cta=variant.tile_m,
        keys_per_iteration=variant.tile_n,
        ctas_per_sm=ctas,
        prologue_cycles=machine["launch.cta_start_cycles"],
        epilogue_cycles=o * 4 / machine["smem.bytes_per_clk"] + machine["l2.latency_cycles"],
        edge_read_bytes=variant.tile_m * workload.head_dim_qk * size,
        edge_write_bytes=o * 2.0,
        tiles_overlap=False,
        legacy_matrix_path=machine.tensor_kind == "tcgen05",
        restart_cycles=kind(workload, variant, machine, 0, rows).restart_cycles() / ctas,
        mask_demand=tuple((f"max{s}", masked) for s in range(streams)),
    )


class _Stream:
    """One group of four warps (one on each sub-partition) of one CTA."""

    def __init__(self, w: Workload, v: Fa2Variant, m: Machine, index: int, rows: int) -> None:
        self.w, self.v, self.m, self.s, self.rows = w, v, m, index, rows

    def mma(self, name: str, kind: str, n: int, k: int) -> Op:
        w, m = self.w, self.m
        cycles = mma_sync_tile_cycles(m, self.rows, n, k, w.dtype)
        flop = 2.0 * self.rows * n * k
        count = flop / (MMA_FLOP * (2 if w.dtype == "fp8" else 1)) / 4
        # B fragments come by ldmatrix: each warp reads the whole K or V tile; four warps share no registers.
        read = 4 * n * k * w.dtype_bytes / m["smem.bytes_per_clk"]
        loads = 4 * n * k * w.dtype_bytes / 512 / 4
        issue = count + loads
        alone = max(cycles, read, issue) + m["tensor.mma_latency_cycles"] + m["smem.latency_cycles"]
        return Op(
            f"{name}{self.s}", kind, f"warps{self.s}", (("tensor", cycles), ("smem", read), ("issue", issue)), alone,
            tile=self.s, instructions=(("other", issue),),
        )  # fmt: skip

    def bookkeeping(self) -> common.Work:
        """What a softmax step does beside its elements."""
        return common.bookkeeping_work(self.m)

    @staticmethod
    def mask_instructions(workload: Workload) -> float:
        """ALU instructions that mask a score."""
        return 2.0

    def restart_cycles(self) -> float:
        """From one loop of a tile to the next, beyond the hand-overs of a block."""
        return 0.0

    def ops(self) -> list[Op]:
        w, v, m, s = self.w, self.v, self.m, self.s
        role = f"warps{s}"
        elements = float(self.rows * v.tile_n)
        step = common.add(common.row_max_work(m, elements), self.bookkeeping())
        quad = 2 * (m["shuffle.latency_cycles"] + m["alu.latency_cycles"])
        exp = common.exp_work(m, w, elements, 0.0, 3)
        total = common.row_sum_work(m, elements)
        o_cycles, o_count = common.fma_cost(m, v.tile_m * 4 / v.warps * w.head_dim_v)
        rescale = common.work(m, {"fma": o_cycles}, {"fma": o_count})
        loads = []
        for name, width in (("load_k", w.head_dim_qk), ("load_v", w.head_dim_v)):
            # All warps of a CTA share a tile; each stream fetches its part.
            size = v.tile_n * width * w.dtype_bytes * 4 / v.warps
            busy = common.load_cycles(m, size)
            count = size / 512 / 4
            loads.append(
                Op(f"{name}{s}", "load", f"load{s}", (("tma", busy), ("issue", count)), max(busy, count),
                   engine="tma", issue_cycles=count, tile=s, instructions=(("other", count),))
            )  # fmt: skip
        return [
            *loads,
            self.mma("qk", "qk", v.tile_n, w.head_dim_qk),
            Op(f"max{s}", "row max", role, (*step.cycles, ("mufu", self.rows / m["mufu.ex2_per_clk"])),
               step.busiest() + quad + common.statistics_latency(m), tile=s,
               instructions=(*step.instructions, ("mufu", self.rows / 128.0))),
            Op(f"rescale{s}", "rescale", role, rescale.cycles, rescale.busiest() + m["fma.latency_cycles"], tile=s,
               instructions=rescale.instructions),
            Op(f"exp{s}", "exp", role, exp.cycles, exp.busiest() + common.ramp_latency(m), tile=s,
               instructions=exp.instructions),
            Op(f"sum{s}", "row sum", role, total.cycles, total.busiest(), tile=s, instructions=total.instructions),
            self.mma("pv", "pv", w.head_dim_v, v.tile_n),
        ]  # fmt: skip

    def edges(self) -> list[Edge]:
        s, stages = self.s, self.v.kv_stages
        landed = self.m["l2.latency_cycles"]
        return [
            Edge(f"load_k{s}", f"qk{s}", 0, landed, "data", "K tile"),
            Edge(f"load_v{s}", f"pv{s}", 0, landed, "data", "V tile"),
            Edge(f"qk{s}", f"load_k{s}", stages, 0.0, "buffer", "K slot"),
            Edge(f"pv{s}", f"load_v{s}", stages, 0.0, "buffer", "V slot"),
        ]

    def roles(self) -> tuple[Role, Role]:
        s = self.s
        program = tuple(Step(f"{name}{s}") for name in ("qk", "max", "rescale", "exp", "sum", "pv"))
        # cp.async: the same warps issue copies, which then run beside the arithmetic.
        return (
            Role(f"load{s}", (Step(f"load_k{s}"), Step(f"load_v{s}")), 0),
            Role(f"warps{s}", program, 4),
        )


class _HopperStream(_Stream):
    """The same four warps where products are wgmma."""

    def mma(self, name: str, kind: str, n: int, k: int) -> Op:
        w, m = self.w, self.m
        home = "smem" if kind == "qk" else "register"
        # Eight warps of a tile of 64: a product for each half of S, and one half of O.
        halves = 2 if self.shares_rows() and kind == "qk" else 1
        n = n // 2 if self.shares_rows() else n
        tiles = halves * self.rows / 64.0
        cycles = tiles * mma_tile_cycles(m, 64, n, k, w.dtype, home)
        read = tiles * mma_smem_bytes(64, n, k, w.dtype, home) / m["smem.bytes_per_clk"]
        count = INSTRUCTIONS_PER_MMA * tiles * k * w.dtype_bytes / 32
        demand = [("tensor", cycles), ("smem", min(read, cycles)), ("issue", min(count, cycles))]
        if m.has("regs.mma_share"):
            demand.append(("regs", cycles * m["regs.mma_share"]))
        return Op(
            f"{name}{self.s}", kind, f"warps{self.s}", tuple(demand), cycles, engine="tensor", issue_cycles=count,
            hidden_fma=m.get("tensor.mma_hidden_fma_share", inf), tile=self.s, instructions=(("other", count),),
        )  # fmt: skip

    @staticmethod
    def mask_instructions(workload: Workload) -> float:
        return common.mask_instructions(workload)

    def restart_cycles(self) -> float:
        # A loop ends when its last product is through, and the next asks for its first tiles anew.
        m, w = self.m, self.w
        tile = common.load_cycles(m, self.v.tile_n * w.head_dim_qk * w.dtype_bytes)
        return _BETWEEN_LOOPS_CYCLES + m["tensor.mma_latency_cycles"] + m["tma.latency_l2_cycles"] + tile

    def shares_rows(self) -> bool:
        return self.v.tile_m * 4 // self.v.warps < self.rows

    def bookkeeping(self) -> common.Work:
        m = self.m
        fma = common.work(m, {"fma": _STEP_FMA * 128 / m["fma.lanes"]}, {"fma": _STEP_FMA})
        return common.add(common.bookkeeping_work(m, _STEP_ALU, _STEP_ALU), fma)

    def holds(self) -> dict[str, float]:
        """Operations of a step that compute nothing -> cycles they hold the stream."""
        m = self.m
        barrier = m.get("sync.barrier_cycles", 0.0) + m.get("sync.barrier_spread_cycles", 0.0) / 2
        poll = m.get("sync.wait_done_cycles", 0.0)
        before, between, behind = _BARRIERS[self.v.kv_stages > 1]
        # QK of a head of 192 is one product of 128 columns and one of 64, each waited for.
        products = len(tile_widths(self.w.head_dim_qk))
        again = (products - 1) * (mma_completion_latency_cycles(m, 64, self.v.tile_n, self.w.dtype, "smem", 1) + poll)
        return {
            "ahead": poll + AHEAD_OF_QK_CYCLES + before * barrier,
            "have_s": poll + between * barrier + again,
            "behind": BEHIND_PV_CYCLES + behind * barrier,
        }

    def ops(self) -> list[Op]:
        s = self.s
        holds = self.holds()
        others = _STEP_OTHERS / len(holds)
        done = (("issue", others),), (("other", others),)
        return [
            *(self.arithmetic(op) if op.role == f"warps{s}" and not op.engine else op for op in super().ops()),
            *(
                Op(f"{name}{s}", "barrier", f"warps{s}", done[0], cycles, tile=s, instructions=done[1])
                for name, cycles in holds.items()
            ),
        ]

    def arithmetic(self, op: Op) -> Op:
        """``op`` with its pace beside products."""
        beside = common.beside_mma_cycles(self.m, common.Work(op.demand, op.instructions))
        latency = op.min_cycles - max((cycles for _, cycles in op.demand), default=0.0)
        return op._replace(beside_mma_cycles=beside + latency)

    def edges(self) -> list[Edge]:
        w, m, s, v = self.w, self.m, self.s, self.v
        landed = m["tma.latency_l2_cycles"]
        done_qk = mma_completion_latency_cycles(m, 64, v.tile_n, w.dtype, "smem", 1)
        done_pv = mma_completion_latency_cycles(m, 64, w.head_dim_v, w.dtype, "register", 1)
        found = [
            Edge(f"qk{s}", f"have_s{s}", 0, done_qk, "data", "S accumulator"),
            Edge(f"pv{s}", f"have_s{s}", 1, done_pv, "data", "O accumulator"),
        ]
        streams = v.warps // 4
        for other in range(s // streams * streams, (s // streams + 1) * streams):
            # A tile is there, and its slot free, for all streams of the CTA at once.
            found.append(Edge(f"load_k{other}", f"ahead{s}", 0, landed, "data", "K tile"))
            found.append(Edge(f"load_v{other}", f"max{s}", 0, landed, "data", "V tile"))
            if v.kv_stages > 1:
                # Asked for when the product of a block before is issued: one lap less ahead than there are slots.
                found += [
                    Edge(f"behind{other}", f"load_{tile}{s}", v.kv_stages - 1, 0.0, "buffer", f"{tile.upper()} slot")
                    for tile in "kv"
                ]
            else:
                found.append(Edge(f"pv{other}", f"load_k{s}", 1, done_pv, "buffer", "K slot"))
                found.append(Edge(f"qk{other}", f"load_v{s}", 0, done_qk, "buffer", "V slot"))
            if other != s:
                found.append(Edge(f"have_s{other}", f"max{s}", 0, 0.0, "order", "barrier of the CTA"))
                found.append(Edge(f"behind{other}", f"ahead{s}", 1, 0.0, "order", "barrier of the CTA"))
        return found

    def roles(self) -> tuple[Role, Role]:
        s = self.s
        lap = ("ahead", "qk", "have_s", "max", "rescale", "exp", "sum", "pv", "behind")
        loads = Role(f"load{s}", (Step(f"load_k{s}"), Step(f"load_v{s}")), 0)
        return loads, Role(f"warps{s}", tuple(Step(f"{name}{s}") for name in lap), 4)
