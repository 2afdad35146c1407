"""Kernels that tilecast did not generate: launches, the language beyond our templates, and what is wrong named by line."""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from typer.testing import CliRunner

import tilecast
from tilecast.cli.entry import verbs
from tilecast.emulator.any_kernel import load_any
from tilecast.emulator.errors import (
    AllocationError,
    BarrierError,
    BoundsError,
    EmulationError,
    IntegerError,
    LayoutError,
    RaceError,
    RequestError,
    UninitializedError,
    UnsupportedError,
)

IMPORTS = """
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma, mbarrier, fence_async_shared
from triton.experimental.gluon.language.nvidia.blackwell import allocate_tensor_memory, TensorMemoryLayout

FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
WIDE: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])

"""

SCALE = """
@gluon.jit
def scale(x_ptr, out_ptr, rows, columns, factor, BLOCK: gl.constexpr):
    row = gl.program_id(1)
    places = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, layout=FLAT)
    mask = places < columns
    x = gl.load(x_ptr + row * columns + places, mask=mask)
    gl.store(out_ptr + row * columns + places, x * factor, mask=mask)
"""

#: Through two slots of shared memory: copied in, doubled, stored by the copy engine from the same slot.
PIPELINE = """
@gluon.jit
def double(x_desc, out_desc, blocks, BLOCK: gl.constexpr):
    slots = gl.allocate_shared_memory(x_desc.dtype, [2, BLOCK, 64], x_desc.layout)
    bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    staged = gl.allocate_shared_memory(x_desc.dtype, [BLOCK, 64], x_desc.layout)
    for i in gl.static_range(2):
        mbarrier.init(bars.index(i), count=1)
    for i in range(blocks):
        slot, bar = slots.index(i % 2), bars.index(i % 2)
        mbarrier.expect(bar, x_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(x_desc, [i * BLOCK, 0], bar, slot)
        mbarrier.wait(bar, i // 2 & 1)
        x = slot.load(WIDE)
        fence_async_shared()  # the next copy
        tma.store_wait(pendings=0)  # the slot
        staged.store(x + x)
        fence_async_shared()  # the store
        tma.async_copy_shared_to_global(out_desc, [i * BLOCK, 0], staged)
    for i in gl.static_range(2):
        mbarrier.invalidate(bars.index(i))
    tma.store_wait(pendings=0)  # the end

def launch(x, out):
    layout = gl.NVMMASharedLayout.get_default_for([16, 64], gl.float32)
    x_desc = TensorDescriptor.from_tensor(x, [16, 64], layout)
    out_desc = TensorDescriptor.from_tensor(out, [16, 64], layout)
    double[(1,)](x_desc, out_desc, triton.cdiv(x.shape[0], 16), 16)
"""


def module(tmp_path: Path, body: str, **options: Any) -> types.ModuleType:
    path = tmp_path / "kernels.py"
    path.write_text(IMPORTS + body)
    found: types.ModuleType = tilecast.emulated(path, **options)
    return found


def small(tmp_path: Path, body: str, *args: Any, grid: Any = (1,), **options: Any) -> None:
    """Run the lines of ``body`` as a kernel of ``out``."""
    lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
    module(tmp_path, f"@gluon.jit\ndef kernel(out):\n{lines}\n", **options).kernel[grid](*args)


def test_a_grid_of_two_dimensions_changes_numpy_arrays_in_place(tmp_path: Path) -> None:
    kernel = module(tmp_path, SCALE).scale
    x, out = np.random.default_rng(0).standard_normal((3, 100), np.float32), np.zeros((3, 100), np.float32)
    for _ in range(2):
        # What an earlier launch stored is no race.
        kernel[lambda meta: (triton_cdiv(100, meta["BLOCK"]), 3)](x, out, 3, 100, 2.0, BLOCK=64, num_warps=4)
    assert (out == 2 * x).all()


def triton_cdiv(a: int, b: int) -> int:
    return -(-a // b)


def test_torch_tensors_of_16_bits_are_changed_in_place(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    x, out = torch.randn(2, 100).to(torch.bfloat16), torch.zeros(2, 100, dtype=torch.bfloat16)
    module(tmp_path, SCALE).scale[(2, 2)](x, out, 2, 100, 2.0, 64)
    assert torch.equal(out, x * 2)


def test_a_kernel_of_a_loaded_module_is_found_again_by_its_file(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text("def host(x):\n    import triton\n    return triton.cdiv(x, 4)\n")
    namespace: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), namespace)
    assert tilecast.emulated(namespace["host"])(9) == 3
    jitted = types.SimpleNamespace(fn=namespace["host"])
    assert tilecast.emulated(jitted)(9) == 3
    with pytest.raises(RequestError, match="expected a Gluon kernel"):
        tilecast.emulated(3)


def test_modules_are_imported_by_their_whole_names_too(tmp_path: Path) -> None:
    x, out = np.random.default_rng(1).standard_normal((70, 64), np.float32), np.zeros((70, 64), np.float32)
    whole = "import triton.experimental.gluon.language.nvidia.hopper.tma as tma\n"
    module(tmp_path, whole + PIPELINE, machine="h200").launch(x, out)
    assert (out == 2 * x).all()


@pytest.mark.parametrize(("mode", "seed"), [("late", 0), ("random", 0), ("random", 1)])
def test_copies_both_ways_by_the_copy_engine(tmp_path: Path, mode: str, seed: int) -> None:
    x, out = np.random.default_rng(1).standard_normal((70, 64), np.float32), np.zeros((70, 64), np.float32)
    module(tmp_path, PIPELINE, machine="h200", mode=mode, seed=seed).launch(x, out)
    assert (out == 2 * x).all()


@pytest.mark.parametrize(
    ("line", "error", "message"),
    [
        ("        fence_async_shared()  # the next copy\n", RaceError, "ordinary load at line"),
        ("        fence_async_shared()  # the store\n", RaceError, "ordinary store at line"),
        ("        tma.store_wait(pendings=0)  # the slot\n", RaceError, "staged"),
        ("    tma.store_wait(pendings=0)  # the end\n", RaceError, "may be in flight"),
        ("        mbarrier.wait(bar, i // 2 & 1)\n", EmulationError, "slots"),
    ],
)
@pytest.mark.parametrize(("mode", "seed"), [("late", 0), ("random", 0), ("random", 1)])
def test_what_orders_those_copies_is_missed(
    tmp_path: Path, line: str, error: type, message: str, mode: str, seed: int
) -> None:
    body = PIPELINE.replace(line, "", 1)
    assert body != PIPELINE
    # Two fences stand between a load and the next copy into its slot: without the other, the first one counts.
    if "next copy" in line:
        body = body.replace("        fence_async_shared()  # the store\n", "")
        body = body.replace("tma.async_copy_shared_to_global(out_desc, [i * BLOCK, 0], staged)", "pass")
    x = np.ones((96, 64), np.float32)
    with pytest.raises(error, match=message):
        module(tmp_path, body, machine="h200", mode=mode, seed=seed).launch(x, np.zeros_like(x))


CP_ASYNC = """
smem = gl.allocate_shared_memory(gl.float32, [64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
places = gl.arange(0, 64, FLAT)
async_copy.async_copy_global_to_shared(smem, out + places, mask=places < 40)
async_copy.commit_group()
async_copy.wait_group(0)
gl.store(out + 64 + places, smem.load(FLAT))
"""


def test_cp_async_brings_zeros_where_it_is_masked(tmp_path: Path) -> None:
    out = np.arange(1, 129, dtype=np.float32)
    small(tmp_path, CP_ASYNC, out)
    assert (out[64:] == np.where(np.arange(64) < 40, np.arange(1, 65), 0)).all()


def test_cp_async_that_is_not_waited_for_is_caught(tmp_path: Path) -> None:
    with pytest.raises((UninitializedError, RaceError), match="smem"):
        small(tmp_path, CP_ASYNC.replace("wait_group(0)", "wait_group(1)"), np.ones(128, np.float32))


#: 128 KB each.
ALLOCATIONS = """
layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
blocked: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
zero = gl.zeros([128, 256], gl.float32, blocked)
first = gl.allocate_shared_memory(gl.float32, [128, 256], layout)
first.store(zero)
{between}
for i in {loop}(3):
    smem = gl.allocate_shared_memory(gl.float32, [128, 256], layout)
    smem.store(zero)
    smem.load(blocked)
{after}
"""


@pytest.mark.parametrize("loop", ["range", "gl.static_range"])
def test_memory_that_is_not_live_any_more_is_used_again(tmp_path: Path, loop: str) -> None:
    # As Triton 3.6 and 3.9 compile it: an allocation lives from its statement to its last use.
    small(tmp_path, ALLOCATIONS.format(loop=loop, between="first.load(blocked)", after=""), np.zeros(1, np.float32))
    with pytest.raises(
        AllocationError, match=r"line \d+: smem = .*: smem brings shared memory to 262144 bytes, a CTA has"
    ):
        small(tmp_path, ALLOCATIONS.format(loop=loop, between="", after="first.load(blocked)"), np.zeros(1, np.float32))


BARRIERS = """
bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
mbarrier.init(bars.index(0), count=1)
"""


def test_only_the_use_of_an_index_out_of_range_is_wrong(tmp_path: Path) -> None:
    out = np.zeros(1, np.float32)
    small(tmp_path, BARRIERS + "mbarrier.arrive(bars.index(-1), count=1, pred=False)", out)
    with pytest.raises(BoundsError, match=r"barrier bars\[-1\] of 2"):
        small(tmp_path, BARRIERS + "mbarrier.arrive(bars.index(-1), count=1)", out)


def test_a_barrier_can_be_used_anew_after_it_was_invalidated(tmp_path: Path) -> None:
    once = (
        BARRIERS
        + "mbarrier.arrive(bars.index(0), count=1)\nmbarrier.wait(bars.index(0), 0)\nmbarrier.invalidate(bars.index(0))\n"
    )
    again = "mbarrier.init(bars.index(0), count=1)\nmbarrier.arrive(bars.index(0), count=1)\nmbarrier.wait(bars.index(0), 0)"
    small(tmp_path, once + again, np.zeros(1, np.float32))
    with pytest.raises(BarrierError, match=r"bars\[0\] is used before mbarrier.init"):
        small(tmp_path, once + "mbarrier.arrive(bars.index(0), count=1)", np.zeros(1, np.float32))


def test_several_buffers_of_tensor_memory(tmp_path: Path) -> None:
    body = """
buffers = allocate_tensor_memory(gl.float32, [2, 128, 64], TensorMemoryLayout([128, 64], col_stride=1))
for i in gl.static_range(2):
    buffer = buffers.index(i)
    buffer.store(gl.full([128, 64], i + 1.0, gl.float32, buffer.get_reg_layout()))
for i in gl.static_range(2):
    gl.store(out + i, gl.max(gl.max(buffers.index(i).load(), 1), 0))
"""
    out = np.zeros(2, np.float32)
    small(tmp_path, body, out, machine="b200")
    assert list(out) == [1, 2]


def test_aggregates_joins_reductions_and_atomics(tmp_path: Path) -> None:
    body = """
@gluon.aggregate
class Pair:
    low: gl.tensor
    factor: gl.constexpr

    @gluon.jit
    def combined(self):
        return gl.join(self.low, self.low * self.factor)

@gluon.jit
def larger(a, b):
    return gl.maximum(a, b)

@gluon.jit
def kernel(out, count, SHAPE: gl.constexpr):
    gl.static_assert(SHAPE.value == (4, 8))
    pair = Pair(gl.arange(0, 32, FLAT), factor=3)
    low, high = pair.combined().split()
    most = gl.reduce(high.reshape(SHAPE[0], SHAPE[1]), 1, larger)
    gl.store(out + gl.program_id(2), gl.sum(most, 0))
    gl.atomic_add(count, 1)
"""
    out, count = np.zeros(2, np.int32), np.zeros(1, np.int32)
    module(tmp_path, body).kernel[(2, 3, 2)](out, count, (4, 8))
    assert (list(out), count[0]) == ([3 * (7 + 15 + 23 + 31)] * 2, 12)


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        ("gl.bank_conflicts(out, None)", UnsupportedError, r"line \d+: gl.bank_conflicts.*does not know .*bank_conflicts"),
        ("x = gl.arange(0, 4, FLAT).nonsense", UnsupportedError, r"line \d+: x = .*does not know tensor.nonsense"),
        ("gl.static_assert(1 == 2, 'no')", LayoutError, r"line \d+: gl.static_assert.*a static assertion fails: no"),
        ("x = gl.program_id(0) + 2000000000\ny = x + x", IntegerError, r"line \d+: y = x \+ x"),
        ("gl.store(out + gl.arange(0, 4, FLAT), 1.0)", BoundsError, "element 3 of 3"),
        ("gl.store(out + gl.program_id(0) * 0, gl.program_id(0))", RaceError, "program 0 has stored to it"),
        ("tma.store_wait(pendings=0, nonsense=1)", UnsupportedError, r"line \d+: tma.store_wait.*unexpected keyword"),
    ],
)  # fmt: skip
def test_what_is_wrong_or_missing_is_named_with_its_line(tmp_path: Path, body: str, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        small(tmp_path, body, np.zeros(3, np.float32), grid=(2,))


def test_a_file_beside_it_is_emulated_too_and_quoted_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "other-file.py").write_text(IMPORTS + "@gluon.jit\ndef put(p):\n    gl.store(p + 9, 1.0)\n")
    body = "import importlib\nother = importlib.import_module('other-file')\n@gluon.jit\ndef kernel(p):\n    other.put(p)\n"
    with pytest.raises(BoundsError, match=r"other-file.py line \d+: gl.store"):
        module(tmp_path, body).kernel[(1,)](np.zeros(3, np.float32))


def test_arguments_and_machines_that_make_no_sense(tmp_path: Path) -> None:
    kernel = module(tmp_path, SCALE).scale
    with pytest.raises(RequestError, match="scale: missing a required argument: 'out_ptr'"):
        kernel[(1,)](np.zeros(3, np.float32))
    with pytest.raises(RequestError, match="one to three extents"):
        kernel[(1, 1, 1, 1)](*[np.zeros(3, np.float32)] * 2, 1, 3, 2.0, 64)
    with pytest.raises(RequestError, match="mode: expected late or random"):
        module(tmp_path, SCALE, mode="early")
    session, _ = load_any(str(tmp_path / "kernels.py"), machine="h200")
    assert session.tmem_columns == 0


CALLED = (
    SCALE
    + """
import numpy as np

def test(factor, expected):
    x, out = np.ones((1, 8), np.float32), np.zeros((1, 8), np.float32)
    scale[(1, 1)](x, out, 1, 8, factor, 64)
    assert (out == expected).all(), f"got {out[0, 0]:.0f}"
    return "done"

def result(factor):
    x, out = np.ones((1, 8), np.float32), np.zeros((1, 8), np.float32)
    scale[(1, 1)](x, out, 1, 8, factor, 64)
    return out, [x > 2, "x" * 300]

if __name__ == "__main__":
    test(2.0, 2)
"""
)


@pytest.mark.parametrize(
    ("options", "code", "shown"),
    [
        (["--call", "test(2.0, 2)"], 0, "every access ordered"),
        (["--call", "test(2.0, 2)"], 0, "returned   done"),
        (["--call", "result(3.0)"], 0, "returned   (float32 [1, 8], 3 to 3, mean 3, [bool [1, 8], 0 of 8 true, xxx"),
        (["--call", "result(3.0)"], 0, "x... (300 characters)])"),
        (["--call", "result(float('nan'))[0]"], 0, "returned   float32 [1, 8], no finite number, 8 NaN"),
        (["--call", "result(3.0)[0]", "--whole"], 0, "returned   [[3. 3. 3. 3. 3. 3. 3. 3.]]"),
        (["--main", "--whole"], 2, "--whole is about what --call returns"),
        (["--main"], 0, "in 1 launch"),
        (["--call", "test(2.0, 3)"], 1, "assertion  got 2"),
        (["--call", "__name__"], 0, "nothing was checked"),
        (["--call", "missing(1)"], 2, "functions there: "),
        (["--call", "test("], 2, "expected an expression"),
        (["--call", "test(2.0)"], 2, ": its code ends with "),
        (["--call", "test(2.0, 2)", "--seqlen", "5"], 2, "for generated kernels"),
    ],
)
def test_the_verb_runs_functions_of_any_file(tmp_path: Path, options: list[str], code: int, shown: str) -> None:
    path = tmp_path / "kernels.py"
    path.write_text(IMPORTS + CALLED)
    result = CliRunner().invoke(verbs(), ["emulate", str(path), *options])
    text = result.output + (str(result.exception) if result.exception else "")
    assert shown in text
    assert (result.exit_code == 0) == (code == 0)


def test_the_answer_of_the_verb_as_json(tmp_path: Path) -> None:
    path = tmp_path / "kernels.py"
    path.write_text(IMPORTS + CALLED)
    found = json.loads(CliRunner().invoke(verbs(), ["emulate", str(path), "--call", "test(2.0, 2)", "--json"]).stdout)
    assert (found["right"], found["launches"], found["programs"]) == (True, 1, 1)


def test_code_that_asks_torch_for_a_gpu_gets_the_cpu(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    path = tmp_path / "kernels.py"
    path.write_text(
        IMPORTS
        + SCALE
        + """
import torch

def test():
    assert torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 10
    x = torch.randn(1, 8, device="cuda")
    out = torch.empty_like(x, device="cuda").cuda()
    scale[(1, 1)](x, out, 1, 8, 2.0, 64)
    torch.testing.assert_close(out, (2 * x).to("cuda"))
"""
    )
    before = torch.cuda.is_available()
    result = CliRunner().invoke(verbs(), ["emulate", str(path), "--call", "test()"])
    assert result.exit_code == 0, result.output
    assert torch.cuda.is_available() is before


def test_8_bit_floats_of_ml_dtypes_are_taken(tmp_path: Path) -> None:
    x = np.ones((1, 8), ml_dtypes.float8_e4m3fn)
    out = np.zeros((1, 8), np.float32)
    module(tmp_path, SCALE.replace("x * factor", "x.to(gl.float32) * factor")).scale[(1, 1)](x, out, 1, 8, 2.0, 64)
    assert (out == 2).all()


#: Each program leaves a row and counts itself in; the last one adds the rows up.
LAST = """
@gluon.jit
def total(rows, arrived, out, SEM: gl.constexpr):
    places = gl.arange(0, 128, layout=FLAT)
    gl.store(rows + gl.program_id(0) * 128 + places, places + gl.program_id(0))
    gl.barrier()
    if gl.atomic_add(arrived, 1, sem=SEM) == gl.num_programs(0) - 1:
        gl.barrier()
        sums = gl.zeros([128], gl.int32, layout=FLAT)
        for number in range(gl.num_programs(0)):
            sums += gl.load(rows + number * 128 + places)
        gl.store(out + places, sums)
"""


@pytest.mark.parametrize("order", ["acq_rel", "release", "relaxed"])
def test_an_atomic_that_releases_and_acquires_orders_programs(tmp_path: Path, order: str) -> None:
    rows, arrived, out = (np.zeros(n, np.int32) for n in (3 * 128, 1, 128))
    launch = module(tmp_path, LAST).total[(3,)]
    if order == "acq_rel":
        for _ in range(2):
            arrived[:] = 0
            launch(rows, arrived, out, order)
            assert (out == 3 * np.arange(128) + 3).all()
    else:
        with pytest.raises(RaceError, match="program 0 has stored to it"):
            launch(rows, arrived, out, order)
