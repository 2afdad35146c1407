"""One GEMM launch on one machine: cycles of its busiest SM, the memory's time, the clock the power limit allows.

The memory is the chip's.  SMs run in step: all copy at once and all wait at once, so that each has its share of the
bandwidth and no more, at the latency of a memory under load.  If SMs that wait left their share to others, a launch would take the
longer of the SMs' own time and the memory's: that is the other end of what may be seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from tilecast.model.chip.evaluate import PredictError, check_clock, settled_clock
from tilecast.model.chip.power import Activity, Clock
from tilecast.model.compiled.units.fetch import far_cycles
from tilecast.model.gemm.code import CodeCycles
from tilecast.model.gemm.families import consumer_warps, legality
from tilecast.model.gemm.pipeline.build import MOST_STEPS, GemmPipeline, build
from tilecast.model.gemm.traffic import l2_rates, memory_bytes, merge_seconds, part_of
from tilecast.model.gemm.variant import GemmVariant
from tilecast.model.gemm.workload import Gemm
from tilecast.model.machine.machine import Machine
from tilecast.model.pipeline.graph import Pipeline
from tilecast.model.sm.simulate import SmTrace, simulate, steady_state

#: Instructions of a first tile's k-step, of the warp that copies A and B and of a warpgroup up to its epilogue: machine code of the
#: measured kernels has 103 to 146 and 88 to 126 (gemm_code.txt); and of all warps up to the first copy where that is ordered before the roles start
#: (machine code of gemm_hopper_turns).
_COPY_INSTRUCTIONS, _PRODUCT_INSTRUCTIONS, _EARLY_INSTRUCTIONS = 127, 105, 115
#: k-steps between the two loops whose difference is the pace of a k-step.
_PACE_STEPS = MOST_STEPS // 4


@dataclass(frozen=True, slots=True)
class Stream:
    """Tiles in a row on one SM: the loop, how it ran, and what k-steps beyond those simulated add to a tile."""

    loop: GemmPipeline
    trace: SmTrace
    extra_cycles: float

    @property
    def tile_cycles(self) -> float:
        """Cycles a tile takes in the steady state."""
        return self.trace.ii_cycles / self.loop.tiles + self.extra_cycles

    def end(self, tiles: float) -> float:
        """Cycles from the first copy to the end of tile number ``tiles`` (at least 1; between whole numbers the line)."""
        whole = max(1, int(tiles))
        end = self._end(whole) + whole * self.extra_cycles
        rest = max(0.0, tiles - whole)
        return end + rest * (self._end(whole + 1) + (whole + 1) * self.extra_cycles - end) if rest else end

    def _end(self, tiles: int) -> float:
        lap, place = divmod(tiles - 1, self.loop.tiles)
        trace = self._trace(lap + 1)
        if place == self.loop.tiles - 1:
            return trace.tile_cycles(lap + 1)
        # Part of an iteration: the last operation of the tiles that it has.
        known = min(lap, len(trace.iteration_end) - 1)
        ends = [end for op, end in trace.block_ends(known).items() if self._tile(op) <= place]
        return max(ends) + (lap - known) * trace.ii_cycles

    def _trace(self, laps: int) -> SmTrace:
        """The stream of so many iterations: one that is over before the loop repeats copies no C of tiles that it does not have."""
        return self.trace if laps >= len(self.trace.iteration_end) else _short(self.loop.pipeline, laps)

    def _tile(self, op: str) -> int:
        return self.loop.pipeline.op(op).tile


@lru_cache(maxsize=1 << 10)
def _short(pipeline: Pipeline, laps: int) -> SmTrace:
    return simulate(pipeline, laps)


@dataclass(frozen=True, slots=True)
class GemmRun:
    """What one evaluation yields before it is explained."""

    #: All SMs in step: each has its share of the memory's bandwidth, used or not.
    seconds: float
    #: The SMs apart from each other: what one leaves of the memory's bandwidth others use.
    apart_seconds: float
    tflops: float
    clock: Clock
    #: The loop by the SM's own pace, and with its share of the memory's bandwidth.
    own: Stream
    in_step: Stream
    #: Cycles of a CTA before its first copy, and of the busiest SM from start to end by its own pace.
    start_cycles: float
    own_cycles: float
    launch_seconds: float
    hbm_seconds: float
    #: The second launch, which adds up sums of parts of k (0 where k is in one).
    merge_seconds: float

    @property
    def gbps(self) -> float:
        """Memory traffic of the launch that multiplies over the whole time, in GB/s."""
        return self.own.loop.tiling.hbm_bytes / self.seconds / 1e9


def stream(gemm: Gemm, variant: GemmVariant, machine: Machine, mhz: float, memory: bool = True, code: CodeCycles | None = None, memory_busy: float = 0.5) -> Stream:  # fmt: skip
    """The stream of tiles at an SM clock of ``mhz``."""
    loop = build(gemm, variant, machine, mhz, memory=memory, code=code, memory_busy=memory_busy)
    trace = steady_state(loop.pipeline)
    extra = 0.0
    if loop.steps_left:
        shorter = build(
            gemm, variant, machine, mhz, memory=memory, most_steps=MOST_STEPS - _PACE_STEPS, code=code, memory_busy=memory_busy,
        )  # fmt: skip
        pace = (trace.ii_cycles - steady_state(shorter.pipeline).ii_cycles) / loop.tiles / _PACE_STEPS
        extra = pace * loop.steps_left
    return Stream(loop, trace, extra)


@lru_cache(maxsize=1 << 12)
def evaluate_gemm(gemm: Gemm, variant: GemmVariant, machine: Machine, clock: str | float, code: CodeCycles | None = None) -> GemmRun:  # fmt: skip
    """Forecast of a legal ``variant``; with ``code`` from what its machine code takes."""
    whole, gemm = gemm, part_of(gemm, variant)
    own = stream(gemm, variant, machine, machine["chip.clock_max_mhz"], False, code)
    tiling = own.loop.tiling
    first = machine["tma.latency_hbm_cycles"] - machine["tma.latency_l2_cycles"]
    start = max(0.0, first) + _first_time_cycles(own.loop.pipeline, variant, machine, code)
    own_cycles = start + own.end(tiling.most)
    hbm = sum(memory_bytes(gemm, variant, tiling)) / (machine["hbm.tbps_achieved"] * 1e12)

    def seconds_at(ghz: float) -> float:
        return max(own_cycles / (ghz * 1e9), start / (ghz * 1e9) + hbm)

    activity = _activity(gemm, machine, variant, own.loop)
    # An SM without a last tile leaves its share to the others, in step or not: the mean SM counts.
    mean = max(1.0, tiling.tiles / (tiling.slots / own.loop.pipeline.ctas_per_sm))
    # SMs that wait for the memory draw less power, which lets them run faster: the clock follows from the time in step.
    faster = settled_clock(machine, activity, seconds_at, clock)
    # How long a copy takes goes by how busy the memory is, and that by how long the launch takes.
    busy = hbm / max(hbm, seconds_at(faster.mhz / 1e3))
    waits = start + stream(gemm, variant, machine, faster.mhz, code=code, memory_busy=busy).end(mean)
    busy = hbm / max(hbm, waits / (faster.mhz * 1e6))
    settled = settled_clock(machine, activity, lambda ghz: max(seconds_at(ghz), waits / (ghz * 1e9)), clock)
    shared = stream(gemm, variant, machine, settled.mhz, code=code, memory_busy=busy)
    launch, merge = machine["launch.kernel_us"] * 1e-6, merge_seconds(whole, variant, machine)
    apart = seconds_at(settled.mhz / 1e3) + launch + merge
    seconds = max(apart, (start + shared.end(mean)) / (settled.mhz * 1e6) + launch + merge)
    return GemmRun(
        seconds, apart, whole.flops / seconds / 1e12, settled, own, shared, start, own_cycles, launch, hbm, merge
    )


def _first_time_cycles(loop: Pipeline, v: GemmVariant, machine: Machine, code: CodeCycles | None) -> float:
    """What a launch takes before its first copy, and its first tile longer than the others: its code and the maps of its tensors are in no cache yet.

    The warp that copies comes to its first copy, and a warpgroup through its epilogue, as fast as code is fetched from far: half as
    fast where two warpgroups end a tile together, each with code of its own.  The maps of A and B are waited for before the first copy,
    that of D before the first store.  Where the first copies are early the roles are set up while these are on their way.
    """
    fetch = far_cycles(machine)
    halves = {op.role for op in loop.ops if op.kind == "epilogue" and op.tile == 0}
    epilogue = [op for op in loop.ops if op.kind == "epilogue" and op.role == min(halves)]
    # Operations count those of four warps; eight that are one role have half of them each.
    each = consumer_warps(v) // 4
    counted = _PRODUCT_INSTRUCTIONS + sum(count for op in epilogue for _, count in op.instructions) / each
    products, copies = (code.product_instructions, code.copy_instructions) if code else (counted, _COPY_INSTRUCTIONS)
    late = max(0.0, len(halves) * products * fetch - sum(op.min_cycles for op in epilogue))
    begin = loop.prologue_cycles + copies * fetch
    if v.family == "gemm_hopper" and v.early and not v.in_step:
        begin = machine["launch.cta_start_cycles"] + _EARLY_INSTRUCTIONS * fetch
    return begin + late + 2.0 * machine["tma.latency_hbm_cycles"]


def _activity(gemm: Gemm, machine: Machine, variant: GemmVariant, loop: GemmPipeline) -> Activity:
    tiling, p = loop.tiling, loop.pipeline
    # An iteration's demand is one SM's; both SMs of a pair do it.
    iterations = tiling.tiles / loop.tiles * p.cta_group
    longer = tiling.steps / (tiling.steps - loop.steps_left)
    units = tuple((unit, cycles * iterations * (longer if unit in ("tensor", "smem") else 1.0)) for unit, cycles in p.demand().items())  # fmt: skip
    flop = executed_flop(gemm, loop)
    # What L2 gives to several SMs at a time it reads once.
    rates = l2_rates(variant, machine, machine["chip.clock_max_mhz"], tiling.rows, tiling.tiles)
    inputs = tiling.l2_bytes - tiling.hbm_c_bytes - tiling.hbm_d_bytes
    l2 = inputs * rates.reads / rates.inputs + tiling.hbm_c_bytes + tiling.hbm_d_bytes
    return Activity(flop, gemm.dtype, units, l2, tiling.hbm_bytes)


def executed_flop(gemm: Gemm, loop: GemmPipeline) -> float:
    """FLOP of whole tiles: what the matrix unit does, beyond the tensors' edges too; k in whole instructions of 32 bytes."""
    per = 32 // gemm.dtype_bytes
    depth = -(-gemm.k // per) * per
    rows = loop.pipeline.rows_per_cta * loop.pipeline.cta_group
    return 2.0 * loop.tiling.tiles * rows * loop.pipeline.keys_per_iteration * depth


def refuse(gemm: Gemm, machine: Machine, variant: GemmVariant, clock: str | float) -> None:
    """PredictError for what cannot run: a clock, a dtype, tensors beyond the memory, an illegal variant."""
    check_clock(clock, machine)
    room = machine.get("hbm.capacity_gb", 0.0) * 1e9
    if room and gemm.tensor_bytes > room:
        raise PredictError(
            f"A, B, C and D take {gemm.tensor_bytes / 1e9:.4g} GB, the memory of {machine.name} holds {room / 1e9:g} GB: "
            "use a smaller m or n"
        )
    verdict = legality(variant, part_of(gemm, variant), machine)
    if not verdict.legal:
        raise PredictError(f"{variant.family} cannot run {gemm.label()} on {machine.name}: {verdict.sentence()}")
