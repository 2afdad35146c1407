"""Names that Gluon has since 3.7, and launches that begin before the one before has ended (PDL)."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

import tilecast
from tilecast.emulator.errors import DeadlockError, EmulationError, RaceError, WrongResultError
from tilecast.emulator.values.layouts import BlockedLayout, NvmmaDistributedLayout, SliceLayout
from tilecast.emulator.values.registers import linear_of

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


TELLING = """
@gluon.jit
def first(x, flag, ORDER: gl.constexpr):
    i = gl.arange(0, 128, layout=L)
    gl.store(x + i, i)
    gl.barrier()
    gl.atomic_xchg(flag, 8, sem=ORDER)

@gluon.jit
def second(x, flag, out, ORDER: gl.constexpr):
    i = gl.arange(0, 128, layout=L)
    while gl.atomic_add(flag, 0, sem=ORDER) != 8:
        pass
    gl.store(out + i, gl.load(x + i) + 1)
"""


@pytest.mark.parametrize("told", ["release", "relaxed"])
@pytest.mark.parametrize("asked", ["acquire", "relaxed"])
def test_a_launch_that_overlaps_may_be_told_by_an_atomic_of_the_one_before(told: str, asked: str, tmp_path: Path) -> None:  # fmt: skip
    module = load(tmp_path, TELLING)
    x, flag, out = np.zeros(128, np.int32), np.zeros(1, np.int32), np.zeros(128, np.int32)
    module.first[(1,)](x, flag, ORDER=told)
    if (told, asked) != ("release", "acquire"):
        with pytest.raises(RaceError, match=r"the launch before, which may still run \(launch_pdl\), stores to it"):
            module.second[(1,)](x, flag, out, ORDER=asked, launch_pdl=True)
        return
    module.second[(1,)](x, flag, out, ORDER=asked, launch_pdl=True)
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


BY_THREAD = """
W = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))


def rotated(outputs, inputs):
    (out,), (x, scale) = outputs, inputs
    return "\\n".join(f"mul.f32 {dst}, {src}, {scale[0]};" for dst, src in zip(out, x[1:] + x[:1]))


def first(outputs, inputs):
    return f"mov.b32 {outputs[0][0]}, {inputs[0][0]};"


@gluon.jit
def kernel(x, out, firsts):
    i = gl.arange(0, 64, layout=gl.SliceLayout(1, W))[:, None] * 32 + gl.arange(0, 32, layout=gl.SliceLayout(0, W))[None, :]
    v = gl.load(x + i)
    gl.store(out + i, gl.inline_asm(rotated, ("=f", "f", "f"), [v, 2.0], gl.distributed_type(gl.float32, [64, 32], W), is_pure=True))
    whole, number = gl.inline_asm("mov.b32 $0, $2; mov.b32 $1, 7;", "=r,=r,r", [gl.arange(0, 128, layout=L)], [gl.arange(0, 128, layout=L).type, gl.int32])
    gl.store(firsts + gl.arange(0, 128, layout=L), whole + number)


@gluon.jit
def different(x):
    gl.inline_asm(first, ("=r", "r"), [gl.load(x + gl.arange(0, 128, layout=L))], gl.float32)
"""


def test_inline_asm_sees_the_registers_of_a_thread_in_their_order(tmp_path: Path) -> None:
    module = load(tmp_path, BY_THREAD)
    x = np.arange(2048, dtype=np.float32)
    out, firsts = np.zeros(2048, np.float32), np.zeros(128, np.int32)
    module.kernel[(1,)](x, out, firsts)
    assert np.array_equal(firsts, np.arange(128) + 7)
    # Registers of wgmma: a neighbour, eight rows further, then every eight columns; the last one is followed by the first.
    row, column = (n.reshape(-1) for n in np.indices((64, 32)))
    number = (column & 1) | (row >> 3 & 1) << 1 | (column >> 3) << 2
    after = (number + 1) % 16
    wanted = ((row & ~8) | (after >> 1 & 1) << 3) * 32 + ((column & ~25) | (after & 1) | (after >> 2) << 3)
    assert np.array_equal(out, 2.0 * wanted)
    with pytest.raises(EmulationError, match="a scalar result of inline_asm differs between threads"):
        module.different[(1,)](x)


def test_layouts_become_linear_ones_as_triton_has_them() -> None:
    wgmma = NvmmaDistributedLayout([3, 0], [4, 1], [16, 32, 16])
    # Printed by Triton 3.9's to_linear_layout, compiled offline.
    found = linear_of(wgmma, (128, 64))
    assert found.reg_bases == [[0, 1], [8, 0], [0, 8], [0, 16], [0, 32], [64, 0]]
    assert (found.lane_bases, found.warp_bases) == ([[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]])
    assert linear_of(wgmma, (64, 16)).reg_bases == [[0, 1], [8, 0], [0, 8], [0, 0]]
    sync = linear_of(NvmmaDistributedLayout([2, 0], [2, 2], [16, 8]), (64, 64))
    assert sync.reg_bases == [[0, 1], [8, 0], [0, 16], [0, 32], [32, 0]] and sync.warp_bases == [[0, 8], [16, 0]]
    part = linear_of(SliceLayout(1, BlockedLayout([1, 2], [4, 8], [2, 2], [1, 0])), (64,))
    assert (part.reg_bases, part.lane_bases) == ([[8], [16], [32]], [[0], [0], [0], [1], [2]])


def test_methods_and_functions_of_one_element(tmp_path: Path) -> None:
    module = load(
        tmp_path,
        """
from triton.experimental.gluon.language.extra import libdevice


@gluon.jit
def kernel(x, out, bits, counts):
    i = gl.arange(0, 128, layout=L)
    v = gl.load(x + i)
    gl.store(out + i, v.sigmoid())
    (out + 128 + i).store(libdevice.tanh(v) + libdevice.copysign(libdevice.round(v), v))
    gl.store(out + 256 + i, libdevice.normcdf(v).flip())
    gl.store(bits + i, libdevice.float_as_int(v))
    n = gl.load(bits + i)
    gl.store(bits + 128 + i, libdevice.popc(n) + 100 * libdevice.clz(n))
    gl.store(bits + 256 + i, libdevice.float2int_rz(v) + 100 * libdevice.ffs(n) + libdevice.isnan(v))
    (counts + i % 4).atomic_add(1)
""",
    )
    x = np.linspace(-4, 4, 128, dtype=np.float32)
    out, bits, counts = np.zeros(384, np.float32), np.zeros(384, np.int32), np.zeros(4, np.int32)
    module.kernel[(1,)](x, out, bits, counts)
    wide = x.astype(np.float64)
    assert np.allclose(out[:128], 1 / (1 + np.exp(-wide)), rtol=1e-6)
    assert np.allclose(out[128:256], np.tanh(wide) + np.sign(wide) * np.floor(np.abs(wide) + 0.5), rtol=1e-6)
    assert np.allclose(out[256:][::-1], [0.5 * math.erfc(-one / math.sqrt(2)) for one in wide], rtol=1e-6)
    words = x.view(np.uint32)
    assert np.array_equal(bits[:128], x.view(np.int32)) and np.array_equal(counts, [32] * 4)
    assert np.array_equal(bits[128:256], [bin(n).count("1") + 100 * (32 - int(n).bit_length()) for n in words])
    assert np.array_equal(bits[256:], np.trunc(x) + 100 * np.array([(int(n) & -int(n)).bit_length() for n in words]))


def test_scale_factors_in_tensor_memory_are_bytes_of_its_rows(tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text(
        """
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout, TensorMemoryScalesLayout, allocate_tensor_memory, mbarrier, tcgen05_commit, tcgen05_copy,
)
ROWS = gl.constexpr(gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0]))


@gluon.jit
def kernel(x, out, WIDE: gl.constexpr):
    places = gl.arange(0, 64, layout=gl.SliceLayout(1, ROWS))[:, None] * 8 + gl.arange(0, 8, layout=gl.SliceLayout(0, ROWS))[None, :]
    shared = gl.allocate_shared_memory(gl.int8, [64, 8], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    shared.store(gl.load(x + places))
    scales = allocate_tensor_memory(gl.int8, [64, 8], TensorMemoryScalesLayout())
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    tcgen05_copy(shared, scales)
    tcgen05_commit(bar)
    mbarrier.wait(bar, 0)
    octets = scales.reinterpret(gl.int8, [128, WIDE], TensorMemoryLayout((128, WIDE), col_stride=1)).load(ROWS)
    rows = gl.arange(0, 128, layout=gl.SliceLayout(1, ROWS))[:, None] * WIDE
    gl.store(out + rows + gl.arange(0, WIDE, layout=gl.SliceLayout(0, ROWS))[None, :], octets)
"""
    )
    module = tilecast.emulated(str(tmp_path / "kernel.py"), machine="b200", triton="3.9")
    x, out = np.arange(512).astype(np.int8), np.zeros((128, 16), np.int8)
    module.kernel[(1,)](x, out, 16)
    # As Triton's own test of the copy has it: each warp finds, of every 32 rows, four factors side by side.
    assert np.array_equal(out, np.tile(x.reshape(2, 32, 2, 4).transpose(1, 2, 0, 3).reshape(32, 16), (4, 1)))
    with pytest.raises(EmulationError, match="seen otherwise than as bytes of 128 rows"):
        module.kernel[(1,)](x, out, 8)
