"""The loops that decode by mma.sync on Hopper, each warp for itself: from e4m3 caches (`hopper_serving_e4m3`), whose bytes become 16 bits in
registers, and from 16-bit ones (`hopper_serving_runs`); in runs of splits from either.

A warp has a quarter of a block's keys and a softmax of its own for them: nothing goes between warps until the last block is done.  It reads
from shared memory, widens bytes and multiplies; alone on its sub-partition, it waits for its own instructions, also where the next block's
scores are made under this one's softmax, which took as long on an H200 (data/measured/h200_decode_pace.csv).  Counts
are those of the machine code of Triton 3.6 for sm_90a (`tilecast inspect kernels/generated/hopper_serve_d128_e4m3.py --arch sm_90a`: 913
instructions, of which 432 are for blocks at an edge of the mask or the end of the keys).
"""

from __future__ import annotations

from dataclasses import dataclass

from tilecast.model.kernel.variants.hopper.serving import (
    PARTS_COLUMNS,
    PIECE,
    ROWS_E4M3,
    ROWS_HELD,
    HopperRunsVariant,
    HopperServingE4m3Variant,
)
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.pipeline import softmax_cost as common
from tilecast.model.pipeline.graph import Buffer, Edge, Op, Pipeline, Role, Step
from tilecast.model.pipeline.serving.portable import MMA_LATENCY
from tilecast.model.pipeline.tensor_core import mma_sync_tile_cycles

WARPS = 4
_LANES = 32
#: Bytes that a thread reads at a time.
_READ_BYTES = 16
#: Instructions that make two bytes two numbers of 16 bits, and those that first bring two keys' bytes of V side by side.
_WIDEN, _PLACE = 1.0, 1.0
#: Of a block and warp: reductions over the four lanes of a row and two rows a thread; waits, addresses, the ring, two barriers of the four warps.
_REDUCTION, _LOOP, _BARRIERS = 12, 45, 2


@dataclass(frozen=True, slots=True)
class _Warps:
    """Operations of the four warps that multiply, each for a quarter of a block's keys, and of the warp that copies."""

    work: Workload
    machine: Machine
    narrow: bool

    def op(self, name: str, kind: str, waiting: float, free: float, latency: float, demand: dict[str, float]) -> Op:
        """``waiting`` instructions of a warp, each after the one before, and ``free`` others."""
        m, count = self.machine, waiting + free
        units = {"issue": count * WARPS / m["issue.warp_inst_per_clk"], **{u: c for u, c in demand.items() if c > 0}}
        alone = max(waiting * m["alu.latency_cycles"] + free + latency, *units.values())
        return Op(name, kind, "warps", tuple(units.items()), alone, tile=0, instructions=(("other", count),))

    def fetch(self, name: str, keys: int, width: int, placed: float) -> Op:
        """A warp's keys of K or V from shared memory to registers: bytes are widened, with ``placed`` instructions for two before that."""
        return self._widen(name, keys * width, placed) if self.narrow else self._read(name, keys * width)

    def _widen(self, name: str, size: int, placed: float) -> Op:
        m = self.machine
        reads, pairs = size / (_READ_BYTES * _LANES), size / 2 / _LANES
        converted = pairs * _WIDEN * WARPS * _LANES / m["cvt.f32x2_to_fp8x2_per_clk"]
        return self.op(
            name, "convert", 0.0, reads + pairs * (_WIDEN + placed), m["smem.latency_cycles"] + m["alu.latency_cycles"],
            {"smem": WARPS * size / m["smem.bytes_per_clk"], "cvt": converted, "alu": pairs * placed * WARPS * _LANES / m["alu.lanes"]},
        )  # fmt: skip

    def _read(self, name: str, elements: int) -> Op:
        """By ldmatrix."""
        m, size = self.machine, elements * self.work.dtype_bytes
        return self.op(
            name, "convert", 0.0, size / (_READ_BYTES * _LANES), m["smem.latency_cycles"] + m["alu.latency_cycles"],
            {"smem": WARPS * size / m["smem.bytes_per_clk"]},
        )  # fmt: skip

    def product(self, name: str, n: int, k: int, chain: float) -> Op:
        """Every warp's product of its rows with ``n`` columns over ``k``, ``chain`` of them each after the one before."""
        tensor = WARPS * mma_sync_tile_cycles(self.machine, ROWS_E4M3, n, k, self.work.dtype)
        return self.op(name, name, 0.0, k / 16 * n / 8, chain * MMA_LATENCY, {"tensor": tensor})

    def load(self, name: str, keys: int, width: int) -> Op:
        """A block's keys of K or V to shared memory, by the copy engine."""
        m = self.machine
        busy = common.load_cycles(m, keys * width * (1 if self.narrow else self.work.dtype_bytes))
        return Op(name, "load", "load", (("tma", busy),), busy, engine="tma", issue_cycles=m["tma.issue_cycles"], instructions=(("other", 2.0),))  # fmt: skip


def _operations(
    workload: Workload, variant: HopperServingE4m3Variant | HopperRunsVariant, machine: Machine
) -> tuple[Op, ...]:
    """Those of an iteration: a block of ``tile_n`` keys."""
    w, m, narrow, block = workload, machine, variant.narrow, variant.tile_n
    warps, keys = _Warps(w, m, narrow), block // WARPS
    # Of 16-bit caches the softmax is that of half a tile's rows where no sequence has more.
    rows = ROWS_HELD if not narrow and w.seqlen_q * w.group_size <= ROWS_HELD else ROWS_E4M3
    scores, sums = rows * keys / _LANES, rows * w.head_dim_v / _LANES
    total = float(rows * block)
    barrier = common.barrier_cycles(m) + m.get("sync.barrier_spread_cycles", 0.0)
    quad = 2 * (m["shuffle.latency_cycles"] + m["alu.latency_cycles"])
    exp = {unit: c for unit, c in common.exp_work(m, w, total, 0.0, 3).cycles if unit not in ("issue", "regs")}
    fma, _ = common.fma_cost(m, total)
    rescale, _ = common.fma_cost(m, float(WARPS * rows * w.head_dim_v))
    op, chain = warps.op, (w.head_dim_qk if narrow or w.head_dim_qk > PARTS_COLUMNS else PIECE) / 16
    return (
        warps.load("load_k", block, w.head_dim_qk),
        warps.load("load_v", block, w.head_dim_v),
        warps.fetch("widen_k", keys, w.head_dim_qk, 0.0),
        warps.product("qk", keys, w.head_dim_qk, chain),
        op("max", "row max", _REDUCTION, scores, quad, {"alu": total / m["alu.lanes"], "fma": fma}),
        op("exp", "exp", 0.0, 2.5 * scores, common.ramp_latency(m), exp),
        op("sum", "row sum", 0.0, scores, 0.0, {"fma": fma}),
        op("rescale", "rescale", 0.0, sums, m["fma.latency_cycles"], {"fma": rescale}),
        op("give_back", "barrier", 0.0, _LOOP, _BARRIERS * barrier + m.get("sync.wait_done_cycles", 0.0), {}),
        warps.fetch("widen_v", keys, w.head_dim_v, _PLACE),
        warps.product("pv", w.head_dim_v, keys, keys / 16),
    )


def build(
    workload: Workload, variant: HopperServingE4m3Variant | HopperRunsVariant, machine: Machine, shared_bytes: int, programs: int = 1
) -> Pipeline:  # fmt: skip
    """The loop of ``programs`` programs on an SM, each with a tile of 16 rows and ``shared_bytes`` of shared memory for its tiles."""
    m = machine
    landed, stages = m["tma.latency_hbm_cycles"], variant.kv_stages
    edges = (
        Edge("load_k", "widen_k", 0, landed, "data", "K block"),
        Edge("load_v", "widen_k", 0, landed, "data", "V block"),
        Edge("give_back", "load_k", stages, m["sync.mbarrier_roundtrip_cycles"], "buffer", "K slot"),
        Edge("give_back", "load_v", stages, m["sync.mbarrier_roundtrip_cycles"], "buffer", "V slot"),
    )
    program = ("widen_k", "qk", "max", "exp", "rescale", "sum", "give_back", "widen_v", "pv")
    return Pipeline(
        name=f"serving {'e4m3' if variant.narrow else 'runs'} on Hopper {ROWS_E4M3}x{variant.tile_n}",
        machine=m.name,
        ops=_operations(workload, variant, machine),
        edges=edges,
        roles=(
            Role("load", (Step("load_k"), Step("load_v")), 1, 104),
            Role("warps", tuple(Step(name) for name in program), WARPS, 232),
        ),
        buffers=(Buffer("tiles", "smem", shared_bytes * programs, 1, "load_k", "widen_k"),),
        rows_per_cta=ROWS_E4M3,
        keys_per_iteration=variant.tile_n,
        ctas_per_sm=programs,
        prologue_cycles=m["launch.cta_start_cycles"],
        epilogue_cycles=m["l2.latency_cycles"],
        tiles_overlap=False,
    )
