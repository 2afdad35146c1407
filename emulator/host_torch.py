"""What the host code of generated files asks of torch: a stand-in, so that torch need not be installed."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import numpy as np

from tilecast.emulator.language.arrays import Array

_MADE = {"torch.float32": np.float32, "torch.int32": np.int32, "torch.int64": np.int64}


class HostTorch(types.ModuleType):
    """The names of types; while it `makes` scratch memory, zeros and the device's SMs as well."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.__dict__.update({name: f"torch.{name}" for name in ("float32", "float16", "bfloat16", "int32", "int64")})

    @contextlib.contextmanager
    def makes(self, sms: int) -> Iterator[list[Array]]:
        """While it lasts, launches make their own scratch memory, on a device of so many SMs; the tensors made so far, in order."""
        made: list[Array] = []

        def zeros(count: int, dtype: str, device: Any = None) -> Array:
            made.append(Array(np.zeros(count, _MADE[dtype]), f"scratch {len(made)}"))
            return made[-1]

        device = types.SimpleNamespace(multi_processor_count=sms)
        cuda = types.SimpleNamespace(get_device_properties=lambda _: device)
        self.__dict__.update(zeros=zeros, cuda=cuda)
        try:
            yield made
        finally:
            del self.__dict__["zeros"], self.__dict__["cuda"]
