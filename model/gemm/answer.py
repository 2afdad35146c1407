"""What a GEMM forecast says: the values that text and JSON read.  No rendering."""

from __future__ import annotations

from dataclasses import dataclass

from tilecast.model.forecast.answer import WaterfallStep
from tilecast.model.forecast.interval import FactEffect
from tilecast.model.gemm.code import GemmCode
from tilecast.model.gemm.evaluate import GemmRun
from tilecast.model.gemm.variant import GemmVariant
from tilecast.model.gemm.workload import Gemm
from tilecast.model.machine.machine import Machine
from tilecast.model.sm.bounds import Bounds


@dataclass(frozen=True, slots=True)
class GemmForecast:
    """The answer for one GEMM, machine and variant."""

    gemm: Gemm
    machine: Machine
    variant: GemmVariant
    origin: str
    regime: str
    run: GemmRun
    bounds: Bounds
    #: Kind, as a `Binding` of an attention forecast has, and what in words.
    binding: tuple[str, str]
    waterfall: tuple[WaterfallStep, ...]
    #: TFLOP/s by the ranges of the machine's facts, and what each of them does, the widest first; both empty where not asked for.
    tflops_interval: tuple[float, ...] = ()
    fact_effects: tuple[FactEffect, ...] = ()
    #: The machine code that the forecast is from, None before compilation; and the milliseconds before compilation.
    code: GemmCode | None = None
    before_ms: float = 0.0

    @property
    def time_ms(self) -> float:
        """Milliseconds of the launch."""
        return self.run.seconds * 1e3


@dataclass(frozen=True, slots=True)
class BufferGain:
    """What the second accumulator is worth at one k."""

    k: int
    #: The best kernel with two and the best with one, and their milliseconds.
    two: GemmVariant
    one: GemmVariant
    two_ms: float
    one_ms: float
    #: By that knob alone, of the fastest kernel with two that is legal with one as well: with one and with two, in ms; None where no
    #: kernel is.
    same_tile_ms: float | None
    same_tile_two_ms: float | None
    binding: tuple[str, str]

    @property
    def gain(self) -> float:
        """How many times as long the best kernel with one accumulator takes."""
        return self.one_ms / self.two_ms

    @property
    def knob_gain(self) -> float | None:
        """The same of one kernel and that knob alone."""
        return self.same_tile_ms / self.same_tile_two_ms if self.same_tile_ms and self.same_tile_two_ms else None
