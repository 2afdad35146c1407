"""libdevice: functions of one element, by numpy, rounded once; what rounds otherwise than to nearest is not there."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tilecast.emulator.language.everyday import Everyday

_BITS = 32


def _each(fn: Callable[[float], float]) -> Callable[[Any], Any]:
    """A function of Python's, for every element; NaN where it has no value."""

    def of(x: float) -> float:
        try:
            return fn(x)
        except OverflowError:
            return math.inf
        except ValueError:
            return math.nan

    return np.vectorize(of, otypes=[np.float64])


def _away(x: Any) -> Any:
    """To the nearest whole number, halves away from zero."""
    return np.copysign(np.floor(np.abs(x.astype(np.float64)) + 0.5), x)


def _wide(compute: Callable[..., Any]) -> Callable[..., Any]:
    """In float64, so that float32 is rounded once."""
    return lambda *x: compute(*(np.asarray(one, np.float64) for one in x))


#: Special functions of the arithmetic units, and what is exact.
_FLOATS: dict[str, Callable[..., Any]] = {
    **{
        name: _wide(getattr(np, numpy))
        for name, numpy in {
            "exp": "exp", "exp2": "exp2", "expm1": "expm1", "log": "log", "log2": "log2", "log10": "log10", "log1p": "log1p", "sin": "sin",
            "cos": "cos", "tan": "tan", "sinh": "sinh", "cosh": "cosh", "tanh": "tanh", "asin": "arcsin", "acos": "arccos",
            "atan": "arctan", "asinh": "arcsinh", "acosh": "arccosh", "atanh": "arctanh", "atan2": "arctan2", "cbrt": "cbrt",
            "hypot": "hypot", "pow": "power", "sqrt": "sqrt", "sqrt_rn": "sqrt", "div_rn": "divide", "fast_dividef": "divide",
            "fast_expf": "exp", "fast_logf": "log", "fast_log2f": "log2", "fast_log10f": "log10", "fast_sinf": "sin", "fast_cosf": "cos",
            "fast_tanf": "tan", "fast_tanhf": "tanh", "fast_powf": "power",
        }.items()
    },
    "exp10": _wide(lambda x: 10.0**x), "fast_exp10f": _wide(lambda x: 10.0**x), "rsqrt": _wide(lambda x: 1 / np.sqrt(x)),
    "rsqrt_rn": _wide(lambda x: 1 / np.sqrt(x)), "rcp_rn": _wide(lambda x: 1 / x), "rcbrt": _wide(lambda x: 1 / np.cbrt(x)),
    "rhypot": _wide(lambda x, y: 1 / np.hypot(x, y)), "sinpi": _wide(lambda x: np.sin(np.pi * np.fmod(x, 2))),
    "cospi": _wide(lambda x: np.cos(np.pi * np.fmod(x, 2))), "erf": _each(math.erf), "erfc": _each(math.erfc),
    "tgamma": _each(math.gamma), "lgamma": _each(math.lgamma),
    "normcdf": _each(lambda x: 0.5 * math.erfc(-x / math.sqrt(2))),
}  # fmt: skip
_EXACT: dict[str, Callable[..., Any]] = {
    "abs": np.abs, "floor": np.floor, "ceil": np.ceil, "trunc": np.trunc, "rint": np.rint, "nearbyint": np.rint, "round": _away,
    "copysign": np.copysign, "nextafter": np.nextafter, "fmod": np.fmod, "remainder": lambda x, y: x - y * np.rint(np.float64(x) / y),
    "fdim": lambda x, y: np.maximum(x - y, 0), "saturatef": lambda x: np.where(np.isnan(x), 0, np.clip(x, 0, 1)),
    "fma": _wide(lambda x, y, z: x * y + z), "fma_rn": _wide(lambda x, y, z: x * y + z), "add_rn": np.add, "sub_rn": np.subtract,
    "mul_rn": np.multiply, "ldexp": lambda x, n: np.ldexp(x, np.asarray(n, np.int64)), "scalbn": lambda x, n: np.ldexp(x, np.asarray(n, np.int64)),
    "logb": lambda x: np.floor(np.log2(np.abs(np.float64(x)))),
}  # fmt: skip


def _whole(rounded: Callable[[Any], Any], low: int, high: int) -> Callable[[Any], Any]:
    """To an integer type: what is too large becomes its end, NaN 0."""
    kind = np.int32 if low else np.uint32
    return lambda x: (
        np.where(np.isnan(x), 0, np.clip(rounded(x.astype(np.float64)), low, high)).astype(np.int64).astype(kind)
    )


def _bits(x: Any) -> Any:
    return np.asarray(x).view(np.uint32).astype(np.uint64)


def _counted(x: Any) -> Any:
    return sum((_bits(x) >> np.uint64(i)) & np.uint64(1) for i in range(_BITS)).astype(np.int32)


def _leading(x: Any) -> Any:
    bits = _bits(x).astype(np.float64)
    return np.where(bits > 0, _BITS - 1 - np.floor(np.log2(np.maximum(bits, 1))), _BITS).astype(np.int32)


def _first(x: Any) -> Any:
    signed = np.asarray(x).astype(np.int64)
    lowest = (signed & -signed) & 0xFFFFFFFF
    return np.where(lowest > 0, np.log2(np.maximum(lowest, 1)) + 1, 0).astype(np.int32)


def _reversed(x: Any) -> Any:
    bits = _bits(x)
    out = sum(((bits >> np.uint64(i)) & np.uint64(1)) << np.uint64(_BITS - 1 - i) for i in range(_BITS))
    return np.asarray(out).astype(np.uint32).view(np.int32)


_INT, _UINT = (-(2**31), 2**31 - 1), (0, 2**32 - 1)
_ROUNDED: dict[str, Callable[[Any], Any]] = {"rn": np.rint, "rz": np.trunc, "rd": np.floor, "ru": np.ceil}
#: Whose results have another type than what they are given.
_OTHERS: dict[str, Callable[..., Any]] = {
    "isnan": lambda x: np.isnan(x).astype(np.int32), "isinf": lambda x: np.isinf(x).astype(np.int32),
    "finitef": lambda x: np.isfinite(x).astype(np.int32), "signbit": lambda x: np.signbit(x).astype(np.int32),
    "float_as_int": lambda x: x.view(np.int32), "float_as_uint": lambda x: x.view(np.uint32), "int_as_float": lambda x: x.view(np.float32),
    "uint_as_float": lambda x: x.view(np.float32), "popc": _counted, "clz": _leading, "ffs": _first, "brev": _reversed,
    "mulhi": lambda x, y: ((x.astype(np.int64) * y.astype(np.int64)) >> 32).astype(np.asarray(x).dtype),
    "hadd": lambda x, y: ((x.astype(np.int64) + y.astype(np.int64)) >> 1).astype(np.asarray(x).dtype),
    "rhadd": lambda x, y: ((x.astype(np.int64) + y.astype(np.int64) + 1) >> 1).astype(np.asarray(x).dtype),
    "int2float_rn": lambda x: x.astype(np.float32), "uint2float_rn": lambda x: x.astype(np.float32),
    **{f"float2int_{how}": _whole(rounded, *_INT) for how, rounded in _ROUNDED.items()},
    **{f"float2uint_{how}": _whole(rounded, *_UINT) for how, rounded in _ROUNDED.items()},
}  # fmt: skip


def names(gl: Everyday) -> dict[str, Callable[..., Any]]:
    """By name in gluon.language.extra.libdevice."""
    return {
        **{name: gl.function("div" if "div" in name else "mufu", fn) for name, fn in _FLOATS.items()},
        **{name: gl.function("fma", fn) for name, fn in _EXACT.items()},
        **{name: gl.function("alu", fn, own_type=True) for name, fn in _OTHERS.items()},
    }
