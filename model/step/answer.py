"""What the forecast of a serving step says: the values that text and JSON read.  No rendering."""

from __future__ import annotations

from dataclasses import dataclass

from tilecast.model.machine.machine import Machine
from tilecast.model.step.batch import Batch
from tilecast.model.step.decoder import DecoderFloor
from tilecast.model.step.evaluate import StepRun
from tilecast.model.step.launches.classes import StepVariant


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the time: why, and how long; parts add up to the whole."""

    cause: str
    seconds: float
    share: float


@dataclass(frozen=True, slots=True)
class SplitTime:
    """Attention of the step with splits of so many keys."""

    split_keys: int
    seconds: float


@dataclass(frozen=True, slots=True)
class NextRequest:
    """What one more request costs."""

    requests: str
    #: Attention of one layer, and the whole step where the decoder is known.
    attention_seconds: float
    step_seconds: float | None
    #: Bytes of its cache in one layer.
    cache_bytes: int


@dataclass(frozen=True, slots=True)
class Largest:
    """How many such requests more fit within a latency."""

    requests: str
    within_seconds: float
    #: 0: the batch as it is takes longer, or just fits.
    count: int
    seconds: float
    #: "latency", or "memory" where the caches and weights of one more would not fit; "sequences": the most that a batch may have.
    limit: str


@dataclass(frozen=True, slots=True)
class StepForecast:
    """The answer for one batch, machine and pair of kernels."""

    batch: Batch
    machine: Machine
    variants: tuple[StepVariant, ...]
    origin: str
    regime: str
    run: StepRun
    parts: tuple[Part, ...]
    #: Kind and what in words.
    binding: tuple[str, str]
    decoder: DecoderFloor | None = None
    splits: tuple[SplitTime, ...] = ()
    next_request: NextRequest | None = None
    largest: Largest | None = None

    @property
    def seconds(self) -> float:
        """Seconds of attention of one layer."""
        return self.run.seconds

    @property
    def step_seconds(self) -> float | None:
        """Seconds of the whole step, at least; None where the decoder is not known."""
        return None if self.decoder is None else self.decoder.decoder.layers * self.seconds + self.decoder.seconds
