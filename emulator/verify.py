"""Is what a kernel computed attention?  And if not: which row, which key, stored at which line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilecast.emulator.errors import RequestError, WrongResultError
from tilecast.emulator.values.outside import is_tensor, numpy_of

#: Error of the output that rounding explains: this many units in the last place of the inputs' type, of the largest |v|.
_ROUNDINGS = 4.0
#: Of the log-sum-exp: rounding of float32 (of the sums, of large scores); to it comes what polynomials cost.
LSE_TOLERANCE, LSE_RELATIVE = 3e-5, 5e-7
#: Logarithms of row sums that are taken to be of the same keys.
_SAME_SUM = 2e-4
#: Weights that say whether a row's exponents are on a straight line, at least; what they may leave it by, of their range.
_FITTED, _STRAIGHT = 8, 0.02
_OFF, _SLOPE = 0.06, 0.02
#: Largest relative error of FlashAttention-4's polynomials for 2^f on [0, 1), by degree (evaluated on 100,000 points).
POLYNOMIAL_ERROR = {1: 3.9e-2, 2: 2.08e-3, 3: 8.77e-5, 4: 2.99e-6, 5: 8.6e-8}


def as_numpy(tensor: Any, name: str) -> Any:
    """numpy view of a torch or numpy tensor of (batch, heads, rows, columns); RequestError for anything else."""
    found = numpy_of(tensor.cpu() if hasattr(tensor, "cpu") else tensor) if is_tensor(tensor) else tensor
    if not isinstance(found, np.ndarray) or found.ndim != 4:
        got = getattr(found, "shape", found)
        raise RequestError(f"{name}: expected a tensor of (batch, heads, rows, columns), got {got}")
    return found


def visible(seqlen_q: int, seqlen_k: int, window: tuple[int, int]) -> Any:
    """Which keys each query sees, (seqlen_q, seqlen_k); aligned bottom right, -1 is no limit."""
    left, right = window
    i, j = np.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q, np.arange(seqlen_k)[None, :]
    seen = np.ones((seqlen_q, seqlen_k), bool)
    if left >= 0:
        seen &= j >= i - left
    if right >= 0:
        seen &= j <= i + right
    return seen


def scores(q: Any, k: Any, scale: float) -> Any:
    """Scaled products of every query with every key in float64, heads of K repeated."""
    q, k = as_numpy(q, "q").astype(np.float64), as_numpy(k, "k").astype(np.float64)
    with np.errstate(all="ignore"):
        return (q @ np.repeat(k, q.shape[1] // k.shape[1], 1).transpose(0, 1, 3, 2)) * scale


def weights(q: Any, k: Any, scale: float, window: tuple[int, int]) -> tuple[Any, Any, Any]:
    """(exponentials of scores less their row's maximum, their sums, the maxima) in float64, the last two with one column."""
    s = scores(q, k, scale)
    s = np.where(visible(s.shape[2], s.shape[3], window), s, -np.inf)
    with np.errstate(all="ignore"):
        most = s.max(-1, keepdims=True, initial=-np.inf)
        p = np.exp(s - np.where(np.isneginf(most), 0, most))
        return p, p.sum(-1, keepdims=True), most


def reference(
    q: Any, k: Any, v: Any, scale: float, window: tuple[int, int], weighed: tuple[Any, Any, Any] | None = None
) -> tuple[Any, Any]:
    """Attention in float64: (output, logarithm of the row sums); rows without a key give 0 and -inf.  ``weighed``: the `weights`."""
    p, total, most = weighed or weights(q, k, scale, window)
    values = as_numpy(v, "v").astype(np.float64)
    values = np.repeat(values, p.shape[1] // values.shape[1], 1)
    with np.errstate(all="ignore"):
        out = np.where(total == 0, 0, (p @ values) / total)
        return out, np.where(total == 0, -np.inf, np.log(total) + most)[..., 0]


@dataclass(frozen=True)
class Verdict:
    """How far a kernel's output is from float64."""

    out_error: float
    out_tolerance: float
    lse_error: float
    lse_tolerance: float
    #: Empty when the result is right; otherwise what is wrong, with the source lines concerned.
    wrong: str
    #: Some wrong rows (batch, head, row), and whether output and log-sum-exp of all rows are right.
    wrong_rows: tuple[tuple[int, ...], ...] = ()
    out_right: bool = True
    lse_right: bool = True

    def require(self) -> Verdict:
        """Itself; WrongResultError when the result is not right."""
        if self.wrong:
            raise WrongResultError(self.wrong)
        return self


def polynomial_error(header: Mapping[str, Any]) -> float:
    """Relative error of the exponentials that a kernel computes without the special function unit; 0 where it has none."""
    knobs = dict(knob.split("=", 1) for knob in str(header.get("variant", "")).split(",") if "=" in knob)
    if float(knobs.get("emulated_share", 0)) == 0:
        return 0.0
    return POLYNOMIAL_ERROR.get(int(knobs.get("poly_degree", 3)), POLYNOMIAL_ERROR[3])


def _largest(difference: Any) -> float:
    return float(np.nan_to_num(difference, nan=np.inf).max()) if difference.size else 0.0


def judge(
    emulation: Any, q: Any, k: Any, v: Any, scale: float, window: tuple[int, int], with_lse: bool = True
) -> Verdict:
    """Compare an `Emulation` with float64; ``with_lse=False``: the log-sum-exp was not asked for."""
    expected, expected_lse = reference(q, k, v, scale, window)
    out = emulation.out.astype(np.float64)
    lse = emulation.lse.astype(np.float64) if with_lse else expected_lse
    values = as_numpy(v, "v")
    ulp = 2.0**-8 if values.dtype.name == "bfloat16" else 2.0**-11
    tolerance = _ROUNDINGS * ulp * max(float(np.abs(values.astype(np.float64)).max(initial=0.0)), 1e-3)
    with np.errstate(all="ignore"):
        # A NaN where there must be one is right.
        off = np.where(np.isnan(out) & np.isnan(expected), 0.0, np.abs(out - expected))
        off_lse = np.where(
            (lse == expected_lse) | (np.isnan(lse) & np.isnan(expected_lse)), 0.0, np.abs(lse - expected_lse)
        )
        allowed = (
            LSE_TOLERANCE
            + polynomial_error(emulation.header)
            + LSE_RELATIVE * float(np.abs(expected_lse[np.isfinite(expected_lse)]).max(initial=0.0))
        )
    verdict = (_largest(off), tolerance, _largest(off_lse), allowed)
    of_out = np.nan_to_num(off, nan=np.inf).max(-1, initial=0.0) > tolerance
    of_lse = np.nan_to_num(off_lse, nan=np.inf) > allowed
    rows = of_out | of_lse
    if not rows.any():
        return Verdict(*verdict, "")
    b, h, row = (int(x) for x in np.argwhere(rows)[0])
    flat = int(np.ravel_multi_index((b, h, row, 0), out.shape))
    line = int(emulation.stored_at[flat])
    unsaid = of_lse[b, h, row] and not emulation.lse_stored_at[np.ravel_multi_index((b, h, row), lse.shape)]
    wrong = (
        f"{int(rows.sum())} of {rows.size} rows are wrong, first batch {b}, head {h}, row {row}: output off by "
        f"{_largest(off[b, h, row]):.3g} (tolerance {tolerance:.2g}), log-sum-exp by {_largest(off_lse[b, h, row]):.3g}; "
        + (f"stored at {emulation.quote(line)}" if line else "nothing was stored there, a row of out")
        + ("; nothing was stored to that row of lse" if unsaid and line else "")
    )
    # Sums that are right mostly say nothing about masks, and neither do infinite ones of rows whose output is right.
    plausible = bool(of_out.any() or np.isfinite(lse[of_lse]).all())
    telling = as_numpy(k, "k").size > 0 and of_lse.sum() > 0.9 * rows.sum() and plausible
    culprit = _shifted_mask(scores(q, k, scale), lse, rows, window) if telling else ""
    if culprit:
        places = "; ".join(emulation.quote(mask) for mask in emulation.mask_lines)
        wrong += f"; {culprit}: scores are hidden at {places or 'no line'}"
    some = tuple(tuple(int(n) for n in place) for place in np.argwhere(rows)[:64])
    return Verdict(*verdict, wrong, some, not of_out.any(), not of_lse.any())


def scaled_by(differences: Any, s: Any) -> float | None:
    """By what scores were multiplied, where a row's exponents are a multiple of them and a constant; None where they are not.

    ``differences``: scores less the exponents, NaN where nothing is compared.
    """
    there = ~np.isnan(differences)
    if there.sum() < _FITTED or np.ptp(s[there]) < 1.0:
        return None
    slope, constant = np.polyfit(s[there], differences[there], 1)
    off = np.abs(differences[there] - slope * s[there] - constant).max()
    return float(1.0 - slope) if off < _OFF + _STRAIGHT * np.ptp(s[there]) and abs(slope) > _SLOPE else None


def _shifted_mask(s: Any, lse: Any, rows: Any, window: tuple[int, int]) -> str:
    """A mask, one key off, whose row sums the wrong rows have; empty when none explains them."""
    left, right = window
    seen = visible(s.shape[2], s.shape[3], window)
    guesses = {
        "it weighs a key beyond the last": (seen, 1.0),
        "it misses the last key": (seen & _all_but_last(seen), 0.0),
    }
    for name, (dl, dr) in (("left", (1, 0)), ("right", (0, 1))):
        for step, word in ((1, "too far out"), (-1, "too far in")):
            moved = (left + dl * step if left >= 0 else left, right + dr * step)
            if (left if dl else right) >= 0:
                hidden_all = dr * (right + step) < 0
                mask = _strictly_left(seen, s) if hidden_all else visible(s.shape[2], s.shape[3], moved)
                guesses[f"the {name} edge of its mask is one key {word}"] = (mask, 0.0)
    for words, (mask, extra) in guesses.items():
        with np.errstate(all="ignore"):
            most = np.maximum(np.where(mask, s, -np.inf).max(-1), 0.0 if extra else -np.inf)
            base = np.where(np.isneginf(most), 0.0, most)
            guess = np.log(np.exp(np.where(mask, s, -np.inf) - base[..., None]).sum(-1) + extra * np.exp(-base)) + base
            fits = (np.abs(guess - lse) <= _SAME_SUM) | (guess == lse)
        if fits[rows].mean() > 0.9:
            return f"its row sums are those of another mask: {words}"
    return ""


def _all_but_last(seen: Any) -> Any:
    return np.arange(seen.shape[1])[None, :] < seen.shape[1] - 1


def _strictly_left(seen: Any, s: Any) -> Any:
    """Causal without the diagonal (a right limit of -1 would mean none)."""
    i, j = np.arange(s.shape[2])[:, None] + s.shape[3] - s.shape[2], np.arange(s.shape[3])[None, :]
    return seen & (j < i)
