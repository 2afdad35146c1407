"""Interval arithmetic of integers, and what it says of 32-bit indices of anybody's kernels in larger problems."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilecast.emulator.any_kernel import emulated
from tilecast.emulator.battery.runner import run_battery
from tilecast.emulator.call import read_largest, run_call
from tilecast.emulator.errors import IntegerError, RequestError
from tilecast.emulator.far import Far, LargeLaunch, Larger, combined
from tilecast.emulator.intervals import OPERATIONS, constant
from tilecast.emulator.language.hostside import overflows
from tilecast.emulator.run import kernel_path
from tilecast.emulator.source import Source
from tilecast.emulator.values.scalars import Int

_PYTHON = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "and": lambda a, b: a & b,
    "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b, "min": min, "max": max, "lt": lambda a, b: int(a < b),
    "le": lambda a, b: int(a <= b), "eq": lambda a, b: int(a == b), "ne": lambda a, b: int(a != b),
    "gt": lambda a, b: int(a > b), "ge": lambda a, b: int(a >= b),
    "floordiv": lambda a, b: int(Int(a) // Int(b)), "mod": lambda a, b: int(Int(a) % Int(b)),
    "lshift": lambda a, b: a << b, "rshift": lambda a, b: a >> b,
}  # fmt: skip
_NUMBERS = st.integers(-300, 300)

KERNELS = '''
import numpy as np
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def sums(x_ptr, y_ptr, m, k, stride_m, BLOCK: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    row = gl.program_id(0)WIDE
    cols = gl.arange(0, BLOCK, layout=layout)
    total = gl.zeros([BLOCK], gl.float32, layout)
    start = x_ptr + row * stride_m
    for i in range(0, k, BLOCK):
        total += gl.load(start + (i + cols), mask=i + cols < k, other=0.0)
    gl.store(y_ptr + row, gl.sum(total, 0))


@gluon.jit
def walk(x_ptr, y_ptr, n, BLOCK: gl.constexpr):
    """One program adds up everything; what it adds to is 32 bits wide."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    offs = gl.arange(0, BLOCK, layout=layout)
    total = gl.zeros([BLOCK], gl.float32, layout)
    for i in range(0, n, BLOCK):
        total += gl.load(x_ptr + offs, mask=offs < n, other=0.0)
        y_ptr += 0
        offs += BLOCK
    gl.store(y_ptr, gl.sum(total, 0))


@gluon.jit
def tiles(x_ptr, y_ptr, m, n, stride_m, BLOCK: gl.constexpr, GROUP: gl.constexpr):
    """Rows of tiles walked together: the numbers of rows and columns come from one program number."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    pid = gl.program_id(0)
    blocks_m, blocks_n = gl.cdiv(m, BLOCK), gl.cdiv(n, BLOCK)
    width = GROUP * blocks_n
    first = pid // width * GROUP
    here = gl.minimum(blocks_m - first, GROUP)
    block_m = first + (pid % width) % here
    block_n = (pid % width) // here
    rows = (block_m * BLOCK).to(gl.int64)
    cols = block_n * BLOCK + gl.arange(0, BLOCK, layout=layout)
    for i in range(BLOCK):
        there = (cols < n) & (rows + i < m)
        at = (rows + i) * stride_m + cols
        gl.store(y_ptr + at, gl.load(x_ptr + at, mask=there, other=0.0), mask=there)


def run_sums(m, k):
    x, y = np.ones((m, k), np.float32), np.zeros(m, np.float32)
    sums[(m,)](x, y, m, k, k, BLOCK=64)
    assert (y == k).all()


def run_walk(n):
    y = np.zeros(1, np.float32)
    walk[(1,)](np.ones(n, np.float32), y, n, BLOCK=64)
    assert y[0] == n


def run_tiles(m, n):
    x = np.random.default_rng(0).standard_normal((m, n)).astype(np.float32)
    y = np.zeros_like(x)
    tiles[(-(-m // 32) * -(-n // 32),)](x, y, m, n, n, BLOCK=32, GROUP=2)
    assert (x == y).all()
'''


def _file(folder: Path, wide: str = "") -> str:
    path = folder / "kernels.py"
    path.write_text(KERNELS.replace("WIDE", wide), encoding="utf-8")
    return str(path)


@given(_NUMBERS, _NUMBERS, _NUMBERS, _NUMBERS, st.sampled_from(sorted(_PYTHON)), st.data())
def test_an_interval_holds_what_the_operation_gives(a: int, b: int, c: int, d: int, name: str, data: Any) -> None:
    left, right = sorted((a, b)), sorted((c, d))
    if name in ("lshift", "rshift"):
        right = [abs(n) % 9 for n in right]
        right.sort()
    x, y = (data.draw(st.integers(*ends)) for ends in (left, right))
    # A range about 0 is taken for its divisors above 0, if there are any.
    if name in ("floordiv", "mod") and (y == 0 or (y < 0 < right[1])):
        return
    low, high = OPERATIONS[name](constant(*left), constant(*right))[0]
    assert low <= _PYTHON[name](x, y) <= high


def test_what_outgrows_64_bits_stays_large() -> None:
    product = OPERATIONS["mul"](constant(2**50, 2**60), constant(-(2**50), 2**50))
    assert product[0, 0] < -(2**60) and product[0, 1] > 2**60


def test_a_narrow_row_offset_is_listed_with_its_expression_and_a_wide_one_is_not(tmp_path: Path) -> None:
    found = run_call(_file(tmp_path), "run_sums(7, 1000)", None, "late", 0, None)
    assert found.right and len(found.overflows) == 1
    assert re.search(r"line 13: .*row \* stride_m is 0 to \d{10} with m \d+ \(here 7\)", found.overflows[0])
    assert "larger     line 13" in found.text
    assert not run_call(_file(tmp_path, ".to(gl.int64)"), "run_sums(7, 1000)", None, "late", 0, None).overflows


def test_what_a_loop_adds_to_is_followed_to_its_last_turn(tmp_path: Path) -> None:
    found = run_call(_file(tmp_path), "run_walk(300)", None, "late", 0, None)
    assert len(found.overflows) == 1 and "line 25:" in found.overflows[0]
    assert re.search(r"problems: offs is \d+ to \d{10} with n", found.overflows[0])


def test_rows_of_tiles_that_are_walked_together_are_no_false_alarm(tmp_path: Path) -> None:
    found = run_call(_file(tmp_path), "run_tiles(200, 130)", None, "late", 0, None)
    assert found.right and not found.overflows


def test_below_the_largest_numbers_that_were_asked_for_an_overflow_is_an_error(tmp_path: Path) -> None:
    path = _file(tmp_path)
    x, y = np.ones((7, 1000), np.float32), np.zeros(7, np.float32)
    kernel = emulated(path, largest={"m": 100_000, "k": 20_000}).sums
    kernel[(7,)](x, y, 7, 1000, 1000, BLOCK=64)
    assert not overflows(kernel.session) and (y == 1000).all()
    with pytest.raises(IntegerError, match=r"row \* stride_m is 0 to 2999970000 with m 100000 .* k 30000"):
        emulated(path, largest={"m": 100_000, "k": 30_000}).sums[(7,)](x, y, 7, 1000, 1000, BLOCK=64)
    with pytest.raises(RequestError, match="the kernel has no number 'j'; it has m, k, stride_m"):
        emulated(path, largest={"j": 5}).sums[(7,)](x, y, 7, 1000, 1000, BLOCK=64)
    with pytest.raises(RequestError, match="m: expected 7 or more"):
        emulated(path, largest={"m": 5}).sums[(7,)](x, y, 7, 1000, 1000, BLOCK=64)


def test_largest_is_read_from_text() -> None:
    assert read_largest("M=65536, N=8192") == {"M": 65536, "N": 8192} and read_largest(None) == {}
    with pytest.raises(RequestError, match="expected NAME=NUMBER"):
        read_largest("M=many")


#: Kernel, what is made narrow, by what it is replaced, problems until it is found.
PLANTED = [
    ("hopper_serve_d128", "item.b.to(gl.int64) * (rows.stride_qb * 8)", "item.b * (rows.stride_qb * 8)", 1),
    ("hopper_serve_d128", "b_long = item.b.to(gl.int64)", "b_long = item.b", 1),
    ("blackwell_serve_d64", "gl.load(batch.cu_q + item.b).to(gl.int64) * (", "gl.load(batch.cu_q + item.b) * (", 2),
    ("hopper_prefill_d64", "item.b.to(gl.int64) * stride_b", "item.b * stride_b", 6),
    ("hopper_fp8_d64_full", ".to(gl.int64)", ".to(gl.int32)", 3),
    ("gemm_hopper_short", "number // (GROUP_M", "number * TILE_M * TILE_N // (TILE_M * TILE_N * GROUP_M", 6),
]


@pytest.mark.parametrize(("kernel", "wide", "narrow", "most"), PLANTED)
def test_a_place_that_loses_its_64_bits_is_found_in_every_family(
    kernel: str, wide: str, narrow: str, most: int
) -> None:
    text = kernel_path(kernel).read_text(encoding="utf-8")
    assert wide in text
    found = run_battery(Source(f"{kernel}.py", text.replace(wide, narrow)), most=most)
    assert [failure.kind for failure in found.failures] == ["integer"]
    assert "a 32-bit integer overflows in larger problems" in found.failures[0].message


def test_what_is_bounded_on_one_side_only_is_wide_on_the_other() -> None:
    """A number that is not known well, bounded from above: its lower end proves nothing, also in a loop that begins or ends there."""
    larger = Larger([LargeLaunch("large", {"n": 2**26}, (4,))], fails=True)
    n = larger.argument("n")
    assert n is not None
    loose = Int(1).sampled(Far(larger, np.stack([-n.values[:, 0], n.values[:, 1]], -1), exact=False))
    known = Int(1).sampled(n)
    below = combined("min", loose, known, False)
    assert below is not None
    assert not below.exact
    # -2^32 to 2^32: undecided, not an error.
    wrapped = combined("mul", Int(1).sampled(below), Int(64), False)
    assert wrapped is not None
    assert wrapped.over
    turn = larger.counter((Int(0), Int(3).sampled(wrapped), Int(1)))
    assert turn is not None
    assert combined("add", Int(0).sampled(turn), Int(64), False) is not None
    # From 0 on it is known well: the same product is an error then.
    positive = Int(1).sampled(Far(larger, np.stack([0 * n.values[:, 0], 2 * n.values[:, 1]], -1), exact=False))
    bounded = combined(
        "min", positive, Int(1).sampled(Far(larger, np.stack([0 * n.values[:, 0], n.values[:, 1]], -1))), False
    )
    assert bounded is not None
    assert bounded.exact
    with pytest.raises(IntegerError):
        combined("mul", Int(1).sampled(bounded), Int(64), False)
