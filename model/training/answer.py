"""What the forecast of a backward pass, or of a forward and a backward pass, says: values.  No rendering."""

from __future__ import annotations

from dataclasses import dataclass

from tilecast.model.backward import BackwardVariant
from tilecast.model.chip.power import Clock
from tilecast.model.forecast.answer import BEFORE, Forecast, KernelAnswer, MachineCodeLevel, WaterfallStep
from tilecast.model.forecast.interval import FactEffect
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.training.checked_range import outside_checked_range
from tilecast.model.training.evaluate import BackwardRun, backward_flops


@dataclass(frozen=True, slots=True)
class BackwardForecast:
    """The answer for the backward pass of one workload, machine and variant."""

    workload: Workload
    machine: Machine
    variant: BackwardVariant
    #: How the variant was found: "as given", or what was searched.
    variant_origin: str
    regime: str
    run: BackwardRun
    kernels: tuple[KernelAnswer, ...]
    waterfall: tuple[WaterfallStep, ...]
    #: Time in ms, TFLOP/s and clock in MHz of the other regimes, by name.
    other_regimes: tuple[tuple[str, float, float, float], ...]
    #: TFLOP/s by the ranges of the machine's facts, and what each of them does, the widest first; empty where not asked for.
    tflops_interval: tuple[float, float] = (0.0, 0.0)
    fact_effects: tuple[FactEffect, ...] = ()
    #: Why no kernel of the variant can be generated; empty where one can.
    unwritten: str = ""

    @property
    def time_ms(self) -> float:
        """Milliseconds of all launches."""
        return self.run.seconds * 1e3

    @property
    def tflops(self) -> float:
        """TFLOP/s as papers count a backward pass."""
        return self.run.tflops

    @property
    def subject(self) -> str:
        """What was forecast, in words."""
        return f"the backward pass of {self.workload.label()}"

    @property
    def flops(self) -> float:
        """FLOP of the pass, as papers count them."""
        return backward_flops(self.workload)

    @property
    def hbm_bytes(self) -> float:
        """Bytes from and to memory, all launches together."""
        return self.run.hbm_bytes

    @property
    def clock(self) -> Clock:
        """The SM clock, one for all launches, and what sets it."""
        return self.run.clock

    @property
    def outside_calibrated_range(self) -> tuple[str, ...]:
        """Why it lies outside what backward passes were held against (empty: inside)."""
        return outside_checked_range(self.workload, self.machine)

    @property
    def compiled(self) -> MachineCodeLevel | None:
        """None: it is made before compilation."""
        return None

    @property
    def level(self) -> str:
        """What it was made from."""
        return BEFORE

    @property
    def clock_mhz(self) -> float:
        """SM clock the time was computed with."""
        return self.run.clock.mhz

    @property
    def main(self) -> KernelAnswer:
        """The kernel that takes longest."""
        return max(self.kernels, key=lambda kernel: kernel.time_ms)


@dataclass(frozen=True, slots=True)
class TrainingForecast:
    """A forward pass and the backward pass after it."""

    forward: Forecast
    backward: BackwardForecast

    @property
    def time_ms(self) -> float:
        """Milliseconds of both."""
        return self.forward.time_ms + self.backward.time_ms

    @property
    def tflops(self) -> float:
        """TFLOP/s of both, 3.5 times the FLOP of the forward pass."""
        flop = self.forward.tflops * self.forward.time_ms + self.backward.tflops * self.backward.time_ms
        return flop / self.time_ms
