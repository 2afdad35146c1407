"""The groups of benchmarks; each module's ``cases()`` lists its own."""

from __future__ import annotations

import importlib

from tilecast.validation.lab.calibrate.cases import CalibrateError, Case

#: In the order they run: cheap and sure first, power last because it heats the chip.
GROUPS = (
    "tensor",
    "arithmetic",
    "corun",
    "smem",
    "local",
    "code",
    "sync",
    "tma",
    "reduce",
    "memory",
    "launch",
    "power",
)


def all_cases(only: tuple[str, ...] = ()) -> list[Case]:
    """Cases of the named groups (all when none is named); CalibrateError with near names for an unknown group."""
    from tilecast.base.words import nearest

    for name in only:
        if name not in GROUPS:
            raise CalibrateError(f"unknown group '{name}'{nearest(name, GROUPS)}")
    found: list[Case] = []
    for name in GROUPS:
        if not only or name in only:
            found += importlib.import_module(f"{__name__}.{name}").cases()
    return found
