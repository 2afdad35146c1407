"""What a kernel's host code asks of torch where it makes its own scratch memory: a stand-in, so that torch need not be installed."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import numpy as np

from tilecast.emulator.language.arrays import Array


@contextlib.contextmanager
def torch_of_host_code(module: types.ModuleType, sms: int) -> Iterator[list[Array]]:
    """While it lasts, ``import torch`` in ``module`` (one that `source.Source.load` has made) gives zeros and the device's SMs; the tensors
    that are made so far, in order.
    """
    made: list[Array] = []

    def zeros(count: int, dtype: Any, device: Any = None) -> Array:
        made.append(Array(np.zeros(count, dtype), f"scratch {len(made)}"))
        return made[-1]

    device = types.SimpleNamespace(multi_processor_count=sms)
    stand_in = types.SimpleNamespace(
        zeros=zeros, float32=np.float32, int32=np.int32,
        cuda=types.SimpleNamespace(get_device_properties=lambda _: device),
    )  # fmt: skip
    names = module.__dict__["__builtins__"]
    real = names["__import__"]

    def imported(name: str, *rest: Any) -> Any:
        return stand_in if name == "torch" else real(name, *rest)

    names["__import__"] = imported
    try:
        yield made
    finally:
        names["__import__"] = real
