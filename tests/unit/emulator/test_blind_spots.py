"""Bugs that schedules and results of a run do not show: what a wait tells, who knows of init, which wait was too weak."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilecast
from tilecast.emulator.errors import (
    AllocationError,
    DeadlockError,
    EmulationError,
    IntegerError,
    LayoutError,
    RaceError,
    UninitializedError,
)
from tilecast.emulator.run import emulate, kernel_path

IMPORTS = """
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait,
)

FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])

"""

HOPPER = "hopper_ws_d128_full"


def module(tmp_path: Path, body: str, **options: Any) -> types.ModuleType:
    path = tmp_path / "kernels.py"
    path.write_text(IMPORTS + body)
    found: types.ModuleType = tilecast.emulated(path, **options)
    return found


SCHEDULES = [("late", 0), *(("random", seed) for seed in range(6))]

#: The first role arrives three times and stores in between; the second waits once and loads.
AHEAD = """
@gluon.jit
def writer(cell, bar, go):
    mbarrier.arrive(bar, count=1)
    cell.store(gl.full([128], 1.0, gl.float32, layout=FLAT))
    mbarrier.arrive(bar, count=1)
    mbarrier.arrive(bar, count=1)


@gluon.jit
def reader(cell, bar, go, out):
    mbarrier.wait(bar, 0)
    MORE
    gl.store(out + gl.arange(0, 128, layout=FLAT), cell.load(FLAT))


@gluon.jit
def kernel(out):
    cell = gl.allocate_shared_memory(gl.float32, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(bars.index(0), count=1)
    mbarrier.init(bars.index(1), count=1)
    gl.warp_specialize([(writer, (cell, bars.index(0), bars.index(1))), (reader, (cell, bars.index(0), bars.index(1), out))], [4], [64])
"""


@pytest.mark.parametrize(("mode", "seed"), SCHEDULES)
def test_a_wait_tells_what_the_earliest_phase_of_its_parity_told(tmp_path: Path, mode: str, seed: int) -> None:
    out = np.zeros(128, np.float32)
    run = module(tmp_path, AHEAD.replace("MORE", "pass"), mode=mode, seed=seed).kernel[(1,)]
    # Whoever comes late to the wait finds the phase gone: at random moments it may be a deadlock instead.
    with pytest.raises(RaceError if mode == "late" else EmulationError, match=r"line \d+: ") as caught:
        run(out)
    if isinstance(caught.value, RaceError):
        assert "race on shared memory cell" in str(caught.value)
        assert "cell.load(FLAT)" in str(caught.value) and "cell.store(gl.full" in str(caught.value)


@pytest.mark.parametrize(("mode", "seed"), SCHEDULES)
def test_a_wait_for_the_next_phase_as_well_orders_the_store(tmp_path: Path, mode: str, seed: int) -> None:
    out = np.zeros(128, np.float32)
    body = AHEAD.replace("MORE", "mbarrier.arrive(go, count=1)\n    mbarrier.wait(bar, 1)").replace(
        "    mbarrier.arrive(bar, count=1)\n    mbarrier.arrive(bar, count=1)\n",
        "    mbarrier.wait(go, 0)\n    mbarrier.arrive(bar, count=1)\n",
    )
    module(tmp_path, body, mode=mode, seed=seed).kernel[(1,)](out)
    assert (out == 1).all()


#: The default role initialises; the other one uses the barrier, told of it or not.
INIT = """
@gluon.jit
def first(bar, told):
    mbarrier.init(bar, count=1)
    TELL
    mbarrier.arrive(bar, count=1)


@gluon.jit
def second(bar, told):
    ASK
    mbarrier.wait(bar, 0)


@gluon.jit
def kernel(out):
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    told = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(told, count=1)
    gl.warp_specialize([(first, (bar, told)), (second, (bar, told))], [4], [64])
"""


def test_init_by_one_role_is_told_to_the_other(tmp_path: Path) -> None:
    out = np.zeros(1, np.float32)
    with pytest.raises(
        RaceError,
        match=r"race on bar: it is used at line \d+: mbarrier.wait\(bar, 0\), but its init by first at line \d+: mbarrier.init",
    ):
        module(tmp_path, INIT.replace("TELL", "pass").replace("ASK", "pass")).kernel[(1,)](out)
    told = INIT.replace("TELL", "mbarrier.arrive(told, count=1)").replace("ASK", "mbarrier.wait(told, 0)")
    module(tmp_path, told).kernel[(1,)](out)


def hopper(old: str, new: str) -> str:
    text = kernel_path(HOPPER).read_text(encoding="utf-8")
    assert old in text
    return text.replace(old, new, 1)


def attend(text: str) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 1, 400, 128)).astype(np.float16) for _ in range(3))
    emulate(HOPPER, q, k, v, sms=1, text=text)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("s = warpgroup_mma_wait(1, deps=[s])", "s = warpgroup_mma_wait(2, deps=[s])"),
        (
            "    o = warpgroup_mma_wait(0, deps=[o])\n    release",
            "    o = warpgroup_mma_wait(1, deps=[o])\n    release",
        ),
    ],
)
def test_the_wait_that_is_too_weak_is_named(old: str, new: str) -> None:
    weak = next(line for line in new.splitlines() if "warpgroup_mma_wait" in line).strip()
    with pytest.raises(EmulationError) as caught:
        attend(hopper(old, new))
    assert f": {weak} leaves" in str(caught.value)


def test_the_result_of_a_wgmma_passes_through_its_wait() -> None:
    with pytest.raises(UninitializedError, match=r"did not pass through the wait at line \d+: warpgroup_mma_wait\(1"):
        attend(hopper("s = warpgroup_mma_wait(1, deps=[s])", "warpgroup_mma_wait(1, deps=[o])"))
    with pytest.raises(LayoutError, match="warpgroup_mma_wait needs deps"):
        attend(hopper("s = warpgroup_mma_wait(1, deps=[s])", "warpgroup_mma_wait(1)"))


#: (kernel, what becomes what, what is said): Triton's compiler refuses each, or spills hundreds of bytes (the last).
REFUSED = {
    "two warps for a layout of four": (
        HOPPER, "            row += g * ROWS\n",
        "            row += g * ROWS + 0 * gl.max(gl.arange(0, 64, layout=gl.BlockedLayout([1], [32], [2], [0])), 0)\n",
        r"line \d+: .*: blocked layout .* is made for 2 warps, the role has 4",
    ),
    "a tile of another swizzle than its tensor map": (
        HOPPER, "[SLOTS] + desc.block_type.shape, desc.layout)", "[SLOTS] + desc.block_type.shape, gl.NVMMASharedLayout(64, 16, 4))",
        r"a copy into .*: the tensor map has NVMMA layout \(128-byte swizzle.*, the shared memory NVMMA layout \(64-byte",
    ),
    "a layout of other elements": (
        HOPPER, "[SLOTS] + desc.block_type.shape, desc.layout)", "[SLOTS] + desc.block_type.shape, gl.NVMMASharedLayout(128, 8, 4))",
        "the layout is made for 8-bit elements, fp16 has 16",
    ),
    "no NVMMA layout": (
        HOPPER, "[SLOTS] + desc.block_type.shape, desc.layout)", "[SLOTS] + desc.block_type.shape, gl.SwizzledSharedLayout(1, 1, 1, [4, 3, 2, 1, 0]))",
        "the copy engine writes what NVMMASharedLayout describes",
    ),
    "registers beyond the file": (
        HOPPER, "], [4, 1], [232, 40])", "], [4, 1], [248, 248])",
        r"the partitions ask for 63488 of 65536 registers, which leaves 16 to a thread of the default partition's 4 warps",
    ),
    "tensor memory in blocks of 64 rows": (
        "blackwell_ws_d128_full", "TensorMemoryLayout((128, columns)", "TensorMemoryLayout((64, columns)",
        "has blocks of 64 rows, and a row to a lane needs blocks of all 128",
    ),
    "tensor memory of one CTA in a pair": (
        "blackwell_ws_d128_full_pair", "cga_layout=[[1, 0]], two_ctas=True)", "cga_layout=[[1, 0]])",
        "the accumulator's layout has two_ctas=False, the program has 2 CTAs",
    ),
    "a pair divides Q by columns": (
        "blackwell_ws_d128_full_pair", "(q, ROWS, [0, 0, 1, 0])", "(q, ROWS, [0, 0, 0, 1])",
        "divide the rows of the left operand, and here they divide the other dimension",
    ),
    "a pair divides K by columns": (
        "blackwell_ws_d128_full_pair", "(k, TILE_N, [0, 0, 1, 0])", "(k, TILE_N, [0, 0, 0, 1])", "line ",
    ),
    "a pair divides V by rows": (
        "blackwell_ws_d128_full_pair", "(v, TILE_N, [0, 0, 0, 1])", "(v, TILE_N, [0, 0, 1, 0])", "line ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_compiler_refuses_is_refused_by_the_line(name: str) -> None:
    kernel, old, new, says = REFUSED[name]
    text = kernel_path(kernel).read_text(encoding="utf-8")
    assert old in text
    x = np.ones((1, 1, 256, 128), np.float16)
    with pytest.raises((LayoutError, AllocationError), match=says) as caught:
        emulate(kernel, x, x, x, sms=2, text=text.replace(old, new))
    assert "line " in str(caught.value)


@pytest.mark.parametrize("kernel", [HOPPER, "blackwell_ws_d128_causal", "blackwell_ws_d64_full_pair"])
def test_an_index_that_overflows_in_larger_problems_only_is_named(kernel: str) -> None:
    """Each conversion to 64 bits is left out in turn; the tensors that run have a few thousand elements."""
    text = kernel_path(kernel).read_text(encoding="utf-8")
    parts = text.split(".to(gl.int64)")
    assert len(parts) == 5
    x = np.ones((2, 2, 130, 64 if "d64" in kernel else 128), np.float16)
    emulate(kernel, x, x, x, sms=2)
    for i in range(1, len(parts)):
        narrow = ".to(gl.int64)".join(parts[:i]) + ".to(gl.int32)" + ".to(gl.int64)".join(parts[i:])
        line = sum(part.count("\n") for part in parts[:i]) + 1
        with pytest.raises(IntegerError, match=rf"^line {line}: .*overflows in larger problems"):
            emulate(kernel, x, x, x, sms=2, text=narrow)


def test_a_loop_and_a_tile_number_overflow_in_larger_problems() -> None:
    """The first row of a tile is worked out in bytes: 2^21 rows of 4096 bytes are too many, 130 are not."""
    x = np.ones((1, 1, 130, 128), np.float16)
    text = hopper(
        "    rows = own_copy(row) + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))\n    start",
        "    rows = own_copy(row * 4096 // 4096) + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))\n    start",
    )
    with pytest.raises(IntegerError, match=r"row \* 4096 // 4096"):
        emulate(HOPPER, x, x, x, sms=1, text=text)


#: Program 0 stores and says so by a flag; the others wait until it is at least LEAST, in a loop of PTX or of the kernel.
FLAGGED = """
@gluon.jit
def waits(flag, LEAST):
    gl.inline_asm_elementwise(
        \"\"\"{
            .reg .pred early;
            .reg .s32 count;
        again:
            ld.acquire.gpu.global.s32 count, [$1];
            setp.lt.s32 early, count, $2;
            @early bra again;
            mov.s32 $0, count;
        }\"\"\", "=r,l,r", [flag, LEAST], dtype=gl.int32, is_pure=False, pack=1,
    )


@gluon.jit
def kernel(flag, data, out, LEAST: gl.constexpr, HOW: gl.constexpr):
    i = gl.arange(0, 128, layout=FLAT)
    if gl.program_id(0) == 0:
        gl.store(data + i, i + 1)
        gl.barrier()
        gl.atomic_add(flag, 1, sem="release")
    else:
        if HOW == "ptx":
            waits(flag, LEAST)
        elif HOW == "loop":
            while gl.atomic_load(flag) < LEAST:
                pass
        else:
            gl.atomic_add(flag, 0, sem="acquire")
        gl.store(out + gl.program_id(0) * 128 + i, gl.load(data + i))
"""


@pytest.mark.parametrize(("mode", "seed"), SCHEDULES)
@pytest.mark.parametrize("how", ["ptx", "loop"])
def test_a_wait_that_would_have_gone_on_before_learns_of_no_release(
    tmp_path: Path, mode: str, seed: int, how: str
) -> None:
    def run(least: int) -> Any:
        flag, data, out = np.zeros(1, np.int32), np.zeros(128, np.int32), np.zeros((4, 128), np.int32)
        module(tmp_path, FLAGGED, mode=mode, seed=seed).kernel[(4,)](flag, data, out, LEAST=least, HOW=how)
        return out

    assert (run(1)[1:] == np.arange(128) + 1).all()
    # Another value may be read, or program 0 may not have begun: one of them shows, at random moments not each time.
    if mode == "late":
        with pytest.raises(RaceError, match="flags that this program has read do not tell of it: line"):
            run(0)


def test_one_thread_releases_for_other_warps_only_where_they_have_met(tmp_path: Path) -> None:
    def run(triton: str, text: str = FLAGGED) -> Any:
        flag, data, out = np.zeros(1, np.int32), np.zeros(128, np.int32), np.zeros((2, 128), np.int32)
        module(tmp_path, text, triton=triton).kernel[(2,)](flag, data, out, LEAST=1, HOW="ptx")
        return out

    apart = FLAGGED.replace("        gl.barrier()\n", "")
    for triton, text in (("", FLAGGED), ("3.9", apart)):
        assert (run(triton, text)[1] == np.arange(128) + 1).all()
    with pytest.raises(RaceError, match=r"one thread issues the atomic at line \d+: gl.atomic_add.*gl.barrier\(\)"):
        run("", apart)
    # Without the other warps there is nothing to wait for.
    first = apart.replace("gl.store(data + i, i + 1)", "gl.store(data, 1)").replace(
        "gl.load(data + i)", "gl.load(data)"
    )
    assert (run("", first)[1] == 1).all()


def test_an_acquire_without_a_condition_is_found_by_another_order_of_programs(tmp_path: Path) -> None:
    found = []
    for seed in range(4):
        flag, data, out = np.zeros(1, np.int32), np.zeros(128, np.int32), np.zeros((2, 128), np.int32)
        run = module(tmp_path, FLAGGED, mode="random", seed=seed).kernel[(2,)]
        try:
            run(flag, data, out, LEAST=0, HOW="add")
            found.append(bool((out[1] == np.arange(128) + 1).all()))
        except RaceError:
            found.append(False)
    assert not all(found)


def test_programs_on_the_machine_at_once_wait_for_each_other_and_a_later_one_does_not_help(tmp_path: Path) -> None:
    text = FLAGGED.replace("program_id(0) == 0", "program_id(0) == 3")

    def run(sms: int) -> Any:
        flag, data, out = np.zeros(1, np.int32), np.zeros(128, np.int32), np.zeros((4, 128), np.int32)
        made = module(tmp_path, text, mode="random", seed=0, sms=sms)
        made.kernel[(4,)](flag, data, out, LEAST=1, HOW="ptx")
        return out

    assert (run(4)[:3] == np.arange(128) + 1).all()
    with pytest.raises(DeadlockError, match="element 0 of a tensor"):
        run(2)
