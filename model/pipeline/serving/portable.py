"""The loop of a serving kernel in plain Triton: programs that share an SM, each with a tile of rows and a ring of blocks of keys.

A tile of 16 rows is multiplied by mma.sync: all warps of a program have the same rows, so that maxima, sums and P go from warp to
warp through shared memory behind barriers.  A program alone on an SM has one warp to a sub-partition, whose instructions mostly
wait for the one before; what others on the SM do in that time is all the overlap there is.  Counts are those of the machine code
that Triton 3.6 makes for sm_90a (head_dim 128, blocks of 64 keys: 379 instructions with pages of 64, 485 with pages of 16).
Tiles with more rows are multiplied as `fa2` does it.
"""

from __future__ import annotations

from dataclasses import replace

from tilecast.model.kernel.variants.fa2 import Fa2Variant
from tilecast.model.kernel.variants.serving import DECODE_ROWS, ServingVariant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.pipeline import fa2
from tilecast.model.pipeline import softmax_cost as common
from tilecast.model.pipeline.graph import Buffer, Edge, Op, Pipeline, Role, Step
from tilecast.model.pipeline.tensor_core import mma_sync_tile_cycles

#: Warp instructions of a copy of 512 bytes, with its address and predicate; of a page number, per copy or block that has its own.
_COPY, _LOOKUP = 6, 13
#: Warp instructions of a reduction over the rows of a tile, and of the loop that belong to nothing else.
_REDUCTION, _LOOP = 25, 40
#: Masking an element of S: two comparisons with the key, two selects.
_MASK = 4
#: Cycles of one mma.sync m16n8k16 from issue to result, measured on an A100 (arXiv 2206.02874, table 5); Hopper's was not found.
MMA_LATENCY = 33.0
_WARP_COPY_BYTES = 512
#: Bytes of a page number, and that come from memory at a time.
_NUMBER_BYTES, _SECTOR_BYTES = 4, 32


def build(
    workload: Workload, variant: ServingVariant, machine: Machine, page: int, programs: int | None = None
) -> Pipeline:
    """The loop of ``programs`` programs on one SM (default: as many as `variant` has there), from pages of ``page`` tokens."""
    count = variant.programs if programs is None else programs
    if variant.tile_m > DECODE_ROWS:
        return _tall(workload, variant, machine, page)
    parts = [_Program(workload, variant, machine, page, number) for number in range(count)]
    size = workload.dtype_bytes
    ring = variant.tile_n * (workload.head_dim_qk + workload.head_dim_v) * size
    return Pipeline(
        name=f"serving {variant.tile_m}x{variant.tile_n} {variant.warps} warps, {count} programs/SM",
        machine=machine.name,
        ops=tuple(op for part in parts for op in part.ops()),
        edges=tuple(edge for part in parts for edge in part.edges()),
        roles=tuple(role for part in parts for role in part.roles()),
        buffers=(Buffer("K/V", "smem", ring * count, max(1, variant.kv_stages - 1), "load_k0", "qk0"),),
        rows_per_cta=variant.tile_m,
        keys_per_iteration=variant.tile_n,
        ctas_per_sm=count,
        prologue_cycles=machine["launch.cta_start_cycles"],
        epilogue_cycles=machine["l2.latency_cycles"],
        tiles_overlap=False,
        legacy_matrix_path=machine.tensor_kind != "mma_sync",
    )


def _tall(workload: Workload, variant: ServingVariant, machine: Machine, page: int) -> Pipeline:
    """Tiles of 64 rows and more: the same loop as the portable forward kernel's, with copies by pointers."""
    like = Fa2Variant(tile_m=variant.tile_m, tile_n=variant.tile_n, warps=variant.warps, kv_stages=variant.kv_stages)
    made = fa2.build(workload, like, machine)
    # That kernel's copies count one instruction each; here each has an address, and blocks have pages.
    copies = (
        variant.tile_n
        * (workload.head_dim_qk + workload.head_dim_v)
        * workload.dtype_bytes
        / _WARP_COPY_BYTES
        / variant.warps
    )
    lookups = max(1.0, variant.tile_n / page) if page else 0.0
    waiting, free = _LOOKUP + _LOOP, (_COPY - 1) * copies + _LOOKUP * max(0.0, lookups - 1.0)
    longer = waiting * machine["alu.latency_cycles"] + free
    ops = tuple(_longer(op, longer, waiting + free) if op.kind == "row max" else op for op in made.ops)
    return replace(
        made,
        ops=ops,
        name=f"serving {variant.tile_m}x{variant.tile_n} {variant.warps} warps, {made.ctas_per_sm} CTA/SM",
    )


def _longer(op: Op, cycles: float, issue: float) -> Op:
    """The operation with instructions around it."""
    demand = tuple((unit, c + issue if unit == "issue" else c) for unit, c in op.demand)
    return op._replace(
        demand=demand, min_cycles=op.min_cycles + cycles, instructions=(*op.instructions, ("other", issue))
    )


class _Program:
    """One program: its copies, its products, its softmax."""

    def __init__(self, w: Workload, v: ServingVariant, m: Machine, page: int, number: int) -> None:
        self.w, self.v, self.m, self.page, self.s = w, v, m, page, number
        #: Elements of S and of O that a thread has.
        self.scores = v.tile_m * v.tile_n / (32 * v.warps)
        self.sums = v.tile_m * w.head_dim_v / (32 * v.warps)

    def op(self, name: str, kind: str, waiting: float, free: float, latency: float, demand: dict[str, float]) -> Op:
        """An operation of ``waiting`` instructions of a warp, each after the one before, and ``free`` others."""
        issue = (waiting + free) * self.v.warps / self.m["issue.warp_inst_per_clk"]
        cycles = {"issue": issue, **{unit: c for unit, c in demand.items() if c > 0}}
        alone = max(waiting * self.m["alu.latency_cycles"] + free + latency, *cycles.values())
        share = self.v.warps / 4
        return Op(
            f"{name}{self.s}", kind, f"warps{self.s}", tuple(cycles.items()), alone, tile=self.s,
            instructions=(("other", (waiting + free) * share),),
        )  # fmt: skip

    def exchange(self) -> float:
        """Cycles until what a warp has written to shared memory is read by another behind a barrier."""
        m = self.m
        barrier = common.barrier_cycles(m) + m.get("sync.barrier_spread_cycles", 0.0)
        return barrier + m["smem.latency_cycles"]

    def reduction(self) -> float:
        """Cycles of a reduction over rows: within four lanes, written, across warps, read again."""
        rounds = 2 + max(1, (self.v.warps - 1).bit_length())
        return rounds * self.m["shuffle.latency_cycles"] + 2 * self.exchange()

    def copies(self, width: int) -> float:
        """Copies of a warp for a block of K or V of ``width`` columns."""
        return self.v.tile_n * width * self.w.dtype_bytes / _WARP_COPY_BYTES / self.v.warps

    def load(self, name: str, width: int) -> Op:
        """Copies of a block, in flight beside the warps that issued them (`ops` counts their instructions)."""
        busy = common.load_cycles(self.m, self.v.tile_n * width * self.w.dtype_bytes)
        return Op(f"{name}{self.s}", "load", f"copies{self.s}", (("tma", busy),), busy, engine="tma", tile=self.s)

    def product(self, name: str, kind: str, n: int, k: int, waiting: float, latency: float) -> Op:
        """A product of all rows with ``n`` columns over ``k``: the chain of mma.sync along k, operands by ldmatrix."""
        w, v, m = self.w, self.v, self.m
        tensor = mma_sync_tile_cycles(m, v.tile_m, n, k, w.dtype)
        # Warps share the columns: each reads its own part of K or V, and all of Q or P.
        read = (n + v.warps * v.tile_m) * k * w.dtype_bytes / m["smem.bytes_per_clk"]
        steps = k / 16
        free = steps * n / (8 * v.warps) + (n / v.warps + v.tile_m) * k * w.dtype_bytes / 512
        chain = steps * MMA_LATENCY + m["smem.latency_cycles"] + latency
        return self.op(name, kind, waiting, free, chain, {"tensor": tensor, "smem": read})

    def ops(self) -> list[Op]:
        w, v, m = self.w, self.v, self.m
        total = float(v.tile_m * v.tile_n)
        numbers = self.v.tile_n / self.page if self.page else 0.0
        # The next block's copies wait for their pages' numbers; one in eight of a sequence's is the first of its sector.
        far = numbers * _NUMBER_BYTES / _SECTOR_BYTES * m["hbm.latency_cycles"]
        lookups = 1.0 if not self.page or self.page >= v.tile_n else self.copies(w.head_dim_qk)
        copies = _COPY * (self.copies(w.head_dim_qk) + self.copies(w.head_dim_v))
        exp = common.exp_work(m, w, total, 0.0, 3)
        units = {unit: c for unit, c in exp.cycles if unit not in ("issue", "regs")}
        fma, _ = common.fma_cost(m, total)
        rescale, _ = common.fma_cost(m, v.tile_m * w.head_dim_v)
        return [
            self.load("load_k", w.head_dim_qk),
            self.load("load_v", w.head_dim_v),
            self.op("page", "page", _LOOKUP if self.page else 0.0, _LOOKUP * (lookups - 1.0) + _LOOP + copies,
                    far + m.get("sync.wait_done_cycles", 0.0) + self.exchange(), {}),
            self.product("qk", "qk", v.tile_n, w.head_dim_qk, 0.0, 0.0),
            self.op("max", "row max", (2 + _MASK) * self.scores + _REDUCTION, 0.0, self.reduction(),
                    {"alu": (1 + _MASK) * total / m["alu.lanes"], "fma": fma}),
            self.op("exp", "exp", 2.5 * self.scores, 0.0, common.ramp_latency(m), units),
            self.op("sum", "row sum", self.scores + _REDUCTION, 0.0, self.reduction(), {"fma": fma}),
            self.op("rescale", "rescale", self.sums, 0.0, m["fma.latency_cycles"], {"fma": rescale}),
            # P through shared memory, and the barrier behind which its place is free again.
            self.product("pv", "pv", w.head_dim_v, v.tile_n, 0.0, 2 * self.exchange()),
        ]  # fmt: skip

    def edges(self) -> list[Edge]:
        s, blocks, landed = self.s, max(1, self.v.kv_stages - 1), self.m["hbm.latency_cycles"]
        return [
            Edge(f"load_k{s}", f"qk{s}", 0, landed, "data", "K block"),
            Edge(f"load_v{s}", f"pv{s}", 0, landed, "data", "V block"),
            Edge(f"exp{s}", f"load_k{s}", blocks, 0.0, "buffer", "K slot"),
            Edge(f"pv{s}", f"load_v{s}", blocks, 0.0, "buffer", "V slot"),
        ]

    def roles(self) -> tuple[Role, Role]:
        computes = ("page", "qk", "max", "exp", "sum", "rescale", "pv")
        program = tuple(Step(f"{name}{self.s}") for name in computes)
        copies = (Step(f"load_k{self.s}"), Step(f"load_v{self.s}"))
        return Role(f"copies{self.s}", copies, 0), Role(f"warps{self.s}", program, self.v.warps)
