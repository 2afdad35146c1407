"""Small kernels in Triton that are not ours to forecast: what a reader of machine code meets, compiled for any target without its GPU."""

# ruff: noqa: N803 - constants of a Triton kernel are written in capitals

from __future__ import annotations

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

#: Capability of each target.
CAPABILITY = {"sm_80": 80, "sm_90a": 90, "sm_100a": 100, "sm_103a": 103}


@triton.jit
def matmul(a, b, c, n, k, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """c = a b, one tile of M by N a program, K at a time."""
    row, column = tl.program_id(0), tl.program_id(1)
    rows, columns, inner = row * M + tl.arange(0, M), column * N + tl.arange(0, N), tl.arange(0, K)
    total = tl.zeros((M, N), dtype=tl.float32)
    at = a + rows[:, None] * k + inner[None, :]
    bt = b + inner[:, None] * n + columns[None, :]
    for _ in range(0, k, K):
        total = tl.dot(tl.load(at), tl.load(bt), total)
        at += K
        bt += K * n
    tl.store(c + rows[:, None] * n + columns[None, :], total.to(tl.bfloat16))


@triton.jit
def layer_norm(x, y, weight, width, EPS: tl.constexpr, BLOCK: tl.constexpr):
    """Each row of x less its mean, over its deviation, times weight; one row a program."""
    row = tl.program_id(0) * width
    inner = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    squares = tl.zeros((BLOCK,), dtype=tl.float32)
    for begin in range(0, width, BLOCK):
        value = tl.load(x + row + begin + inner).to(tl.float32)
        total += value
        squares += value * value
    mean = tl.sum(total) / width
    scale = 1.0 / tl.sqrt(tl.sum(squares) / width - mean * mean + EPS)
    for begin in range(0, width, BLOCK):
        value = tl.load(x + row + begin + inner).to(tl.float32)
        out = (value - mean) * scale * tl.load(weight + begin + inner).to(tl.float32)
        tl.store(y + row + begin + inner, out.to(tl.bfloat16))


@triton.jit
def attention(q, k, v, o, length, scale, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr):
    """softmax(q k^T) v with a running maximum, M queries a program."""
    rows, keys, width = tl.program_id(0) * M + tl.arange(0, M), tl.arange(0, N), tl.arange(0, D)
    query = tl.load(q + rows[:, None] * D + width[None, :])
    total = tl.zeros((M, D), dtype=tl.float32)
    weight = tl.zeros((M,), dtype=tl.float32)
    top = tl.full((M,), float("-inf"), dtype=tl.float32)
    for begin in range(0, length, N):
        key = tl.load(k + (begin + keys)[None, :] * D + width[:, None])
        score = tl.dot(query, key) * scale
        new = tl.maximum(top, tl.max(score, 1))
        factor = tl.exp2(top - new)
        part = tl.exp2(score - new[:, None])
        weight = weight * factor + tl.sum(part, 1)
        value = tl.load(v + (begin + keys)[:, None] * D + width[None, :])
        total = tl.dot(part.to(tl.bfloat16), value, total * factor[:, None])
        top = new
    tl.store(o + rows[:, None] * D + width[None, :], (total / weight[:, None]).to(tl.bfloat16))


_POINTER = "*bf16"
#: Kernel, types of its arguments, constants.
KERNELS = {
    "matmul": (
        matmul, {"a": _POINTER, "b": _POINTER, "c": _POINTER, "n": "i32", "k": "i32"}, {"M": 128, "N": 64, "K": 64},
    ),
    "layer_norm": (
        layer_norm, {"x": _POINTER, "y": _POINTER, "weight": _POINTER, "width": "i32"}, {"EPS": 1e-5, "BLOCK": 1024},
    ),
    "attention": (
        attention, {"q": _POINTER, "k": _POINTER, "v": _POINTER, "o": _POINTER, "length": "i32", "scale": "fp32"},
        {"M": 128, "N": 64, "D": 64},
    ),
}  # fmt: skip


def cubin(name: str, target: str) -> bytes:
    """Machine code of a kernel of `KERNELS` for ``target``."""
    function, types, constants = KERNELS[name]
    signature = {**types, **dict.fromkeys(constants, "constexpr")}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(types.values()) if kind != "fp32"}
    source = ASTSource(
        function, signature, {(len(types) + i,): value for i, value in enumerate(constants.values())}, aligned
    )
    made = triton.compile(
        source, target=GPUTarget("cuda", CAPABILITY[target], 32), options={"num_warps": 4, "num_stages": 3}
    )
    return made.asm["cubin"]
