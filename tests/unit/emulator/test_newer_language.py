"""Names that Gluon has since 3.7, and launches that begin before the one before has ended (PDL)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import tilecast
from tilecast.emulator.errors import DeadlockError, EmulationError, RaceError, WrongResultError

pytest.importorskip("greenlet")

HEAD = """
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import CachePolicy, FractionalEvictionPolicy
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
L = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
"""


def load(folder: Path, body: str):
    path = folder / "kernel.py"
    path.write_text(HEAD + body)
    return tilecast.emulated(str(path), machine="h200")


def test_sums_along_bits_and_fp4(tmp_path: Path) -> None:
    module = load(
        tmp_path,
        """
@gluon.jit
def kernel(x, out, bits, wide):
    i = gl.arange(0, 128, layout=L)
    v = gl.load(x + i, cache_policy=CachePolicy(l2=FractionalEvictionPolicy("evict_first", 0.5)))
    gl.store(out + i, gl.cumsum(v, 0))
    gl.store(out + 128 + i, v.cumprod(0))
    gl.store(out + 256, gl.xor_sum(v, 0))
    gl.store(out + 257, v.reduce_or(0))
    gl.store(out + 384 + i, gl.umulhi(v * 65536, i * 65536))
    gl.store(wide + gl.arange(0, 256), gl.fp4_to_fp(gl.load(bits + i), gl.float32, 0))
    both = (i < 64).logical_and(v == 0).logical_or(i == 127)
    gl.store(out + 512 + i, gl.expect_zero(v, i < 1) + both.to(gl.int32))
""",
    )
    x = np.arange(128, dtype=np.int32) % 5
    out, wide = np.zeros(640, np.int32), np.zeros(256, np.float32)
    packed = np.arange(128, dtype=np.uint8) * 7
    module.kernel[(1,)](x, out, packed, wide)
    assert np.array_equal(out[:128], np.cumsum(x)) and np.array_equal(out[128:256], np.cumprod(x))
    assert out[256] == np.bitwise_xor.reduce(x) and out[257] == 7
    assert np.array_equal(out[384:512], x * np.arange(128))
    assert np.array_equal(out[512:], x + ((np.arange(128) < 64) & (x == 0) | (np.arange(128) == 127)))
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    assert np.array_equal(wide[::2], table[packed & 15]) and np.array_equal(wide[1::2], table[packed >> 4])
    x[0] = 3
    with pytest.raises(WrongResultError, match="expect_zero"):
        module.kernel[(1,)](x, out, packed, wide)


FLAGS = """
@gluon.jit
def kernel(flag, data, out, WAIT: gl.constexpr, STORE: gl.constexpr):
    i = gl.arange(0, 128, layout=L)
    if gl.program_id(0) == 0:
        gl.store(data + i, i)
        if STORE:
            gl.barrier()
            gl.atomic_store(flag, 7)
            gl.atomic_cas(flag, 7, 8)
    else:
        if WAIT:
            gl.atomic_poll(flag, 8)
        gl.store(out + i, gl.load(data + i) + gl.atomic_load(flag))
"""


def test_flags_that_programs_store_and_wait_for(tmp_path: Path) -> None:
    module = load(tmp_path, FLAGS)

    def run(**options: bool):
        flag, data, out = np.zeros(1, np.int32), np.zeros(128, np.int32), np.zeros(128, np.int32)
        module.kernel[(2,)](flag, data, out, **options)
        return out

    assert np.array_equal(run(WAIT=True, STORE=True), np.arange(128) + 8)
    with pytest.raises(RaceError, match="program 0 has stored to it"):
        run(WAIT=False, STORE=True)
    with pytest.raises(DeadlockError, match=r"element 0 of a tensor.* to become 8"):
        run(WAIT=True, STORE=False)


DEPENDENT = """
@gluon.jit
def first(x):
    i = gl.arange(0, 128, layout=L)
    gdc_launch_dependents()
    gl.store(x + i, i)

@gluon.jit
def second(x, out, WAITS: gl.constexpr):
    i = gl.arange(0, 128, layout=L)
    if WAITS:
        gdc_wait()
    gl.store(out + i, gl.load(x + i) + 1)
"""


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("overlaps", [False, True])
def test_a_launch_that_overlaps_waits_for_the_one_before(waits: bool, overlaps: bool, tmp_path: Path) -> None:
    module = load(tmp_path, DEPENDENT)
    x, out = np.zeros(128, np.int32), np.zeros(128, np.int32)
    module.first[(1,)](x)
    if overlaps and not waits:
        with pytest.raises(RaceError, match=r"gdc_wait\(\) is missing"):
            module.second[(1,)](x, out, WAITS=waits, launch_pdl=overlaps)
        return
    module.second[(1,)](x, out, WAITS=waits, launch_pdl=overlaps)
    assert np.array_equal(out, np.arange(128) + 1)


def test_aggregates_with_other_values(tmp_path: Path) -> None:
    module = load(
        tmp_path,
        """
@gluon.aggregate
class Pair:
    a: gl.tensor
    b: gl.tensor

@gluon.jit
def kernel(out, NAME: gl.constexpr):
    pair = Pair(gl.to_tensor(1), gl.to_tensor(2))
    other = gl.aggregate_replace(pair, b=gl.to_tensor(5)) if NAME else gl.aggregate_replace(pair, c=0)
    gl.store(out, pair.b * 10 + other.b)
""",
    )
    out = np.zeros(1, np.int32)
    module.kernel[(1,)](out, NAME=True)
    assert out[0] == 25
    with pytest.raises(EmulationError, match="no field 'c'"):
        module.kernel[(1,)](out, NAME=False)
