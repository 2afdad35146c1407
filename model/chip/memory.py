"""How long the memory needs for what a launch moves."""

from __future__ import annotations

from tilecast.model.machine.machine import Machine


def memory_seconds(machine: Machine, read: float, written: float = 0.0) -> float:
    """Seconds in which the memory sends ``read`` bytes and takes ``written`` ones.

    Its achieved bandwidth is that of a copy, which reads as much as it writes; reads alone by the copy engine have a rate of
    their own (``hbm.read_ratio``, where measured).
    """
    copied, ratio = machine["hbm.tbps_achieved"] * 1e12, machine.get("hbm.read_ratio", 1.0)
    return (read / ratio + written * (2.0 - 1.0 / ratio)) / copied
