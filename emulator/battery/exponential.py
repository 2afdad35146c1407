"""The kernel's own 2^x, evaluated alone: an attention output hides errors that are large for an exponential."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from tilecast.emulator.errors import EmulationError, UnsupportedError, WrongResultError
from tilecast.emulator.language import ptx
from tilecast.emulator.source import Source
from tilecast.emulator.verify import POLYNOMIAL_ERROR, polynomial_error

#: What evaluating a polynomial in float32 adds to its error.
_ROUNDING = 4e-7
#: Arguments: scores under their maximum, and over it as far as a maximum may grow before O is rescaled.
_LOWEST, _HIGHEST, _COUNT = -30.0, 9.0, 40001


def check_exponentials(blocks: Mapping[tuple[str, int, int], int], header: Mapping[str, Any], source: Source) -> int:
    """How many blocks of PTX (text, results, elements; by line) compute 2^x; WrongResultError when one does badly.

    Allowed is the error of the polynomial of the header's degree, evaluated in float32.
    """
    allowed = max(polynomial_error(header), POLYNOMIAL_ERROR[5]) + _ROUNDING
    found = 0
    for (text, results, size), line in blocks.items():
        if results != size or not _is_exponential(text, size):
            continue
        found += 1
        x = np.linspace(_LOWEST, _HIGHEST, _COUNT, dtype=np.float32)
        exact = np.exp2(x.astype(np.float64))
        errors = [np.abs(y / exact - 1) for y in _evaluate(text, size, x)]
        worst = np.array([float(np.nan_to_num(one, nan=np.inf).max()) for one in errors])
        if worst.max() > allowed:
            column = int(worst.argmax())
            at = float(x[int(np.nan_to_num(errors[column], nan=np.inf).argmax())])
            where = f" in {int((worst > allowed).sum())} of {size} columns" if size > 1 else ""
            raise WrongResultError(
                f"2^x at {source.quote(line)} is off by {worst.max():.3g}{where}, first for x = {at:.4g}; its polynomial "
                f"allows {allowed:.3g}{_constants(text, source)}"
            )
        lowest = [float(y[0]) for y in _evaluate(text, size, np.array([-np.inf], np.float32))]
        if max(map(abs, lowest)) > 1e-37:
            raise WrongResultError(
                f"2^x at {source.quote(line)} is {max(lowest):.3g} for a hidden key, x = -inf: not 0"
            )
    return found


def _evaluate(text: str, size: int, x: Any) -> list[Any]:
    """2^x of every element of the block, all given the same x."""
    results = ptx.run(text, [x.view(np.uint32)] * size, size)
    return [r.view(np.float32).astype(np.float64) for r in results]


def _is_exponential(text: str, size: int) -> bool:
    """Whether a block of ``size`` elements has only so many inputs and they become about 2^x."""
    if len(set(re.findall(r"\$(\d+)", text))) != 2 * size:
        return False
    try:
        values = [_evaluate(text, size, np.array([x], np.float32)) for x in (-3.3, -0.7)]
    except (UnsupportedError, EmulationError, KeyError):
        return False
    near = [abs(float(y[0]) / 2.0**x - 1) < 0.05 for x, ys in zip((-3.3, -0.7), values, strict=True) for y in ys]
    # A column that is far off is still one of an exponential where most are not.
    return bool(sum(near) > len(near) / 2)


def _constants(text: str, source: Source) -> str:
    """The function that writes the block's 64-bit constants: its lines, but for comments."""
    wanted = set(re.findall(r"0x[0-9a-f]{16}", text))
    lines = source.text.splitlines()
    for node in ast.walk(ast.parse(source.text)):
        if isinstance(node, ast.FunctionDef):
            inside = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            if any(value in lines[number - 1] for value in wanted for number in inside):
                code = [number for number in inside[1:] if not lines[number - 1].lstrip().startswith(("#", '"""'))]
                return "; it is written by" + "".join(f"\n               {source.quote(number)}" for number in code)
    return ""
