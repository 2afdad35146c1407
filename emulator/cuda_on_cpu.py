"""Host code that asks torch for a GPU gets the CPU: for the files and tests of kernels that are emulated."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

#: What a GPU sums in float32 and rounds once; torch's CPU backward pass of a convolution adds its taps in 16 bits.
_SUMMED_IN_FLOAT32 = ("conv1d", "conv2d", "conv3d", "conv_transpose", "convolution")


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
    short = (torch.bfloat16, torch.float16)

    def in_float32(func: Callable[..., Any], args: Any, named: dict[str, Any]) -> Any:
        """``func`` of the same tensors in float32, its results rounded once to the 16 bits that were given."""
        tensors = [one for one in (*args, *named.values()) if isinstance(one, torch.Tensor)]
        kinds = {one.dtype for one in tensors if one.dtype in short}

        def wide(value: Any) -> Any:
            return value.float() if isinstance(value, torch.Tensor) and value.dtype in short else value

        def rounded(value: Any) -> Any:
            if isinstance(value, (tuple, list)):
                return tuple(map(rounded, value))
            return value.to(next(iter(kinds))) if isinstance(value, torch.Tensor) and kinds else value

        return rounded(func(*(wide(_cpu(a)) for a in args), **{key: wide(value) for key, value in named.items()}))

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
            if getattr(func, "__name__", "").startswith(_SUMMED_IN_FLOAT32):
                return in_float32(func, args, named)
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
