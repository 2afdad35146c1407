"""Matrix products of heads of fewer columns than their kernel's: what would only multiply zeros is left out.

Triton's tensors have power-of-two extents, wgmma takes any multiple of 8 columns and of 16 numbers to add.  So a kernel for heads of 128 multiplies
heads of 96 with a third of zeros, which the copy engine brings.  They are left out of the PTX of a compiled kernel, which is `assembled_again`: what
products of zeros add changes no bit, and columns of O that are not there are not stored.
"""

from __future__ import annotations

import re
from itertools import groupby

_PRODUCT = re.compile(
    r"wgmma\.mma_async\.sync\.aligned\.m64n(?P<n>\d+)k16(?P<types>\.f32\.(?:bf16\.bf16|f16\.f16)) \{(?P<sums>[^{}]*)\}, (?P<left>\{[^{}]*\}|%\w+), "
)
_COMMIT = "wgmma.commit_group"
_DEPTH = 16


def with_fewer_columns(ptx: str, kernel: tuple[int, int], heads: tuple[int, int]) -> str:
    """PTX of a `hopper_ws` kernel whose q and k, and whose v, have so many columns, for ``heads`` of fewer, each a multiple of 8; as it was where
    its products are others than S = Q K^T from shared memory and O += P V with P in registers, each of all columns at once."""
    lines = ptx.split("\n")
    products = {i: found for i, line in enumerate(lines) if (found := _PRODUCT.search(line))}
    groups: list[list[int]] = [[]]
    for i, line in enumerate(lines):
        if i in products:
            groups[-1].append(i)
        elif _COMMIT in line:
            groups.append([])
    steps = -(-heads[0] // _DEPTH)
    for group in filter(None, groups):
        kinds = [kind for kind, _ in groupby(products[i]["left"].startswith("{") for i in group)]
        if len(kinds) != 1:
            return ptx
        if kinds[0]:
            if any(int(products[i]["n"]) != kernel[1] for i in group):
                return ptx
            for i in group:
                lines[i] = _of_columns(lines[i], products[i], heads[1])
        else:
            if len(group) * _DEPTH != kernel[0]:
                return ptx
            for i in group[steps:]:
                lines[i] = _PRODUCT.sub("// zeros: ", lines[i])
    return "\n".join(lines)


def _of_columns(line: str, product: re.Match[str], columns: int) -> str:
    """A product of the first columns alone: a thread has four sums of each eight, in their order."""
    sums = ",".join(product["sums"].split(",")[: columns // 2])
    made = f"wgmma.mma_async.sync.aligned.m64n{columns}k16{product['types']} {{{sums}}}, {product['left']}, "
    return line[: product.start()] + made + line[product.end() :]
