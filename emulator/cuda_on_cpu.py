"""Host code that asks torch for a GPU gets the CPU: for the files and tests of kernels that are emulated."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def cuda_on_cpu(capability: tuple[int, int], sms: int) -> Iterator[None]:
    """While it lasts, ``device="cuda"`` means the CPU, and torch.cuda tells of a GPU of ``capability``; nothing without torch."""
    try:
        import torch
        from torch.overrides import TorchFunctionMode
    except ImportError:
        yield
        return

    is_cuda = torch.Tensor.is_cuda.__get__

    class OnCpu(TorchFunctionMode):  # type: ignore[misc]
        """Devices named in calls become the CPU."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            named = {key: _cpu(value) for key, value in (kwargs or {}).items()}
            if type(named.get("device")) is int:
                named["device"] = "cpu"
            if getattr(func, "__name__", "") == "cuda":
                return args[0]
            if func == is_cuda:
                return True
            return func(*(_cpu(a) for a in args), **named)

    properties = types.SimpleNamespace(
        multi_processor_count=sms, name="emulated", major=capability[0], minor=capability[1]
    )
    told: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_capability": lambda _device=None: capability,
        "get_device_properties": lambda _device=None: properties,
        "get_device_name": lambda _device=None: "emulated",
        "synchronize": lambda _device=None: None,
        "empty_cache": lambda: None,
    }
    before = {name: getattr(torch.cuda, name) for name in told}
    try:
        for name, tell in told.items():
            setattr(torch.cuda, name, tell)
        with OnCpu():
            yield
    finally:
        for name, tell in before.items():
            setattr(torch.cuda, name, tell)


def _cpu(value: Any) -> Any:
    """``value``, or the CPU where it names a GPU."""
    named = value if isinstance(value, str) else str(value) if type(value).__name__ == "device" else ""
    return "cpu" if named == "cuda" or named.startswith("cuda:") else value
