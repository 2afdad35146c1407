"""Element types, rounded as the hardware rounds: to nearest, ties to even (ml_dtypes does it in numpy)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from tilecast.emulator.errors import UnsupportedError


@dataclass(frozen=True)
class Dtype:
    """An element type of Gluon."""

    name: str
    numpy: Any
    bits: int

    def __str__(self) -> str:
        return self.name

    @property
    def value(self) -> Dtype:
        """Itself, as a constexpr has it."""
        return self

    @property
    def primitive_bitwidth(self) -> int:
        """Bits of an element, by Triton's name."""
        return self.bits


BOOL = Dtype("int1", np.bool_, 1)
INT16, INT32, INT64 = Dtype("int16", np.int16, 16), Dtype("int32", np.int32, 32), Dtype("int64", np.int64, 64)
INT8, UINT8 = Dtype("int8", np.int8, 8), Dtype("uint8", np.uint8, 8)
UINT16, UINT32, UINT64 = Dtype("uint16", np.uint16, 16), Dtype("uint32", np.uint32, 32), Dtype("uint64", np.uint64, 64)
FP64 = Dtype("fp64", np.float64, 64)
FP16, FP32 = Dtype("fp16", np.float16, 16), Dtype("fp32", np.float32, 32)
BF16 = Dtype("bf16", ml_dtypes.bfloat16, 16)
FP8E4 = Dtype("fp8e4nv", ml_dtypes.float8_e4m3fn, 8)
FP8E5 = Dtype("fp8e5", ml_dtypes.float8_e5m2, 8)
_LARGEST = {FP8E4: np.float32(448.0), FP8E5: np.float32(57344.0)}
ALL = (BOOL, INT8, UINT8, INT16, UINT16, INT32, UINT32, INT64, UINT64, FP64, FP16, FP32, BF16, FP8E4, FP8E5)
_BY_NUMPY = {np.dtype(dtype.numpy): dtype for dtype in ALL}


def of(array: Any) -> Dtype:
    """The Dtype of a numpy array."""
    found = _BY_NUMPY.get(array.dtype)
    if found is None:
        raise UnsupportedError(f"no Gluon type for numpy's {array.dtype}: use float16, bfloat16, float32 or integers")
    return found


def cast(array: Any, dtype: Dtype) -> Any:
    """``array`` as ``dtype``; 16-bit and 8-bit floats come from float32, so that nothing is rounded twice."""
    with np.errstate(all="ignore"):
        if dtype in _LARGEST:
            # cvt.satfinite: what is too large becomes the largest finite number, a NaN stays one.
            array = np.clip(array, -_LARGEST[dtype], _LARGEST[dtype])
        return array.astype(dtype.numpy)
