"""Bytes that attention moves: three unfused kernels against one fused kernel, and FlashAttention-1's bound.

FlashAttention-1 (Dao et al. 2022, theorem 2): standard attention moves Theta(N d + N^2) elements to and from HBM,
a kernel with M elements of on-chip memory Theta(N^2 d^2 / M).  Symbols: B batch, H_q and H_kv heads, S_q and S_k
lengths, d_qk and d_v head dims, b bytes per element of Q, K, V, O, s bytes per element of S and P, M rows of a query
tile, N keys of a block.  Every expression is a sympy expression of these; values are bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tilecast.model.workload import Workload


@dataclass(frozen=True, slots=True)
class Transfer:
    """One tensor crossing a boundary: what, where, its closed form and its bytes."""

    name: str
    #: "hbm" or "l2" (bytes that SMs pull through L2).
    level: str
    expression: Any
    bytes: float


@dataclass(frozen=True, slots=True)
class Traffic:
    """All transfers of one way to compute attention."""

    title: str
    transfers: tuple[Transfer, ...]

    def total_bytes(self, level: str = "hbm") -> float:
        """Bytes at ``level``."""
        return sum(t.bytes for t in self.transfers if t.level == level)

    def total_expression(self, level: str = "hbm") -> Any:
        """Closed form of `total_bytes`, factored."""
        import sympy

        return sympy.factor_terms(sum(t.expression for t in self.transfers if t.level == level))


@dataclass(frozen=True, slots=True)
class FlashBound:
    """FlashAttention-1's asymptotic counts in bytes, constants dropped, and the on-chip size where they meet."""

    unfused_expression: Any
    unfused_bytes: float
    fused_expression: Any
    fused_bytes: float
    #: On-chip elements at which both move N^2 elements: d^2.
    break_even_expression: Any
    break_even_elements: float


def _symbols() -> dict[str, Any]:
    import sympy

    names = "B H_q H_kv S_q S_k d_qk d_v b s M N"
    return {n: sympy.Symbol(n, positive=True) for n in names.split()}


def _values(workload: Workload, intermediate_bytes: int, tile_m: int, tile_n: int) -> dict[str, int]:
    w = workload
    return {
        "B": w.batch, "H_q": w.heads_q, "H_kv": w.heads_kv, "S_q": w.seqlen_q, "S_k": w.seqlen_k,
        "d_qk": w.head_dim_qk, "d_v": w.head_dim_v, "b": w.dtype_bytes, "s": intermediate_bytes,
        "M": tile_m, "N": tile_n,
    }  # fmt: skip


def output_bytes(workload: Workload) -> int:
    """Bytes of one element of O: fp8 kernels write 16-bit outputs."""
    return max(2, workload.dtype_bytes)


def unfused_traffic(workload: Workload, intermediate_bytes: int = 2, skip_masked: bool = False) -> Traffic:
    """S = Q K^T writes S, softmax reads S and writes P, O = P V reads P; HBM bytes.

    ``intermediate_bytes`` is 2 (bf16) or 4 (fp32) per element of S and P.  Frameworks compute the whole matrix and
    mask it; ``skip_masked`` counts only unmasked entries, the least any unfused kernel could move.
    Raises ValueError for an intermediate of another size.
    """
    if intermediate_bytes not in (2, 4):
        raise ValueError(f"intermediate_bytes: expected 2 (bf16) or 4 (fp32), got {intermediate_bytes}")
    import sympy

    k = _symbols()
    pairs = k["S_q"] * k["S_k"]
    count = workload.seqlen_q * workload.seqlen_k
    if skip_masked and workload.mask != "none":
        pairs = sympy.Symbol("pairs", positive=True)
        if workload.mask == "causal" and workload.seqlen_q == workload.seqlen_k:
            pairs = k["S_q"] * (k["S_q"] + 1) / 2
        count = workload.exact_pairs()
    scores = k["B"] * k["H_q"] * pairs * k["s"]
    bytes_scores = workload.batch * workload.heads_q * count * intermediate_bytes
    q, key, value, out = _operands(k, workload, intermediate_bytes)
    steps = (
        ("Q read by Q K^T", *q),
        ("K read by Q K^T", *key),
        ("S written by Q K^T", scores, bytes_scores),
        ("S read by softmax", scores, bytes_scores),
        ("P written by softmax", scores, bytes_scores),
        ("P read by P V", scores, bytes_scores),
        ("V read by P V", *value),
        ("O written by P V", *out),
    )
    title = f"unfused, {'fp32' if intermediate_bytes == 4 else 'bf16'} S and P"
    return Traffic(title, tuple(Transfer(name, "hbm", expr, float(number)) for name, expr, number in steps))


def _operands(k: dict[str, Any], workload: Workload, intermediate_bytes: int) -> list[tuple[Any, int]]:
    """(closed form, bytes) of Q, K, V and O, each once."""
    import sympy

    values = _values(workload, intermediate_bytes, 1, 1)
    out_size = k["b"] if output_bytes(workload) == workload.dtype_bytes else sympy.Integer(output_bytes(workload))
    forms = [
        k["B"] * k["H_q"] * k["S_q"] * k["d_qk"] * k["b"],
        k["B"] * k["H_kv"] * k["S_k"] * k["d_qk"] * k["b"],
        k["B"] * k["H_kv"] * k["S_k"] * k["d_v"] * k["b"],
        k["B"] * k["H_q"] * k["S_q"] * k["d_v"] * out_size,
    ]
    return [(form, int(form.subs({k[n]: v for n, v in values.items()}))) for form in forms]


def fused_traffic(workload: Workload, tile_m: int = 256, tile_n: int = 128) -> Traffic:
    """FlashAttention: Q, K, V, O cross HBM once; every query tile pulls its visible K and V blocks through L2.

    ``tile_m`` is the query rows that share one pass over K and V (256: two tiles of one CTA).  Each query head
    refetches for itself, as without GQA packing.  L2 bytes count whole blocks of ``tile_n`` keys and no logsumexp.
    """
    import sympy

    k = _symbols()
    q, key, value, out = _operands(k, workload, 2)
    hbm = [
        Transfer(name, "hbm", expr, float(number))
        for name, (expr, number) in zip(
            ("Q read once", "K read once", "V read once", "O written once"), (q, key, value, out), strict=True
        )
    ]
    tiles = -(-workload.seqlen_q // tile_m)
    if workload.mask == "none":
        blocks: Any = sympy.ceiling(k["S_q"] / k["M"]) * sympy.ceiling(k["S_k"] / k["N"])
    else:
        i = sympy.Symbol("i", integer=True)
        blocks = sympy.Sum(sympy.Function("blocks")(i), (i, 0, sympy.ceiling(k["S_q"] / k["M"]) - 1))
    count = sum(visible_blocks(workload, tile, tile_m, tile_n) for tile in range(tiles))
    expression = k["B"] * k["H_q"] * blocks * k["N"] * (k["d_qk"] + k["d_v"]) * k["b"]
    number = (
        workload.batch * workload.heads_q * count * tile_n
        * (workload.head_dim_qk + workload.head_dim_v) * workload.dtype_bytes
    )  # fmt: skip
    refetch = Transfer("K and V per query tile", "l2", expression, float(number))
    query = Transfer("Q and O", "l2", q[0] + out[0], float(q[1] + out[1]))
    return Traffic("fused (FlashAttention)", (*hbm, query, refetch))


def visible_blocks(workload: Workload, tile: int, tile_m: int, tile_n: int) -> int:
    """Key blocks that query tile number ``tile`` has to read."""
    low, high = workload.key_range(tile * tile_m, min(workload.seqlen_q, (tile + 1) * tile_m))
    return -(-high // tile_n) - low // tile_n if high > low else 0


def flash_bound(workload: Workload, sram_bytes: float) -> FlashBound:
    """FlashAttention-1's Theta(N^2 d^2 / M) against Theta(N d + N^2), in bytes for all heads of ``workload``.

    ``sram_bytes`` is the on-chip memory of one SM; elements have the workload's size.
    """
    import sympy

    k = _symbols()
    sram = sympy.Symbol("M_sram", positive=True)
    d = sympy.Symbol("d", positive=True)
    heads, pairs = k["B"] * k["H_q"], k["S_q"] * k["S_k"]
    unfused = heads * k["b"] * (k["S_q"] * d + pairs)
    fused = heads * k["b"] * pairs * d**2 / sram
    meet = sympy.solve(sympy.Eq(heads * k["b"] * pairs, fused), sram)[0]
    numbers = {k[n]: v for n, v in _values(workload, 2, 1, 1).items()}
    numbers |= {d: workload.head_dim_qk, sram: sympy.Rational(int(sram_bytes), workload.dtype_bytes)}
    return FlashBound(
        unfused, float(unfused.subs(numbers)), fused, float(fused.subs(numbers)), meet, float(meet.subs(numbers))
    )
