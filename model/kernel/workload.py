"""Workload: the attention problem, without a word about kernels.

FLOP conventions (FA4P): the FlashAttention papers count 2 Sq Sk (Dqk + Dv) per head and halve it for causal;
cudnn-frontend counts the unmasked entries, S (S + 1) / 2.  `Workload.flops` is the first where it applies (square
causal), and counts unmasked entries exactly where halving would be wrong (Sq != Sk, windows).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from tilecast.base.words import did_you_mean

DTYPES = {"bf16": 2, "fp16": 2, "fp8": 1}
#: What is said of other names that people use.
_KINDS_OF_FP8 = dict.fromkeys(
    ("e4m3", "e5m2", "float8_e4m3fn", "float8_e5m2"), "both 8-bit types are fp8"
) | dict.fromkeys(
    ("mxfp8", "mxfp4", "nvfp4"), "scales of blocks are neither forecast nor written, fp8 has a factor to each key head"
)
MASKS = ("none", "causal", "window")
#: Sizes beyond 32 bits fit no kernel, and products of them would leave what numpy can count.
LARGEST = 2**31 - 1


class WorkloadError(ValueError):
    """A workload that makes no sense: one sentence with what, expected, got."""


#: Default of fields that follow another: it is gone once a workload is made.
_FOLLOWS: Any = None


@dataclass(frozen=True)
class Workload:
    """Forward attention: batch x heads_q query heads over heads_kv key/value heads.

    Masks are aligned bottom right (query i is key position i + seqlen_k - seqlen_q).  ``window`` is (left, right) as
    in FlashAttention: keys before and after the diagonal that stay visible, -1 for no limit.

    What is not given is as on the command line: ``heads_kv`` as ``heads_q``, ``seqlen_k`` as ``seqlen_q``, ``head_dim_v``
    as ``head_dim_qk``, and ``mask`` "window" where there is a window.
    """

    batch: int = 1
    heads_q: int = 16
    heads_kv: int = _FOLLOWS
    seqlen_q: int = 4096
    seqlen_k: int = _FOLLOWS
    head_dim_qk: int = 128
    head_dim_v: int = _FOLLOWS
    mask: str = "none"
    window: tuple[int, int] | None = None
    dtype: str = "bf16"

    def __post_init__(self) -> None:
        for name, leader in (("heads_kv", "heads_q"), ("seqlen_k", "seqlen_q"), ("head_dim_v", "head_dim_qk")):
            if getattr(self, name) is None:
                object.__setattr__(self, name, getattr(self, leader))
        if self.mask == "none" and self.window is not None:
            object.__setattr__(self, "mask", "window")
        for name in ("batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_k", "head_dim_qk", "head_dim_v"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise WorkloadError(f"{name}: expected a whole number, got {value!r}")
            if value < 1:
                raise WorkloadError(f"{name}: expected at least 1, got {value}")
            if value > LARGEST:
                raise WorkloadError(f"{name}: expected at most {LARGEST}, got {value}")
        if self.heads_q % self.heads_kv:
            raise WorkloadError(
                f"heads: {self.heads_q} query heads do not divide among {self.heads_kv} key/value heads"
            )
        for name in ("head_dim_qk", "head_dim_v"):
            value = getattr(self, name)
            if value % 8 or not 16 <= value <= 1024:
                raise WorkloadError(f"{name}: expected a multiple of 8 from 16 to 1024, got {value}")
        if self.dtype not in DTYPES:
            raise WorkloadError(
                f"dtype: expected {', '.join(DTYPES)}, got '{self.dtype}'"
                + (
                    f": {_KINDS_OF_FP8[self.dtype]}"
                    if self.dtype in _KINDS_OF_FP8
                    else did_you_mean(self.dtype, DTYPES)
                )
            )
        if self.mask not in MASKS:
            raise WorkloadError(f"mask: expected {', '.join(MASKS)}, got '{self.mask}'{did_you_mean(self.mask, MASKS)}")
        if (self.mask == "window") != (self.window is not None):
            raise WorkloadError(f"window: mask '{self.mask}' and window {self.window} do not go together")
        if self.window is not None and (len(self.window) != 2 or min(self.window) < -1):
            raise WorkloadError(f"window: expected two numbers of at least -1 (left,right), got {self.window}")
        if self.window is not None and max(self.window) > LARGEST:
            raise WorkloadError(f"window: expected at most {LARGEST} keys to a side, got {self.window}")

    @property
    def dtype_bytes(self) -> int:
        """Bytes of one element of Q, K, V."""
        return DTYPES[self.dtype]

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads_q // self.heads_kv

    @property
    def dims(self) -> str:
        """Head dimensions, in short: 128, or 192/128 where V has others."""
        return f"{self.head_dim_qk}" if self.head_dim_qk == self.head_dim_v else f"{self.head_dim_qk}/{self.head_dim_v}"

    @property
    def limits(self) -> tuple[int, int]:
        """(left, right) reach of the mask around the diagonal; -1 for none."""
        if self.mask == "causal":
            return -1, 0
        return self.window if self.window is not None else (-1, -1)

    def key_range(self, row_low: int, row_high: int) -> tuple[int, int]:
        """Half-open range of keys that some row in [row_low, row_high) sees; empty ranges have low == high."""
        left, right = self.limits
        offset = self.seqlen_k - self.seqlen_q
        low = 0 if left < 0 else row_low + offset - left
        high = self.seqlen_k if right < 0 else row_high - 1 + offset + right + 1
        low, high = max(0, low), min(self.seqlen_k, high)
        return (low, high) if low < high else (low, low)

    def exact_pairs(self) -> int:
        """Unmasked (query, key) pairs of one head, in closed form."""
        left, right = self.limits
        offset = self.seqlen_k - self.seqlen_q
        highs = (
            _clipped_sum(self.seqlen_q, offset + right + 1, self.seqlen_k)
            if right >= 0
            else self.seqlen_q * self.seqlen_k
        )
        lows = _clipped_sum(self.seqlen_q, offset - left, self.seqlen_k) if left >= 0 else 0
        # Where a row's window lies wholly outside the keys both bounds clip to the same value: no correction.
        return highs - lows

    @property
    def tensor_bytes(self) -> int:
        """Bytes of Q, K, V and O; O is 16 bit whatever the inputs are."""
        queries = self.batch * self.heads_q * self.seqlen_q
        keys = self.batch * self.heads_kv * self.seqlen_k
        inputs = queries * self.head_dim_qk + keys * (self.head_dim_qk + self.head_dim_v)
        return inputs * self.dtype_bytes + queries * self.head_dim_v * 2

    @property
    def flops(self) -> float:
        """Forward FLOP as the FlashAttention papers count them (see the module docstring)."""
        pair = 2.0 * self.batch * self.heads_q * (self.head_dim_qk + self.head_dim_v)
        if self.mask == "none":
            return pair * self.seqlen_q * self.seqlen_k
        if self.mask == "causal" and self.seqlen_q == self.seqlen_k:
            return pair * self.seqlen_q * self.seqlen_k / 2.0
        return pair * self.exact_pairs()

    @property
    def flops_exact(self) -> float:
        """Forward FLOP of the unmasked entries (cudnn-frontend's convention)."""
        return 2.0 * self.batch * self.heads_q * (self.head_dim_qk + self.head_dim_v) * self.exact_pairs()

    def reduced(self) -> Workload:
        """The same problem with the plainest mask that hides the same keys."""
        left, right = self.limits
        # The first row sees the fewest keys to the right, the last row the fewest to the left.
        if right >= self.seqlen_q - 1:
            right = -1
        if left >= self.seqlen_k - 1:
            left = -1
        if left < 0 and right <= 0:
            plain = "none" if right < 0 else "causal"
            return self if self.mask == plain else replace(self, mask=plain, window=None)
        window = (left, right)
        return self if window == self.window else replace(self, mask="window", window=window)

    def heads_as_rows(self) -> Workload:
        """The same problem where one query sees all keys, with the query heads that share a key/value head as so many queries of it."""
        if self.seqlen_q > 1 or self.mask != "none":
            return self
        return replace(self, heads_q=self.heads_kv, seqlen_q=self.group_size)

    def label(self) -> str:
        """Short text for headlines."""
        heads = f"{self.heads_q}" if self.heads_q == self.heads_kv else f"{self.heads_q}/{self.heads_kv}"
        length = f"{self.seqlen_q}" if self.seqlen_q == self.seqlen_k else f"{self.seqlen_q}x{self.seqlen_k}"
        mask = {"none": "full", "causal": "causal", "window": f"window {self.window}"}[self.mask]
        return (
            f"{self.dtype} {mask} attention, batch {self.batch}, heads {heads}, seqlen {length}, head_dim {self.dims}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        out = asdict(self)
        out["window"] = list(self.window) if self.window is not None else None
        return out

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Workload:
        """Inverse of `as_dict`; unknown names are a WorkloadError."""
        known = set(Workload.__dataclass_fields__)
        unknown = sorted(set(values) - known)
        if unknown:
            raise WorkloadError(f"workload: unknown field '{unknown[0]}'{did_you_mean(unknown[0], known)}")
        fields = dict(values)
        if fields.get("window") is not None:
            fields["window"] = tuple(fields["window"])
        return Workload(**fields)


def _clipped_sum(rows: int, start: int, top: int) -> int:
    """Sum over i in [0, rows) of clip(start + i, 0, top)."""
    # Rows below zero contribute nothing, rows above the top contribute it whole, the rest is arithmetic.
    first = max(0, min(rows, -start))
    last = max(first, min(rows, top - start))
    count = last - first
    ramp = count * start + (first + last - 1) * count // 2
    return ramp + (rows - last) * top
