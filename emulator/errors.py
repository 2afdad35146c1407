"""What an emulated kernel can do wrong.  Every message ends in the source lines concerned."""

from __future__ import annotations

from typing import Any


class EmulationError(ValueError):
    """A kernel did something the hardware would punish, or that this emulator does not know."""


class RaceError(EmulationError):
    """Two accesses to the same memory, one of them a write, that no barrier orders."""


class DeadlockError(EmulationError):
    """Every role waits, and nothing in flight will wake one."""


class BarrierError(EmulationError):
    """A barrier used against its protocol: too many arrivals, a phase that was missed, bytes that do not add up."""


class BoundsError(EmulationError):
    """An access outside a tensor, a buffer or a ring."""


class UninitializedError(EmulationError):
    """A read of memory that was never written, or of a matrix product that is still running."""


class AllocationError(EmulationError):
    """More shared or tensor memory than the chip has."""


class LayoutError(EmulationError):
    """Register tensors whose elements sit in other threads than an operation needs."""


class UnsupportedError(EmulationError):
    """An operation outside the subset of Gluon that is emulated."""


class WrongResultError(EmulationError):
    """Output that is not attention of the inputs."""


class IntegerError(EmulationError):
    """A 32-bit integer that overflows, or a division by zero; ``over``: where, in a larger problem than the one that ran."""

    over: Any = None
    #: Where a number that is not defined came from: (file, line) of the frames, innermost first.
    places: tuple[tuple[str, int], ...] = ()


class RequestError(EmulationError):
    """A request that makes no sense: no such kernel, a machine it is not written for, inputs of another shape."""
