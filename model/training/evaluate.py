"""A backward pass on one machine: its launches one after the other, at the clock the power limit allows all of them together."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from tilecast.model.backward import BackwardVariant, build_backward, family_of
from tilecast.model.chip.evaluate import PredictError, check_clock, refuse_unknown, settled_clock
from tilecast.model.chip.power import Activity, Clock, busy_share
from tilecast.model.compiled.roles.loop_code import LoopCode
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.pipeline.backward.kernels import BackwardPass, LoopKernel, RowKernel
from tilecast.model.training.launch import LoopRun, row_seconds, run_loop

#: FLOP of a backward pass as the papers count them, for each FLOP of its forward pass: five products against two.
FLOP_RATIO = 2.5


@dataclass(frozen=True, slots=True)
class LaunchRun:
    """One launch: its seconds, of them those in which the memory sets the pace, and those of launching."""

    kernel: LoopKernel | RowKernel
    seconds: float
    memory_seconds: float
    launch_seconds: float
    #: Of a kernel with matrix products; None of one that passes over rows.
    loop: LoopRun | None
    #: Cycles of it on SMs that the launch before leaves idle.
    hidden_cycles: float = 0.0

    @property
    def hbm_bytes(self) -> float:
        """Bytes from and to memory."""
        if self.loop is not None:
            return self.loop.chip.hbm_bytes
        assert isinstance(self.kernel, RowKernel)
        return self.kernel.read_bytes + self.kernel.write_bytes


@dataclass(frozen=True, slots=True)
class BackwardRun:
    """What one evaluation yields before it is explained."""

    seconds: float
    tflops: float
    clock: Clock
    launches: tuple[LaunchRun, ...]

    @property
    def main(self) -> LaunchRun:
        """The launch that takes longest of those with matrix products."""
        return max((one for one in self.launches if one.loop is not None), key=lambda one: one.seconds)

    @property
    def hbm_bytes(self) -> float:
        """Bytes from and to memory, all launches together."""
        return sum(one.hbm_bytes for one in self.launches)


def backward_flops(workload: Workload) -> float:
    """FLOP as papers count a backward pass, whatever is computed again."""
    return FLOP_RATIO * workload.flops


@lru_cache(maxsize=1 << 13)
def evaluate_backward(
    workload: Workload, machine: Machine, variant: BackwardVariant, clock: str | float,
    codes: tuple[tuple[str, LoopCode], ...] = (),
) -> BackwardRun:  # fmt: skip
    """Forecast of a legal ``variant``; loops that ``codes`` names are timed by their machine code."""
    workload = workload.heads_as_rows()  # as the operator has its kernels see it
    made = build_backward(workload, variant, machine)
    compiled = dict(codes)
    loops = {k.name: run_loop(k, workload, machine, compiled.get(k.name)) for k in made.loops}
    rows = {k.name: row_seconds(k, machine) for k in made.launches if isinstance(k, RowKernel)}
    passed, hidden = sum(rows.values()), _hidden(made, loops)

    def seconds_at(ghz: float) -> float:
        return passed + sum(
            max((run.cycles() - hidden[name]) / (ghz * 1e9), run.memory_seconds(ghz)) for name, run in loops.items()
        )

    settled = settled_clock(machine, _activity(workload, made, loops), seconds_at, clock)
    first, next_ = (machine["launch.kernel_us"] * 1e-6, machine.get("launch.graph_kernel_us", machine["launch.kernel_us"]) * 1e-6)  # fmt: skip
    launches = []
    for place, kernel in enumerate(made.launches):
        launch = (0.0 if kernel.beside else next_) if place else first
        run = loops.get(kernel.name)
        if run is None:
            launches.append(LaunchRun(kernel, rows[kernel.name] + launch, rows[kernel.name], launch, None))
            continue
        under = hidden[kernel.name]
        on_sms, memory = (run.cycles() - under) / (settled.mhz * 1e6), run.memory_seconds(settled.mhz / 1e3)
        launches.append(
            LaunchRun(kernel, max(on_sms, memory) + launch, memory if memory > on_sms else 0.0, launch, run, under)
        )
    seconds = sum(one.seconds for one in launches)
    return BackwardRun(seconds, backward_flops(workload) / seconds / 1e12, settled, tuple(launches))


def _hidden(made: BackwardPass, loops: dict[str, LoopRun]) -> dict[str, float]:
    """Cycles of each kernel with matrix products that pass while SMs have nothing of the launch before, beside which it begins."""
    hidden, idle = {}, 0.0
    for kernel in made.loops:
        run = loops[kernel.name]
        hidden[kernel.name] = min(idle, run.cycles()) if kernel.beside else 0.0
        idle = run.chip.makespan_cycles - run.chip.mean_cycles
    return hidden


def _activity(workload: Workload, made: BackwardPass, loops: dict[str, LoopRun]) -> Activity:
    """Executed work of all launches; blocks cut by a mask cost like whole ones."""
    flop = l2 = hbm = 0.0
    units: dict[str, float] = {}
    for kernel in made.launches:
        if isinstance(kernel, RowKernel):
            hbm += kernel.read_bytes + kernel.write_bytes
            l2 += kernel.read_bytes + kernel.write_bytes
            continue
        run, p = loops[kernel.name], kernel.pipeline
        steps = run.chip.iterations
        flop += kernel.flop_per_score * p.rows_per_cta * p.cta_group * p.keys_per_iteration * steps
        l2, hbm = l2 + run.chip.l2_bytes, hbm + run.chip.hbm_bytes
        for unit, cycles in p.demand().items():
            units[unit] = units.get(unit, 0.0) + cycles * steps / p.ctas_per_sm * p.cta_group
    # Of several launches by how long each takes.
    chips = [run.chip for run in loops.values()]
    each = [float(busy_share(c.mean_cycles, c.makespan_cycles, c.tiles, c.slots)) for c in chips]
    whole = sum(c.makespan_cycles for c in chips)
    busy = sum(share * c.makespan_cycles for share, c in zip(each, chips, strict=True)) / whole
    return Activity(flop, workload.dtype, tuple(units.items()), l2, hbm, busy)


def refuse(workload: Workload, machine: Machine, variant: BackwardVariant, clock: str | float) -> None:
    """PredictError for what cannot run: a clock, a dtype, tensors beyond the memory, an illegal variant."""
    check_clock(clock, machine)
    refuse_unknown(workload, machine)
    if workload.dtype not in ("bf16", "fp16"):
        raise PredictError(f"backward passes are forecast for bf16 and fp16, got dtype '{workload.dtype}'")
    verdict = family_of(variant).legality(variant, workload, machine)
    if not verdict.legal:
        raise PredictError(f"{variant.family} cannot run the backward pass of {workload.label()} on {machine.name}: {verdict.sentence()}")  # fmt: skip
