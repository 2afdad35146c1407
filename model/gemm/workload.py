"""Gemm: the problem D = alpha A B + beta C, without a word about kernels.

A is m x k, B is k x n, C and D are m x n.  FLOP are 2 m n k, as every GEMM library counts them: the addition of C is left out.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from tilecast.base.words import did_you_mean
from tilecast.model.kernel.workload import DTYPES, LARGEST, WorkloadError

#: Bytes of one element of C and D, by dtype.
OUT_DTYPES = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True)
class Gemm:
    """D = alpha A B + beta C; ``in_place`` writes D over C.

    ``c_dtype`` not given is ``dtype`` (bf16 where that is fp8), ``d_dtype`` not given is ``c_dtype``.
    """

    m: int
    n: int
    k: int
    dtype: str = "bf16"
    #: "" follows, and is gone once a Gemm is made.
    c_dtype: str = ""
    d_dtype: str = ""
    alpha: float = 1.0
    beta: float = 1.0
    in_place: bool = False

    def __post_init__(self) -> None:
        for name in ("m", "n", "k"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise WorkloadError(f"{name}: expected a whole number, got {value!r}")
            if not 1 <= value <= LARGEST:
                raise WorkloadError(f"{name}: expected 1 to {LARGEST}, got {value}")
        _known("dtype", self.dtype, DTYPES)
        if not self.c_dtype:
            object.__setattr__(self, "c_dtype", "bf16" if self.dtype == "fp8" else self.dtype)
        if not self.d_dtype:
            object.__setattr__(self, "d_dtype", self.c_dtype)
        _known("c_dtype", self.c_dtype, OUT_DTYPES)
        _known("d_dtype", self.d_dtype, OUT_DTYPES)
        for name in ("alpha", "beta"):
            if not abs(getattr(self, name)) < float("inf"):
                raise WorkloadError(f"{name}: expected a finite number, got {getattr(self, name)}")
        if self.in_place and self.c_dtype != self.d_dtype:
            raise WorkloadError(
                f"in_place: D written over C has C's dtype, got c_dtype '{self.c_dtype}' and d_dtype '{self.d_dtype}'"
            )
        if self.in_place and not self.adds_c:
            raise WorkloadError("in_place: with beta 0 there is no C to write over")

    @property
    def adds_c(self) -> bool:
        """Whether C is read at all."""
        return self.beta != 0

    @property
    def dtype_bytes(self) -> int:
        """Bytes of one element of A and B."""
        return DTYPES[self.dtype]

    @property
    def c_bytes(self) -> int:
        """Bytes of one element of C; 0 where it is not read."""
        return OUT_DTYPES[self.c_dtype] if self.adds_c else 0

    @property
    def d_bytes(self) -> int:
        """Bytes of one element of D."""
        return OUT_DTYPES[self.d_dtype]

    @property
    def scalings(self) -> int:
        """FP32 instructions an element of D takes between the accumulator and its conversion."""
        if not self.adds_c:
            return int(self.alpha != 1)
        return 1 if self.alpha == 1 or self.beta == 1 else 2

    @property
    def flops(self) -> float:
        """2 m n k."""
        return 2.0 * self.m * self.n * self.k

    @property
    def least_bytes(self) -> float:
        """Memory traffic of a launch that moves every tensor once."""
        inputs = (self.m + self.n) * float(self.k) * self.dtype_bytes
        return inputs + float(self.m) * self.n * (self.c_bytes + self.d_bytes)

    @property
    def tensor_bytes(self) -> float:
        """Bytes the tensors take in memory."""
        return self.least_bytes - (float(self.m) * self.n * self.c_bytes if self.in_place else 0.0)

    def label(self) -> str:
        """Short text for headlines."""
        terms = "D = A B" if not self.adds_c else "C += A B" if self.in_place else "D = A B + C"
        out = f", C {self.c_dtype}" if self.adds_c else ""
        out += f", D {self.d_dtype}" if self.d_dtype != self.c_dtype or not self.adds_c else ""
        return f"{self.dtype} {terms}, m {self.m}, n {self.n}, k {self.k}{out}"

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def _known(field: str, value: str, known: dict[str, int]) -> None:
    if value not in known:
        raise WorkloadError(f"{field}: expected {', '.join(known)}, got '{value}'{did_you_mean(value, known)}")
