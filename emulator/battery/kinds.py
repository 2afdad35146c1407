"""What values are, as far as one can take another one's place."""

from __future__ import annotations

import types
from typing import Any

import numpy as np

from tilecast.emulator.battery.edits import Kind
from tilecast.emulator.errors import EmulationError
from tilecast.emulator.values.tensors import Tensor


def kind_of(value: Any) -> Kind | None:
    """What a value is, as far as another one can take its place; None where none should."""
    if isinstance(value, bool):
        return ("bool",)
    if isinstance(value, (int, np.integer)):
        return ("int",)
    if isinstance(value, float):
        return ("float",)
    if isinstance(value, Tensor):
        return "tensor", tuple(value.shape), str(value.dtype)
    if isinstance(value, (str, tuple, list, dict, types.FunctionType, types.ModuleType, type)) or value is None:
        return ("tuple", type(value).__name__) if hasattr(type(value), "_fields") else None
    return type(value).__name__, _told(value, "shape"), _told(value, "dtype")


def _told(value: Any, name: str) -> str:
    """An attribute as text; empty where there is none, of which some values of the emulator make an error of their own."""
    try:
        return str(getattr(value, name))
    except (AttributeError, EmulationError):
        return ""
