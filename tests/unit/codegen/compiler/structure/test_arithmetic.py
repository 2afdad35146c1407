"""Integer instructions as functions of words, against what plain arithmetic says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilecast.codegen.compiler.structure import arithmetic as word

WORDS = st.integers(0, word.MASK)


@given(WORDS, WORDS, WORDS)
def test_lop3_is_the_bitwise_function_of_its_table(a: int, b: int, c: int) -> None:
    assert word.lop3(a, b, c, 0xC0) == a & b
    assert word.lop3(a, b, c, 0x3C) == a ^ b
    assert word.lop3(a, b, c, 0xFE) == a | b | c
    assert word.lop3(a, b, c, 0x33) == ~b & word.MASK


@given(WORDS, st.integers(0, 31), WORDS)
def test_funnel_shifts(low: int, amount: int, high: int) -> None:
    assert word.shift(".L.U32", low, amount, high) == low << amount & word.MASK
    assert word.shift(".R.U32.HI", low, amount, high) == high >> amount
    assert word.shift(".R.S32.HI", low, amount, high) == word.signed(high) >> amount & word.MASK
    assert word.shift(".L.U64.HI", low, amount, high) == ((high << 32 | low) << amount) >> 32 & word.MASK
    assert word.shift(".W.WRAP", low, amount, high) is None


@given(WORDS, WORDS)
def test_a_division_by_three_as_compilers_write_it(a: int, b: int) -> None:
    small = a % (1 << 20)
    assert word.wide(small, 0x55555556, 0, 0, False)[1] == small // 3
    low, high = word.wide(a, b, 7, 0, True)
    assert low | high << 32 == a * b + 7


def test_bytes_bits_and_constants() -> None:
    # The address of a barrier in the shared memory of the CTA with rank 1.
    assert word.prmt(0x1, 0x654, 0x38400) == 0x01038400
    assert word.prmt(0x000000FF, 0x8888, 0) == word.MASK
    assert word.extend(".U32", 0xFFFF, 14) == 0x3FFF and word.extend("", 0x8, 4) == 0xFFFFFFF8
    assert word.halves("0", "5.9604644775390625e-08") == 1
    assert word.halves("-QNAN", "x") is None


@pytest.mark.parametrize(
    ("form", "a", "b", "other", "found"),
    [
        (".LT.AND", 0xFFFFFFFF, 0, 1, 1), (".LT.U32.AND", 0xFFFFFFFF, 0, 1, 0), (".NE.U32.AND", 6, 6, 1, 0),
        (".GE.OR", 0, 1, 1, 1), (".EQ.XOR", 2, 2, 1, 0), (".GT.U32.AND.EX", 1, 0, 1, None),
    ],
)  # fmt: skip
def test_comparisons(form: str, a: int, b: int, other: int, found: int | None) -> None:
    assert word.compare(form, a, b, other) == found
