"""FlashAttention-2 forward with mma.sync (Ampere, sm_120): warps that load, multiply and exponentiate in turn.

Four warps, one on each sub-partition, form a stream; a CTA of eight warps and further CTAs on the SM are further
streams that share the units.  Within a stream everything is in order: overlap comes only from the other streams.
"""

from __future__ import annotations

from tilecast.model.kernel.variants.fa2 import Fa2Variant, ctas_per_sm
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.pipeline import softmax_cost as common
from tilecast.model.pipeline.graph import Buffer, Edge, Op, Pipeline, Role, Step, of_tile
from tilecast.model.pipeline.tensor_core import mma_smem_bytes, mma_sync_tile_cycles, mma_tile_cycles

#: mma.sync m16n8k16: FLOP of one warp instruction.
_MMA_FLOP = 2 * 16 * 8 * 16


def build(workload: Workload, variant: Fa2Variant, machine: Machine) -> Pipeline:
    """The forward loop of ``variant``; legality is the caller's business (`variant.legality`)."""
    ctas = ctas_per_sm(variant, workload, machine)
    streams = ctas * variant.warps // 4
    rows = variant.tile_m * 4 // variant.warps
    first = _Stream(workload, variant, machine, 0, rows).ops()
    edges: list[Edge] = []
    roles: list[Role] = []
    for s in range(streams):
        stream = _Stream(workload, variant, machine, s, rows)
        edges += stream.edges()
        roles += stream.roles()
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
        mask_demand=tuple((f"max{s}", common.mask_work(machine, rows * variant.tile_n * 2.0)) for s in range(streams)),
        facts_used=(
            "tensor.mma_latency_cycles",
            common.packing_fact(workload),
        ),
    )


class _Stream:
    """One group of four warps (one on each sub-partition) of one CTA."""

    def __init__(self, w: Workload, v: Fa2Variant, m: Machine, index: int, rows: int) -> None:
        self.w, self.v, self.m, self.s, self.rows = w, v, m, index, rows

    def mma(self, name: str, kind: str, n: int, k: int) -> Op:
        w, m = self.w, self.m
        if m.tensor_kind == "wgmma":
            return self.wgmma(name, kind, n, k)
        cycles = mma_sync_tile_cycles(m, self.rows, n, k, w.dtype)
        flop = 2.0 * self.rows * n * k
        count = flop / (_MMA_FLOP * (2 if w.dtype == "fp8" else 1)) / 4
        # B fragments come by ldmatrix: each warp reads the whole K or V tile; four warps share no registers.
        read = 4 * n * k * w.dtype_bytes / m["smem.bytes_per_clk"]
        loads = 4 * n * k * w.dtype_bytes / 512 / 4
        issue = count + loads
        alone = max(cycles, read, issue) + m["tensor.mma_latency_cycles"] + m["smem.latency_cycles"]
        return Op(
            f"{name}{self.s}", kind, f"warps{self.s}", (("tensor", cycles), ("smem", read), ("issue", issue)), alone,
            tile=self.s, instructions=(("other", issue),),
        )  # fmt: skip

    def wgmma(self, name: str, kind: str, n: int, k: int) -> Op:
        """The same product as Triton writes it for Hopper: S is waited for at once, O with the next S."""
        w, m = self.w, self.m
        home = "smem" if kind == "qk" else "register"
        tiles = self.rows / 64.0
        cycles = tiles * mma_tile_cycles(m, 64, n, k, w.dtype, home)
        read = tiles * mma_smem_bytes(64, n, k, w.dtype, home) / m["smem.bytes_per_clk"]
        count = 2.0 * tiles * k * w.dtype_bytes / 32
        wait = m["tensor.mma_latency_cycles"] if kind == "qk" else 0.0
        step = 2 * m.get("sync.barrier_cycles", 0.0) + m.get("sync.wait_done_cycles", 0.0)
        demand = [("tensor", cycles), ("smem", min(read, cycles)), ("issue", min(count, cycles))]
        if m.has("regs.mma_share"):
            demand.append(("regs", cycles * m["regs.mma_share"]))
        return Op(
            f"{name}{self.s}", kind, f"warps{self.s}", tuple(demand), cycles + wait + step, tile=self.s,
            instructions=(("other", count),),
        )  # fmt: skip

    def ops(self) -> list[Op]:
        w, v, m, s = self.w, self.v, self.m, self.s
        role = f"warps{s}"
        elements = float(self.rows * v.tile_n)
        step = common.add(common.row_max_work(m, elements), common.bookkeeping_work(m))
        quad = 2 * (m["shuffle.latency_cycles"] + m["alu.latency_cycles"])
        exp = common.exp_work(m, w, elements, 0.0, 3)
        total = common.row_sum_work(m, elements)
        o_cycles, o_count = common.fma_cost(m, self.rows * w.head_dim_v)
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
