"""How often a step of the online softmax rescales O: in how many steps the maximum of some row of a warp grows by more than a threshold."""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import accumulate, pairwise

#: Rows that decide together, keys of a block, blocks of a row.
_ROWS, _KEYS, _BLOCKS = 32, 128, 64
#: Share of tile steps in which one warp of the correction group really rescales at threshold 8: a tenth (FA4B) of what
#: independent scores give at threshold 0.
_SHARE_AT_8 = 0.065
#: Block maxima in standard deviations of the scores: 128 of them lie between 0 and 8.
_HIGHEST, _CELLS = 8.0, 400


@lru_cache(maxsize=64)
def rescale_share(threshold: float) -> float:
    """Expected share of steps in which a warp rescales O: that of independent scores, and at least what FlashAttention-4
    reports at threshold 8, where independent scores give none.

    ``threshold``: octaves by which a row may outgrow its reference.
    """
    return _SHARE_AT_8 if threshold >= 8.0 else max(_SHARE_AT_8, independent_share(threshold))


def independent_share(threshold: float) -> float:
    """The share where scores are independent and normal with standard deviation 1, in natural units.

    References of rows are a chain: from r to the maximum of a block where that lies above r + threshold.  Its
    distribution is followed on a grid, exact but for the width of a cell.
    """
    width = _HIGHEST / _CELLS
    allowed = threshold * math.log(2.0)
    below = [_below(width * cell) for cell in range(_CELLS + 1)]
    maxima = [high - low for low, high in pairwise(below)]
    stays = [_below(width * (cell + 0.5) + allowed) for cell in range(_CELLS)]
    apart = round(allowed / width)
    references, share = maxima, 0.0
    for _ in range(_BLOCKS - 1):
        moves = sum(p * (1.0 - stay) for p, stay in zip(references, stays, strict=True))
        share += 1.0 - (1.0 - moves) ** _ROWS
        # Of references in the cell that just reaches a maximum, half lie low enough.
        reach = [total - 0.5 * p for total, p in zip(accumulate(references), references, strict=True)]
        outgrown = [*[0.0] * apart, *reach][:_CELLS]
        references = [
            p * stay + most * low for p, stay, most, low in zip(references, stays, maxima, outgrown, strict=True)
        ]
        whole = sum(references)
        references = [p / whole for p in references]
    return share / (_BLOCKS - 1)


def _below(score: float) -> float:
    """Probability that all scores of a row in a block lie below ``score``."""
    return float((0.5 * (1.0 + math.erf(score / math.sqrt(2.0)))) ** _KEYS)
