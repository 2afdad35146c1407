"""Clusters: copies for several CTAs, products of pairs and of CTAs alone, barriers between CTAs, programs taken over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilecast
from tilecast.emulator.errors import BarrierError, EmulationError, LayoutError, RaceError, RequestError

HEAD = """
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout, allocate_tensor_memory, clc, fence_async_shared, mbarrier, tcgen05_commit, tcgen05_mma,
    tcgen05_mma_barrier_count, tma,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

def tiles(x, box, cga):
    return TensorDescriptor.from_tensor(x, box, gl.NVMMASharedLayout.get_default_for(box, gl.float16, cga_layout=cga))
"""

PRODUCT = """
@gluon.jit
def kernel(a_desc, b_desc, out_desc, ACC: gl.constexpr, STEPS: gl.constexpr, PAIR: gl.constexpr):
    a = gl.allocate_shared_memory(gl.float16, a_desc.block_shape, a_desc.layout)
    b = gl.allocate_shared_memory(gl.float16, b_desc.block_shape, b_desc.layout)
    acc = allocate_tensor_memory(gl.float32, [a_desc.block_shape[0], b_desc.block_shape[1]], ACC)
    loaded, done = mbarrier.allocate_mbarrier(two_ctas=PAIR), mbarrier.allocate_mbarrier()
    mbarrier.init(loaded, count=1)
    mbarrier.init(done, count=tcgen05_mma_barrier_count([a, b], multicast=True, two_ctas=PAIR))
    for k in range(STEPS):
        mbarrier.expect(loaded, a_desc.nbytes_per_cta + b_desc.nbytes_per_cta)
        tma.async_load(a_desc, [0, k * 64], loaded, a, multicast=True)
        tma.async_load(b_desc, [k * 64, 0], loaded, b, multicast=True)
        mbarrier.wait(loaded, k & 1)
        tcgen05_mma(a, b, acc, use_acc=(k != 0), multicast=True)
        tcgen05_commit(done, descs=[a, b])  # both
        mbarrier.wait(done, k & 1)
    out = gl.allocate_shared_memory(gl.float16, out_desc.block_shape, out_desc.layout)
    out.store(acc.load().to(gl.float16))
    fence_async_shared()
    tma.async_store(out_desc, [0, 0], out)
    tma.store_wait(0)

def launch(x, y, out, cga_a, cga_b, cga_c, pair, ctas):
    m, n = out.shape
    parts = [1, 1]
    for basis in cga_c:
        for dim, step in enumerate(basis):
            parts[dim] *= 2 if step else 1
    acc = TensorMemoryLayout([m // parts[0], n // parts[1]], col_stride=1, cga_layout=cga_c, two_ctas=pair)
    kernel[(1,)](
        tiles(x, [m, 64], cga_a), tiles(y, [64, n], cga_b), tiles(out, [m, n], cga_c), acc, x.shape[1] // 64, pair, num_ctas=ctas
    )
"""

#: Bases of the CTAs for A, B and the product; whether the CTAs multiply in pairs.
CLUSTERS = {
    "a pair": ([[1, 0]], [[0, 1]], [[1, 0]], True),
    "two alone, by rows": ([[1, 0]], [[0, 0]], [[1, 0]], False),
    "two alone, by columns": ([[0, 0]], [[0, 1]], [[0, 1]], False),
    "two pairs": ([[1, 0], [2, 0]], [[0, 1], [0, 0]], [[1, 0], [2, 0]], True),
    "four alone": ([[1, 0], [0, 0]], [[0, 0], [0, 1]], [[1, 0], [0, 1]], False),
}


def module(tmp_path: Path, body: str, **options: Any) -> Any:
    path = tmp_path / "kernels.py"
    path.write_text(HEAD + body)
    return tilecast.emulated(path, machine="b200", **options)


def product(tmp_path: Path, name: str, body: str = PRODUCT, **options: Any) -> tuple[Any, Any]:
    cga_a, cga_b, cga_c, pair = CLUSTERS[name]
    random = np.random.default_rng(0)
    m = 128 * 2 ** sum(basis[0] > 0 for basis in cga_c)
    x, y = random.standard_normal((m, 128)).astype(np.float16), random.standard_normal((128, 64)).astype(np.float16)
    out = np.zeros((m, 64), np.float16)
    module(tmp_path, body, **options).launch(x, y, out, cga_a, cga_b, cga_c, pair, 2 ** len(cga_c))
    return out, x.astype(np.float32) @ y.astype(np.float32)


@pytest.mark.parametrize("name", CLUSTERS)
@pytest.mark.parametrize(("mode", "seed"), [("late", 0), ("random", 3)])
def test_clusters_share_copies_and_multiply_in_pairs_or_alone(tmp_path: Path, name: str, mode: str, seed: int) -> None:
    out, wanted = product(tmp_path, name, mode=mode, seed=seed)
    np.testing.assert_allclose(out, wanted, rtol=1e-2, atol=1e-2)


def test_a_commit_that_only_one_of_the_sharing_ctas_hears_of_is_caught(tmp_path: Path) -> None:
    with pytest.raises(EmulationError, match="done"):
        product(tmp_path, "two alone, by rows", PRODUCT.replace(", descs=[a, b])  # both", ")"))
    alone = PRODUCT.replace(", descs=[a, b])  # both", ")").replace(
        "multicast=True, two_ctas=PAIR", "multicast=False, two_ctas=PAIR"
    )
    with pytest.raises(RaceError, match=r"race on shared memory b"):
        product(tmp_path, "two alone, by rows", alone)


STORE = """
@gluon.jit
def kernel(out_ptr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0], cga_layout=[[0]])
    at = gl.arange(0, 128, layout)
    slot = gl.allocate_shared_memory(gl.int32, [128], gl.SwizzledSharedLayout(1, 1, 1, [0], cga_layout=[[0]]))
    bar = mbarrier.allocate_mbarrier()
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, slot.nbytes_per_cta)
    hopper.async_store(slot, at.to(gl.int32), bar)
    mbarrier.wait(bar, 0)
    gl.store(out_ptr + at, slot.load(layout))
"""


def test_registers_are_stored_to_the_cluster_and_counted_in_bytes(tmp_path: Path) -> None:
    out = np.zeros(128, np.int32)
    module(tmp_path, STORE).kernel[(1,)](out, num_ctas=2)
    assert (out == np.arange(128)).all()
    with pytest.raises(BarrierError, match="bytes"):
        module(tmp_path, STORE.replace("slot.nbytes_per_cta", "8")).kernel[(1,)](out, num_ctas=2)
    with pytest.raises(RequestError, match="a cluster has 1, 2, 4, 8 or 16 CTAs, got 3"):
        module(tmp_path, STORE).kernel[(1,)](out, num_ctas=3)


TAKEN = """
@gluon.jit
def kernel(out_ptr, counts_ptr):
    answer = gl.allocate_shared_memory(gl.int64, [2], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    mine = gl.program_id(0)
    more, phase, taken = gl.to_tensor(True), 0, 0
    while more:
        mbarrier.expect(bar, 16)
        clc.try_cancel(answer, bar)
        gl.store(out_ptr + mine, mine + 100)
        mbarrier.wait(bar, phase)  # answered
        found = clc.load_result(answer)
        more = found.is_canceled()
        mine = found.program_id(0)
        phase ^= 1
        taken += 1
    gl.store(counts_ptr + gl.program_id(0), taken)
"""


@pytest.mark.parametrize(("mode", "seed"), [("late", 0), ("random", 0), ("random", 1)])
def test_a_program_takes_over_those_that_have_not_started(tmp_path: Path, mode: str, seed: int) -> None:
    out, counts = np.zeros(12, np.int32), np.zeros(12, np.int32)
    module(tmp_path, TAKEN, sms=4, mode=mode, seed=seed, triton="3.9").kernel[(12,)](out, counts)
    assert (out == np.arange(12) + 100).all()
    # Programs of the first wave run themselves; each tile is done once.
    assert (counts[:4] > 0).all()
    assert counts.sum() == 12
    assert mode == "random" or counts.tolist() == [9, 1, 1, 1, *[0] * 8]


def test_an_answer_that_nobody_waits_for_is_a_race(tmp_path: Path) -> None:
    missed = TAKEN.replace("        mbarrier.wait(bar, phase)  # answered\n", "")
    with pytest.raises(EmulationError, match="answer"):
        module(tmp_path, missed, sms=4).kernel[(12,)](np.zeros(12, np.int32), np.zeros(12, np.int32))


OTHER_CTA = """
@gluon.jit
def kernel(desc, out, CGA: gl.constexpr, WHAT: gl.constexpr, ORDERED: gl.constexpr):
    registers: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [4, 1], [1, 0], cga_layout=CGA)
    memory: gl.constexpr = gl.NVMMASharedLayout(128, 32, rank=2, cga_layout=CGA)
    parent = gl.allocate_shared_memory(
        gl.int32, [256, 64], memory, value=gl.full([256, 64], -5, gl.int32, layout=registers)
    )
    if ORDERED:
        fence_async_shared(cluster=True)
        gl.barrier(cluster=True)
    lower = parent.slice(128, 128, dim=0)
    if WHAT == "store":
        tma.async_store(desc, [0, 0], lower)
    else:
        bar = mbarrier.allocate_mbarrier()
        mbarrier.init(bar, count=1)
        mbarrier.expect(bar, desc.nbytes_per_cta)
        tma.async_load(desc, [0, 0], bar, lower, multicast=WHAT == "multicast")
        mbarrier.wait(bar, phase=0)
        gl.barrier(cluster=True)
        result = parent.load(registers)
        offsets = gl.arange(0, 256)[:, None] * 64 + gl.arange(0, 64)[None, :]
        gl.store(out + gl.set_auto_layout(offsets, result.type.layout), result)

def launch(x, out, cga, what, ordered):
    desc = TensorDescriptor.from_tensor(x, [128, 64], gl.NVMMASharedLayout(128, 32, rank=2, cga_layout=cga))
    kernel[(1,)](desc, out, cga, what, ordered, num_ctas=1 << len(cga))
"""

TWO_CTAS = ((1, 0),)


def copy_to_other_cta(folder: Path, cga: Any, what: str = "load", ordered: bool = True, **how: Any) -> tuple[Any, Any]:
    """(tile, parent as it was stored) of a copy into the half of shared memory that one CTA of two has."""
    path = folder / "other_cta.py"
    path.write_text(HEAD + OTHER_CTA)
    x, out = np.arange(128 * 64, dtype=np.int32).reshape(128, 64), np.zeros((256, 64), np.int32)
    tilecast.emulated(str(path), machine="b200", triton="3.9", **how).launch(x, out, cga, what, ordered)
    return x, out


@pytest.mark.parametrize("cga", [TWO_CTAS, ((1, 0), (0, 0))])
@pytest.mark.parametrize("how", [{}, {"mode": "random", "seed": 1}])
def test_a_copy_reaches_the_other_cta_of_its_pair(tmp_path: Path, cga: Any, how: dict[str, Any]) -> None:
    x, out = copy_to_other_cta(tmp_path, cga, **how)
    assert (out[:128] == -5).all() and (out[128:] == x).all()


def test_a_copy_into_the_other_cta_must_wait_for_what_that_stored(tmp_path: Path) -> None:
    # As in Triton's own test of this: its compiler (3.9) puts no cluster barrier there, either.
    with pytest.raises(RaceError, match=r"race on shared memory parent.* \(CTA 1\)"):
        copy_to_other_cta(tmp_path, TWO_CTAS, ordered=False)


@pytest.mark.parametrize(
    ("cga", "what", "said"),
    [
        (((0, 0), (1, 0)), "load", "must belong to the same CTA or a CTA pair"),
        (((1, 0), (0, 0)), "multicast", "must belong to the same CTA or a CTA pair"),
        (TWO_CTAS, "store", "may have an origin in another CTA"),
    ],
)
def test_what_no_copy_reaches_is_refused_as_the_compiler_does(tmp_path: Path, cga: Any, what: str, said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        copy_to_other_cta(tmp_path, cga, what)
