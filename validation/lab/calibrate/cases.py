"""What a benchmark is: a frozen `Case`, and the launches and readings it is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from tilecast.validation.lab.calibrate import nvrtc

# The groups' modules, whose text is part of the key of every recorded row, look for the error here.
from tilecast.validation.lab.calibrate.errors import CalibrateError as CalibrateError
from tilecast.validation.lab.calibrate.gpu import Gpu

Value = int | float | str | bool


@dataclass(frozen=True, slots=True)
class Reading:
    """One measured quantity: a sample for every repeat, all in ``unit``."""

    samples: tuple[float, ...]
    unit: str


@dataclass(frozen=True)
class Case:
    """One compiled question with one set of parameters; ``measure`` answers it with named readings."""

    group: str
    benchmark: str
    #: What the row is filed under; a benchmark's cases differ in these.
    params: Mapping[str, Value]
    #: File in cu/, the generated text before it, and its macros.
    source: str
    measure: Callable[[Gpu, Case], Mapping[str, Reading]]
    prelude: str = ""
    defines: Mapping[str, int | str] = field(default_factory=dict)
    #: Compute capabilities that have what it measures.
    chips: tuple[int, ...] = (80, 86, 89, 90, 100, 103, 120)
    #: Part of ``--quick``.
    quick: bool = False
    #: Dynamic shared memory a CTA takes, where a chip may have too little of it.
    smem_bytes: int = 0
    #: Rough duration on the GPU, for the progress bar.
    seconds: float = 0.02

    def __post_init__(self) -> None:
        object.__setattr__(self, "params", MappingProxyType(dict(self.params)))
        object.__setattr__(self, "defines", MappingProxyType(dict(self.defines)))

    def text(self) -> str:
        """The CUDA source."""
        return nvrtc.source_text(self.source, self.prelude, self.defines)

    def label(self) -> str:
        """Group, benchmark and parameters in one line."""
        told = " ".join(f"{key}={value}" for key, value in self.params.items())
        return f"{self.group}/{self.benchmark} {told}".rstrip()


def repeats(count: int, once: Callable[[], Mapping[str, float]], units: Mapping[str, str]) -> dict[str, Reading]:
    """``once`` run once to warm up and then ``count`` times; readings for the quantities that ``units`` names."""
    once()
    found = [once() for _ in range(count)]
    return {name: Reading(tuple(sample[name] for sample in found), unit) for name, unit in units.items()}
