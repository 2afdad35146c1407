"""A row's products are its own, wherever it lies in a tile."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tilecast.emulator.values.products import accumulated, matrix_product, wide


@pytest.mark.parametrize("kind", (np.float16, np.float32))
@pytest.mark.parametrize(("rows", "k", "columns"), ((64, 16, 64), (64, 128, 128), (128, 576, 64)))
def test_a_row_gets_the_same_bits_wherever_it_lies(rows: int, k: int, columns: int, kind: type) -> None:
    draw = np.random.default_rng(rows + k)
    a, b = (draw.standard_normal(shape).astype(np.float16).astype(kind) for shape in ((rows, k), (k, columns)))
    whole = matrix_product(a, b)
    order = draw.permutation(rows)
    assert whole.dtype == np.float32
    assert np.array_equal(matrix_product(a[order], b), whole[order])
    assert np.array_equal(matrix_product(np.ascontiguousarray(a.T).T, np.asfortranarray(b)), whole)
    assert np.array_equal(matrix_product(a[7:23], b), whole[7:23])
    np.testing.assert_allclose(whole, a.astype(np.float64) @ b.astype(np.float64), rtol=1e-6, atol=1e-5)


def test_values_that_are_no_numbers_stay_in_their_rows() -> None:
    a, b = np.ones((64, 32), np.float32), np.ones((32, 8), np.float32)
    a[3, 5], a[9, 0] = np.nan, np.inf
    got = matrix_product(a, b)
    assert np.isnan(got[3]).all() and np.isinf(got[9]).all()
    assert np.array_equal(np.delete(got, (3, 9), 0), np.full((62, 8), 32, np.float32))


@pytest.mark.parametrize("kind", (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.bfloat16, np.int8))
def test_operands_are_widened_exactly(kind: type) -> None:
    values = np.arange(256, dtype=np.uint8).view(kind).reshape(-1, 4)[:, ::2]
    assert wide(values).dtype == np.float32
    assert np.array_equal(wide(values), values.astype(np.float32), equal_nan=True)


def test_a_product_in_two_calls_has_the_bits_of_one() -> None:
    """A kernel may multiply half of a block's keys while the weights of the others are made."""
    draw = np.random.default_rng(5)
    a, b, before = (draw.standard_normal(shape).astype(np.float32) for shape in ((64, 64), (64, 32), (64, 32)))
    whole = accumulated(before, a, b, 16)
    assert np.array_equal(accumulated(accumulated(before, a[:, :32], b[:32], 16), a[:, 32:], b[32:], 16), whole)
    assert np.array_equal(accumulated(None, a[:, :16], b[:16], 16), matrix_product(a[:, :16], b[:16]))
    assert not np.array_equal(before + matrix_product(a, b), whole)  # once, as no tensor core does it
    np.testing.assert_allclose(whole, before + a @ b, rtol=1e-5, atol=1e-5)
