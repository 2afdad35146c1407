"""Tensors from outside as numpy arrays over the same memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from tilecast.emulator.errors import RequestError


def _is_torch(value: Any) -> bool:
    return type(value).__module__.split(".")[0] == "torch" and hasattr(value, "data_ptr")


def is_tensor(value: Any) -> bool:
    """Whether a kernel gets a pointer for it: a numpy array or a torch tensor."""
    return isinstance(value, np.ndarray) or _is_torch(value)


def numpy_of(tensor: Any) -> Any:
    """numpy view of a torch or numpy tensor, in place; RequestError for anything else and for memory of a GPU."""
    if _is_torch(tensor):
        if tensor.device.type != "cpu":
            raise RequestError(f"expected tensors on the CPU, got one on {tensor.device}: the emulator needs no GPU")
        tensor = _numpy_of_torch(tensor.detach())
    if not isinstance(tensor, np.ndarray):
        raise RequestError(f"expected a numpy or torch tensor, got {tensor!r}")
    return tensor


def _numpy_of_torch(tensor: Any) -> Any:
    import ml_dtypes
    import torch

    # numpy has no such types of its own: the same bits under the names of ml_dtypes.
    bits = {
        torch.bfloat16: (torch.int16, ml_dtypes.bfloat16),
        torch.float8_e4m3fn: (torch.uint8, ml_dtypes.float8_e4m3fn),
        torch.float8_e5m2: (torch.uint8, ml_dtypes.float8_e5m2),
    }
    if tensor.dtype in bits:
        carrier, dtype = bits[tensor.dtype]
        return tensor.view(carrier).numpy().view(dtype)
    return tensor.numpy()
