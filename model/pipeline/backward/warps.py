"""What warpgroups of a Hopper backward wait for and move beside their products: barriers, shared memory, copies."""

from __future__ import annotations

from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.pipeline import softmax_cost as common
from tilecast.model.pipeline.graph import Op
from tilecast.model.pipeline.hopper.order import ROWS
from tilecast.model.pipeline.tensor_core import mma_completion_latency_cycles

#: Warps of a warpgroup, and warp instructions that read LSE or D of 64 queries: 16 numbers a thread, two at a time.
WARPS, TERM_LOADS = 4, 8


def term_port_bytes() -> float:
    """What `TERM_LOADS` of all warps take of the port: a wavefront each, as all eight rows of lanes read the same numbers.

    Counters say two (docs/notes/forecast-accuracy.md); with two this level is 6.6 % off in place of 3.9: what it charges beside makes up for it.
    """
    return 128.0 * TERM_LOADS * WARPS


class Warpgroups:
    """Values and operations that the loops of a Hopper backward have in common."""

    def __init__(self, w: Workload, m: Machine) -> None:
        self.w, self.m = w, m
        #: Cycles from an arrival at a barrier in shared memory until who waits goes on, of a barrier of a warpgroup, of looking at
        #: one that is complete, and of an arrival, which a barrier of the warpgroup goes before.
        self.arrive = m["sync.mbarrier_roundtrip_cycles"]
        self.barrier = m.get("sync.barrier_cycles", 0.0) + m.get("sync.barrier_spread_cycles", 0.0) / 2
        self.poll = m.get("sync.wait_done_cycles", 0.0)
        self.signal = self.barrier + m.get("sync.arrive_cycles", 0.0)
        self.landed = m["tma.latency_l2_cycles"]

    def done(self, a_home: str) -> float:
        """Cycles from the end of a product to its result."""
        return mma_completion_latency_cycles(self.m, ROWS, ROWS, self.w.dtype, a_home, 1)

    def hold(self, name: str, role: str, cycles: float, tile: int = -1) -> Op:
        """What holds a role and computes nothing."""
        return Op(name, "barrier", role, (), cycles, tile=tile)

    def shared(
        self, name: str, kind: str, role: str, tile: int, bytes_: float, instructions: float, *, loads: bool
    ) -> Op:
        """A warpgroup's loads from shared memory, or stores into it, ``instructions`` a warp; they come slowly beside products."""
        m = self.m
        port = bytes_ / m["smem.bytes_per_clk"]
        latency = m["smem.latency_cycles"] if loads else 0.0
        rate = m.get("smem.store_bytes_per_clk_under_mma", 0.0)
        beside = instructions * m.get("mma_load.shared_cycles", 0.0) if loads else bytes_ / rate if rate else 0.0
        alone = max(port, instructions) + latency
        return Op(
            name, kind, role, (("smem", port), ("issue", instructions)), alone, tile=tile,
            instructions=(("other", instructions),), beside_mma_cycles=beside + latency if beside + latency > alone else 0.0,
        )  # fmt: skip

    def copy(self, name: str, role: str, bytes_: float) -> Op:
        """A copy into shared memory."""
        m = self.m
        busy, port = common.load_cycles(m, bytes_), bytes_ / m["smem.bytes_per_clk"]
        return Op(
            name, "load", role, (("tma", busy), ("smem", port)), max(busy, port), engine="tma",
            issue_cycles=m["tma.issue_cycles"], instructions=(("other", 2.0),),
        )  # fmt: skip

    def start(self, barriers: int) -> float:
        """A CTA from its start to its first copy."""
        m = self.m
        begin = m["launch.cta_start_cycles"] + m.get("launch.cta_setup_cycles", 0.0)
        return begin + barriers * m.get("launch.barrier_setup_cycles", 0.0)

    def leave(self, elements: int) -> float:
        """A sum of ``elements`` by way of shared memory into L2."""
        m = self.m
        return elements * self.w.dtype_bytes / m["smem.bytes_per_clk"] + m["l2.latency_cycles"]
