"""What a launch has to refuse: arguments that its kernel would read or write wrongly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilecast.emulator.errors import EmulationError, WrongResultError
from tilecast.emulator.language.arrays import Array
from tilecast.emulator.run import Kernel
from tilecast.emulator.verify import reference

_ROWS, _KEYS = 16, 24


class _Elsewhere(Array):
    """A tensor that starts two bytes behind an aligned address."""

    def data_ptr(self) -> int:
        return super().data_ptr() + 2


def _given(kernel: Kernel, heads: tuple[int, int] = (2, 1)) -> dict[str, Any]:
    """Arguments that are right."""
    written = kernel.header["workload"]
    rng, (hq, hk), dq, dv = np.random.default_rng(0), heads, written["head_dim_qk"], written["head_dim_v"]
    shapes = {"q": (1, hq, _ROWS, dq), "k": (1, hk, _KEYS, dq), "v": (1, hk, _KEYS, dv), "out": (1, hq, _ROWS, dv)}
    found: dict[str, Any] = {
        name: Array(rng.standard_normal(shape).astype(np.float16), name) for name, shape in shapes.items()
    }
    found["lse"] = Array(np.zeros((1, hq, _ROWS), np.float32), "lse")
    left, right = (-1, 0) if written["mask"] == "causal" else (-1, -1)
    return {**found, "scale": dq**-0.5, "window_left": left, "window_right": right}


def _wrong_arguments(kernel: Kernel) -> dict[str, dict[str, Any]]:
    """By what is wrong with them: complete arguments that have to be refused."""
    right = _given(kernel)

    def made(name: str, change: Callable[[Any], Any], kind: type[Array] = Array) -> dict[str, Any]:
        return {**right, name: kind(change(right[name].data), name)}

    cases = {
        "a q of another head_dim than k's": made("q", lambda x: x[..., :-8].copy()),
        "a v of another length than k": made("v", lambda x: x[:, :, :-1].copy()),
        "a v of other heads than k": made("v", lambda x: np.repeat(x, 2, 1)),
        "an out of another shape than q": made("out", lambda x: x[:, :, :-1].copy()),
        "a k of another batch than q": made("k", lambda x: np.repeat(x, 2, 0)),
        "a float32 q": made("q", lambda x: x.astype(np.float32)),
        "an lse of another shape": made("lse", lambda x: x[:, :, :-1].copy()),
        "an lse that is not contiguous": made("lse", lambda x: np.repeat(x, 2, 2)[:, :, ::2]),
        "a float16 lse": made("lse", lambda x: x.astype(np.float16)),
        "rows of k that are not 16 bytes apart": made("k", lambda x: np.pad(x, [(0, 0)] * 3 + [(0, 4)])[..., :-4]),
        "a v whose columns are not neighbours": made("v", lambda x: np.repeat(x, 2, 3)[..., ::2]),
        "an out that does not start at 16 bytes": made("out", lambda x: x, _Elsewhere),
        "three query heads on two of k": _given(kernel, (3, 2)),
        "heads of more columns than the kernel's": {
            **right,
            **{name: Array(np.pad(right[name].data, [(0, 0)] * 3 + [(0, 8)]), name) for name in ("q", "k", "v", "out")},
        },
    }
    mask = kernel.header["workload"]["mask"]
    cases["a window that the kernel does not have"] = {
        **right,
        **({"window_left": -2} if mask == "window" else {"window_left": 4, "window_right": 3}),
    }
    return cases


def check_refusals(kernel: Kernel) -> int:
    """How many wrong calls the kernel's launch refuses with a ValueError; WrongResultError when it takes one.

    A scale that kernels refuse may also be computed right.
    """
    cases = _wrong_arguments(kernel)
    for what, arguments in cases.items():
        if _taken(kernel, arguments):
            raise WrongResultError(f"launch takes {what}: expected a ValueError from {_tests_of(kernel, what)}")
    right = _given(kernel)
    limits = right["window_left"], right["window_right"]
    q, k, v = (right[name].data for name in "qkv")
    scales = (0.0, -0.125, float("nan"), float("inf"), -float("inf"), 3e38)
    for scale in scales:
        given = {**_given(kernel), "scale": scale}
        if not _taken(kernel, given):
            continue
        if np.isfinite(scale) and abs(scale) < 1:
            expected, _ = reference(q, k, v, scale, limits)
            if np.allclose(given["out"].data.astype(np.float64), expected, atol=1e-2):
                continue
        raise WrongResultError(
            f"launch takes scale={scale:g} and the result is wrong: expected a ValueError from {_tests_of(kernel, 'a scale')}"
        )
    return len(cases) + len(scales)


def _taken(kernel: Kernel, arguments: dict[str, Any]) -> bool:
    """Whether a launch is not refused."""
    try:
        kernel.module.launch(**arguments)
    except EmulationError:
        return True
    except ValueError:
        return False
    return True


def _tests_of(kernel: Kernel, what: str) -> str:
    """Where the file should refuse ``what``: tests in plan and launch that read an argument it names, quoted."""
    words = set(what.replace("'s", "").split()) & {"q", "k", "v", "out", "lse", "scale", "window", "heads"}
    quoted, inside = [], False
    for number, line in enumerate(kernel.source.text.splitlines(), 1):
        if line.startswith(("def plan(", "def launch(")):
            inside = True
            quoted.append(kernel.source.quote(number))
        elif line and not line.startswith((" ", ")")):
            inside = False
        tests = inside and line.lstrip().startswith(("if ", "want ", "got ", "shapes "))
        if tests and ("x." in line or any(word in line for word in words)):
            quoted.append(kernel.source.quote(number))
    return "; ".join(quoted) or "its launch"
