"""Whether a block of P is what its scores say, up to what is subtracted in the exponent, and whether O is the sum of its blocks.

Scores are in octaves (times log2 e), arrays (rows, keys) in float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tilecast.emulator.verify import scaled_by

#: Relative error that rounding P to bf16, or a polynomial, explains; and of O against what is added up in it.
_P_TOLERANCE, _O_TOLERANCE = 0.02, 0.03
LARGEST_E4M3 = 448.0
#: Numbers below these are too coarse to be compared: of e4m3, and of 16 bits.
_LEAST_E4M3, _LEAST = 2.0**-4, 2.0**-12
#: Weights that rounding makes inexact: those below this part of the largest are not compared.
_SMALL = 2.0**-9
#: Exponentials beyond these mean that the row maximum is not the one of the scores.
_HIGHEST = 2.0**14


@dataclass(frozen=True, slots=True)
class Weights:
    """What was found out about a block of P."""

    #: "": right; "hidden": keys that a row does not see weigh something; "none": the largest score weighs nothing; "scale": exponents grow
    #: otherwise than scores; "off": one weighs otherwise than its row's others; "saturated", "large": the maximum is another one.
    wrong: str
    row: int = 0
    key: int = 0
    #: What it is (of "scale": how many times as much exponents grow), and what it should be.
    got: float = 0.0
    wanted: float = 0.0
    #: Rows that "hidden" is about.
    rows: int = 0
    #: Where nothing is wrong, the binary logarithm of what each row's exponentials were divided by; NaN where no weight says so.
    reference: Any = None


def hidden(weighs: Any) -> Weights:
    """Where keys that no row sees weigh something, (rows, keys) of bool."""
    row, key = (int(n) for n in np.argwhere(weighs)[0])
    return Weights("hidden", row, key, rows=int(weighs.any(1).sum()))


def judge_weights(p: Any, scores: Any, seen: Any, first: int, keys: int, coarse: bool) -> Weights:
    """P of some rows and of ``keys`` keys from ``first`` on; ``scores``, ``seen``: of all keys of these rows.

    P may have more columns, of keys past the last one.  ``coarse``: it has 8 bits.
    """
    s, visible = scores[:, first : first + keys], seen[:, first : first + keys]
    wide = np.zeros(p.shape, bool)
    wide[:, :keys] = visible
    # Rows with a score that is not finite become NaN, which no step compares.
    sound = np.isfinite(np.where(visible, s, 0)).all(1) & np.isfinite(p).all(1)
    if (beyond := (p != 0) & ~wide & sound[:, None]).any():
        return hidden(beyond)
    least = _LEAST_E4M3 if coarse else _LEAST
    with np.errstate(all="ignore"):
        p, large = p[:, :keys], np.where(visible, p[:, :keys], 0)
        largest = large.max(1, initial=0.0)
        counted = (large > _SMALL * largest[:, None]) & (large > least) & sound[:, None]
        logarithm = np.where(counted, s - np.log2(np.where(counted, p, 1)), np.nan)
        reference = np.array(
            [np.median(row[~np.isnan(row)]) if (~np.isnan(row)).any() else np.nan for row in logarithm]
        )
        wanted = np.exp2(np.where(visible, s, -np.inf) - reference[:, None])
        off = np.where(np.isnan(reference)[:, None], 0, np.abs(p - wanted) / np.maximum(wanted, max(_SMALL, least)))
        off = np.nan_to_num(np.where((wanted > _SMALL * largest[:, None]) | (p > _SMALL), off, 0))
    # Where a row's largest score of all is, there is a weight, whatever is subtracted.
    most = np.where(seen, scores, -np.inf).max(1)
    best = sound & np.isfinite(most) & (np.where(visible, s, -np.inf).max(1) == most) & (largest < least)
    if best.any():
        row = int(best.argmax())
        return Weights("none", row, got=float(largest[row]))
    row = int(large.max(1, initial=0).argmax())
    # Of P that is as large as its type has numbers, the others of a row say nothing.
    if coarse and float(large.max(initial=0)) >= LARGEST_E4M3:
        return Weights("saturated", row)
    if float(off.max(initial=0)) > (6 if coarse else 3) * _P_TOLERANCE:
        row, key = (int(n) for n in np.unravel_index(int(off.argmax()), off.shape))
        times = scaled_by(logarithm[row], s[row])
        if times is not None:
            return Weights("scale", row, key, times)
        return Weights("off", row, key, float(p[row, key]), float(wanted[row, key]))
    if float(large.max(initial=0)) > _HIGHEST:
        return Weights("large", row, got=float(large[row].max()))
    return Weights("", reference=reference)


def judge_sum(result: Any, total: Any, size: Any, reference: Any, coarse: bool) -> tuple[int, float]:
    """(row, how much of its size) that O is off; the number is 0 where rounding explains it.

    ``total``: P V of the blocks so far on the scale ``reference``, ``size``: of absolute values.
    """
    with np.errstate(all="ignore"):
        off = np.abs(np.asarray(result, np.float64)[: len(reference)] - total)
        sound = ~np.isnan(reference)[:, None] & np.isfinite(total)
        share = np.nan_to_num(np.where(sound & (off > 1e-3), off / np.maximum(size, 1e-2), 0))
    if float(share.max(initial=0)) <= (9 if coarse else 3) * _O_TOLERANCE:
        return 0, 0.0
    row = int(share.max(1).argmax())
    return row, float(share[row].max())
