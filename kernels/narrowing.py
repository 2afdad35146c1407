"""Matrix products of heads of fewer columns than their kernel's: what would only multiply zeros is left out.

Triton's tensors have power-of-two extents, wgmma takes any multiple of 8 columns and of 16 numbers to add.  So a kernel for heads of 128 multiplies
heads of 96 with a third of zeros, which the copy engine brings.  They are left out of the PTX of a compiled kernel, which is `assembled_again`: what
products of zeros add changes no bit, and columns that are not there are not stored.

`make kernels` writes this file of `codegen/hopper` to `kernels` as well, which import nothing else of ours.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

_PRODUCT = re.compile(
    r"wgmma\.mma_async\.sync\.aligned\.m64n(?P<n>\d+)k16(?P<types>\.f32\.(?:bf16\.bf16|f16\.f16)) \{(?P<sums>[^{}]*)\}, (?P<left>\{[^{}]*\}|%\w+), (?P<rest>.*);"
)
_COMMIT = "wgmma.commit_group"
_DEPTH = 16


def change_for(module: Any, heads: int) -> Callable[[str], str] | None:
    """What changes in the PTX of a generated file's kernels for heads of so many columns, as a module; None where nothing does."""
    pieces = getattr(module, "HEAD_COLUMNS", ())
    return partial(with_fewer_columns, pieces=pieces, heads=heads) if heads < sum(pieces) else None


def with_fewer_columns(ptx: str, pieces: tuple[int, ...], heads: int) -> str:
    """PTX of a kernel whose heads are tiles of so many columns, no two alike, for heads of fewer in all, a multiple of 8.

    Of two kinds of products: sums over the columns of two tiles of rows in shared memory, as S = Q K^T, have fewer steps; sums over rows,
    as O += P V with P in registers, fewer columns.  Others, with columns where wgmma takes 64 at least, stay.
    """
    there = {width: min(max(heads - sum(pieces[:i]), 0), width) for i, width in enumerate(pieces)}
    lines = ptx.split("\n")
    steps: list[int] = []
    for i, line in enumerate(lines):
        if _COMMIT in line:
            width = len(steps) * _DEPTH
            for step in steps[-(-there.get(width, width) // _DEPTH) :]:
                lines[step] = _left_out(lines[step])
            steps = []
        elif product := _PRODUCT.search(line):
            left_by_columns, right_by_columns = _by_columns(product)
            width = int(product["n"])
            if not left_by_columns and not right_by_columns:
                steps.append(i)
            elif product["left"].startswith("{") and there.get(width, width) < width:
                lines[i] = _PRODUCT.sub(_of_columns(product, there[width]), line) if there[width] else _left_out(line)
    return "\n".join(lines)


def _by_columns(product: re.Match[str]) -> tuple[bool, bool]:
    """Whether the left and the right operand lie in memory with each column in a row; one in registers does not."""
    *_, left, right = product["rest"].split(", ")
    return not product["left"].startswith("{") and left == "1", right == "1"


def _of_columns(product: re.Match[str], columns: int) -> str:
    """The product of the first columns alone: a thread has four sums of each eight, in their order."""
    sums = ",".join(product["sums"].split(",")[: columns // 2])
    return f"wgmma.mma_async.sync.aligned.m64n{columns}k16{product['types']} {{{sums}}}, {product['left']}, {product['rest']};"


def _left_out(line: str) -> str:
    return _PRODUCT.sub("// zeros", line)
