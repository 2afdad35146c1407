"""Blocks of PTX run on whole arrays give the bits that they give register by register."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest

from tilecast.base.data import SHIPPED_KERNELS
from tilecast.emulator.language import ptx
from tilecast.emulator.language.ptx_elementwise import elementwise, elementwise_or_none
from tilecast.emulator.source import Source
from tilecast.emulator.values import dtypes

FMA2 = """{ .reg .b64 a, b, c; mov.b64 a, {$2, $3}; mov.b64 b, {$4, $5}; mov.b64 c, {$6, $7};
    fma.rn.ftz.f32x2 a, a, b, c; mov.b64 {$0, $1}, a; }"""
SCALED = (
    "{ .reg .b64 a, c; mov.b64 a, {$2, $3}; mov.b64 c, 0x3fc000003fc00000; mul.rn.f32x2 a, a, c; mov.b64 {$0, $1}, a; }"
)
MAX3 = "max.NaN.ftz.f32 $0, $1, $2, $3;"
DOWN = "{ .reg .b32 n; add.rm.ftz.f32 n, $1, 0f4b400000; shl.b32 n, n, 23; add.s32 $0, n, $1; }"
#: Four numbers to a word of e4m3, the first in the lowest byte.
PACK4 = """{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
    mov.b32 $0, {low, high}; }"""
#: Two of four neighbours on the special function unit, two shifted.
MIXED = "ex2.approx.ftz.f32 $0, $4; shl.b32 $1, $5, 1; ex2.approx.ftz.f32 $2, $6; shl.b32 $3, $7, 1;"
SPECIAL = np.array([0, -0.0, 1e-40, -1e-40, np.inf, -np.inf, np.nan, 3e38, -3e38, 1.5, 2.0**-126, -7.25], np.float32)


def by_registers(text: str, size: int, given: list[np.ndarray]) -> np.ndarray:
    arrays = np.broadcast_arrays(*given)
    rows = [np.ascontiguousarray(array).reshape(-1, size).T for array in arrays]
    columns = ptx.run(text, rows, size)
    return np.stack([column.view(np.uint32) for column in columns], 1).reshape(arrays[0].shape)


def values(*shape: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    drawn = rng.standard_normal(shape).astype(np.float32) * np.float32(2.0) ** rng.integers(-140, 120, shape)
    return np.where(rng.random(shape) < 0.3, rng.choice(SPECIAL, shape), drawn).astype(np.float32)


def same(one: np.ndarray, other: np.ndarray) -> bool:
    a, b = one.view(np.uint32), other.view(np.uint32)
    return bool(((a == b) | (np.isnan(a.view(np.float32)) & np.isnan(b.view(np.float32)))).all())


@pytest.mark.parametrize(
    ("text", "size", "operands", "ways"), [(FMA2, 2, 3, 1), (SCALED, 2, 1, 1), (MAX3, 1, 3, 1), (DOWN, 1, 1, 1), (PACK4, 1, 4, 1), (MIXED, 4, 1, 2)]
)  # fmt: skip
def test_the_bits_are_those_of_the_registers(text: str, size: int, operands: int, ways: int) -> None:
    given = [values(128, 8, seed=number) for number in range(operands)]
    assert len(elementwise(text, size, size, operands) or ()) == ways
    made = elementwise_or_none(text, size, size, given, dtypes.FP32)
    assert same(made, by_registers(text, size, given))


def test_four_numbers_to_a_word() -> None:
    """Each byte is its number in e4m3, nearest even: too large ones become 448, a NaN stays one."""
    given = [np.array(column, np.float32) for column in ([1.0, 2.5], [-448.0, 1e9], [17.0, np.nan], [2.0**-9, -0.0])]
    words = elementwise_or_none(PACK4, 1, 1, given, dtypes.INT32).view(np.uint8).reshape(2, 4)
    assert words[0].view(ml_dtypes.float8_e4m3fn).astype(float).tolist() == [1.0, -448.0, 16.0, 2.0**-9]
    assert words[1, [0, 1, 3]].view(ml_dtypes.float8_e4m3fn).astype(float).tolist() == [2.5, 448.0, 0.0]
    assert np.isnan(words[1].view(ml_dtypes.float8_e4m3fn)[2].astype(float))


def test_operands_that_broadcast_are_not_spread_out_first() -> None:
    given = [values(64, 8), values(64, 1, seed=1), np.asarray(np.float32(3))]
    assert same(elementwise_or_none(FMA2, 2, 2, given, dtypes.FP32), by_registers(FMA2, 2, given))


@pytest.mark.parametrize("name", ["blackwell_ws_d64_full_b300", "blackwell_ws_d128_causal", "blackwell_fp8_d128_full"])
def test_blocks_of_shipped_kernels(name: str) -> None:
    """Every text of PTX that stands in the file as it is, with as many neighbours as outputs."""
    text = Source(SHIPPED_KERNELS / f"{name}.py").text
    blocks = [
        block
        for block in re.findall(r'"""(\{ \.reg .*?)"""', text, re.DOTALL)
        if "%" not in block and "{{" not in block
    ]
    tried = 0
    for block in blocks:
        numbers = {int(number) for number in re.findall(r"\$(\d+)", block)}
        size = 2
        operands = (len(numbers) - size) // size
        if len(numbers) != size * (operands + 1) or elementwise(block, size, size, operands) is None:
            continue
        given = [values(32, 4, seed=number) for number in range(operands)]
        assert same(elementwise_or_none(block, size, size, given, dtypes.FP32), by_registers(block, size, given))
        tried += 1
    assert tried


@pytest.mark.parametrize(
    ("text", "size", "operands"),
    [
        # Each takes the other's; a vote of all; a register that outlives the block; one that an earlier block left.
        ("mov.b32 $0, $3; mov.b32 $1, $2;", 2, 1),
        ("{ .reg .pred p; setp.gt.f32 p, $1, $2; vote.sync.any.pred p, p, -1; selp.b32 $0, $1, $2, p; }", 1, 2),
        ("mov.b32 kept, $1; mov.b32 $0, $1;", 1, 1),
        ("add.s32 $0, $1, kept;", 1, 1),
    ],
)
def test_what_neighbours_or_blocks_share_is_left_to_the_registers(text: str, size: int, operands: int) -> None:
    assert elementwise(text, size, size, operands) is None


def test_numbers_that_are_no_32_bits_are_left_to_the_registers() -> None:
    assert elementwise_or_none(MAX3, 1, 1, [np.zeros((4, 4), np.float16)] * 3, dtypes.FP32) is None
