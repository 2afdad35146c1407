"""What a forecast says: the values that text, JSON, traces and reports read.  No rendering."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from tilecast.model.chip.launch import ChipRun
from tilecast.model.chip.power import Clock
from tilecast.model.forecast.binding import Binding
from tilecast.model.forecast.checked_range import BEFORE as BEFORE
from tilecast.model.forecast.checked_range import COMPILED as COMPILED
from tilecast.model.forecast.checked_range import ModelError
from tilecast.model.forecast.interval import FactEffect
from tilecast.model.kernel.variant import Variant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.pipeline.graph import Pipeline
from tilecast.model.sm.bounds import Bounds
from tilecast.model.sm.simulate import CriticalStep, SmTrace

if TYPE_CHECKING:
    from tilecast.model.compiled.evaluate import CompiledVariant


@dataclass(frozen=True, slots=True)
class WaterfallStep:
    """One cause between peak and achieved: cycles per SM at the predicted clock, and its share of the time."""

    cause: str
    cycles: float
    share: float


@dataclass(frozen=True, slots=True)
class KernelAnswer:
    """A launch with matrix products, explained: a forward pass has one, a backward pass up to three."""

    name: str
    time_ms: float
    #: What its time sits on, and the lower bounds of its loop.
    binding: Binding
    bounds: Bounds
    trace: SmTrace
    critical: tuple[CriticalStep, ...]
    chip: ChipRun

    @property
    def pipeline(self) -> Pipeline:
        """Its loop."""
        return self.trace.pipeline


class Explained(Protocol):
    """What the forecast of any pass says, forward or backward: what reports, timelines and traces read."""

    @property
    def workload(self) -> Workload:
        """The problem."""

    @property
    def machine(self) -> Machine:
        """The GPU, with what was changed in it."""

    @property
    def variant(self) -> Any:
        """The kernel that the forecast is for."""

    @property
    def variant_origin(self) -> str:
        """How it was found: "as given", or what was searched."""

    @property
    def subject(self) -> str:
        """What was forecast, in words."""

    @property
    def regime(self) -> str:
        """ "sustained", "short", or a locked clock."""

    @property
    def time_ms(self) -> float:
        """Of the whole pass."""

    @property
    def tflops(self) -> float:
        """10^12 FLOP a second, as papers count a pass."""

    @property
    def tflops_interval(self) -> tuple[float, float]:
        """Least and most over the ranges of the machine's facts."""

    @property
    def clock(self) -> Clock:
        """What the SMs run at, and what holds it there."""

    @property
    def other_regimes(self) -> tuple[tuple[str, float, float, float], ...]:
        """(regime, time in ms, TFLOP/s, clock in MHz) of the others."""

    @property
    def waterfall(self) -> tuple[WaterfallStep, ...]:
        """From peak to achieved; the steps add up to the time."""

    @property
    def fact_effects(self) -> tuple[FactEffect, ...]:
        """What each fact with a range does to the forecast, the widest first."""

    @property
    def outside_calibrated_range(self) -> tuple[str, ...]:
        """What no measured kernel has, in words; empty where there is nothing."""

    @property
    def kernels(self) -> tuple[KernelAnswer, ...]:
        """All launches of the pass, in their order."""

    @property
    def main(self) -> KernelAnswer:
        """The launch that takes longest."""

    @property
    def flops(self) -> float:
        """FLOP of the pass, as papers count them."""

    @property
    def hbm_bytes(self) -> float:
        """From and to memory."""

    @property
    def compiled(self) -> MachineCodeLevel | None:
        """What a forecast from machine code stands on; None before compilation."""

    @property
    def level(self) -> str:
        """What the forecast was made from: `BEFORE` or `COMPILED`."""


@dataclass(frozen=True, slots=True)
class MachineCodeLevel:
    """What a forecast from machine code stands on, and the same forecast before compilation."""

    made: CompiledVariant
    #: Time in ms, TFLOP/s and clock in MHz before compilation; cycles per iteration of its loop.
    before_ms: float
    before_tflops: float
    before_mhz: float
    before_ii_cycles: float
    #: The variant that the search before compilation chose, and its time in ms then; None for a variant that was given.
    fluid: tuple[Variant, float] | None = None


@dataclass(frozen=True, slots=True)
class Forecast:
    """The answer for one workload, machine and variant; see docs/model.md for every field."""

    workload: Workload
    machine: Machine
    variant: Variant
    #: How the variant was found: "as given", or what was searched.
    variant_origin: str
    pipeline: Pipeline
    regime: str
    time_ms: float
    tflops: float
    tflops_interval: tuple[float, float]
    clock: Clock
    #: (time in ms, TFLOP/s, clock in MHz) of the other regimes.
    other_regimes: tuple[tuple[str, float, float, float], ...]
    trace: SmTrace
    bounds: Bounds
    #: What the time sits on.
    binding: Binding
    critical: tuple[CriticalStep, ...]
    chip: ChipRun
    waterfall: tuple[WaterfallStep, ...]
    #: What each fact with a range does to the forecast, the widest first; empty where no interval was asked for.
    fact_effects: tuple[FactEffect, ...]
    #: How far forecasts like this one were off (`checked_range.model_error`).
    model_error: ModelError
    #: What these kernels leave out that a kernel made for such a shape has.
    notes: tuple[str, ...]
    outside_calibrated_range: tuple[str, ...]
    #: Of a forecast from machine code; None before compilation.
    compiled: MachineCodeLevel | None = None

    @property
    def level(self) -> str:
        """What the forecast was made from: `BEFORE` or `COMPILED`."""
        return BEFORE if self.compiled is None else COMPILED

    @property
    def subject(self) -> str:
        """What was forecast, in words."""
        return self.workload.label()

    @property
    def flops(self) -> float:
        """FLOP of the pass, as papers count them."""
        return self.workload.flops

    @property
    def hbm_bytes(self) -> float:
        """Bytes from and to memory."""
        return self.chip.hbm_bytes

    @property
    def main(self) -> KernelAnswer:
        """Its kernel."""
        return KernelAnswer("kernel", self.time_ms, self.binding, self.bounds, self.trace, self.critical, self.chip)

    @property
    def kernels(self) -> tuple[KernelAnswer, ...]:
        """Its one kernel; of the unfused class the first of three."""
        return (self.main,)

    @property
    def assumed_facts(self) -> tuple[str, ...]:
        """Facts, inferred or assumed, whose range moves the forecast: the widest effect first."""
        facts = [(effect.fact, self.machine.fact(effect.fact)) for effect in self.fact_effects]
        return tuple(f"{n} = {f.value:g} {f.unit} ({f.kind})" for n, f in facts if f.kind in ("assumed", "inferred"))

    @property
    def ii_cycles(self) -> float:
        """Cycles per loop iteration in steady state."""
        return self.trace.ii_cycles

    @property
    def clock_mhz(self) -> float:
        """SM clock the time was computed with (effective: cycles per second)."""
        return self.clock.mhz

    @property
    def units(self) -> dict[str, float]:
        """Busy share (0..1) of each unit in steady state."""
        return self.trace.unit_shares()

    @property
    def pipes(self) -> dict[str, float]:
        """Pipe utilisation as NVIDIA Nsight Compute counts it (0..1): an instruction takes one FMA, two ALU slots."""
        return pipe_shares(self.pipeline, self.trace, self.machine)

    @property
    def memory_gbps(self) -> float:
        """Rate of the memory traffic over the whole time, in GB/s."""
        return self.chip.hbm_bytes / self.time_ms / 1e6

    @property
    def flop_per_byte(self) -> float:
        """Arithmetic intensity: useful FLOP for each byte of memory traffic."""
        return self.workload.flops / self.chip.hbm_bytes


def pipe_shares(pipeline: Pipeline, trace: SmTrace, machine: Machine) -> dict[str, float]:
    """Tensor, XU, FMA, ALU and issue utilisation per steady-state cycle, the way profilers count them."""
    counts = pipeline.instructions()
    ii = trace.ii_cycles
    per_mufu = 32.0 * 4.0 / machine["mufu.ex2_per_clk"]
    return {
        "tensor": pipeline.demand().get("tensor", 0.0) / ii,
        "xu": counts.get("mufu", 0.0) * per_mufu / ii,
        "fma": counts.get("fma", 0.0) / ii,
        "alu": 2.0 * counts.get("alu", 0.0) / ii,
        "issue": sum(counts.values()) / ii,
    }
