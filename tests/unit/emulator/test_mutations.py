"""Planted bugs: each is one substitution in a shipped kernel, and each must be caught at the line."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import pytest
from support.paths import ROOT

from tilecast.emulator.errors import (
    AllocationError,
    BarrierError,
    BoundsError,
    DeadlockError,
    EmulationError,
    LayoutError,
    RaceError,
    UninitializedError,
    WrongResultError,
)
from tilecast.emulator.run import emulate, kernel_path
from tilecast.emulator.source import Source
from tilecast.emulator.verify import judge
from tilecast.model.kernel.header import header_window

HOPPER, HOPPER_CAUSAL = "hopper_ws_d128_full", "hopper_ws_d128_causal"
BLACKWELL, BLACKWELL_CAUSAL = "blackwell_ws_d128_full", "blackwell_ws_d128_causal"
PAIR = "blackwell_ws_d128_full_pair"


@dataclass(frozen=True)
class Bug:
    """``old`` becomes ``new`` (the ``which``-th time it occurs); ``says`` is code the message must quote with its line."""

    kernel: str
    old: str
    new: str
    error: type[EmulationError] | tuple[type[EmulationError], ...]
    says: str
    which: int = 0


BUGS = {
    "dropped wait for V": Bug(
        HOPPER, "    wait(tile.v, n)\n    o = issue_pv", "    o = issue_pv",
        (RaceError, UninitializedError), "return warpgroup_mma(gl.convert_layout(p, operand), v, o",
    ),
    "wrong phase of K": Bug(
        HOPPER, "wait(tile.k, n + 1)", "wait(tile.k, n + 1 + KV_STAGES)",
        (RaceError, BarrierError, UninitializedError), "return warpgroup_mma(q, k.permute((1, 0)), zero",
    ),
    "wrong stage index": Bug(
        HOPPER, "tile_at(tile.k, n + 1))", "tile_at(tile.k, n + 2))",
        (RaceError, UninitializedError), "return warpgroup_mma(q, k.permute((1, 0)), zero",
    ),
    "S used before its product is done": Bug(
        HOPPER, "s = warpgroup_mma_wait(1, deps=[s])", "s = warpgroup_mma_wait(2, deps=[s])",
        UninitializedError, "p = mufu_exp2(s * tile.problem.scale_log2 - statistics.reference[:, None])",
    ),
    "V stage released early": Bug(
        HOPPER, "    o = warpgroup_mma_wait(0, deps=[o])\n    release(tile.v, n)\n",
        "    release(tile.v, n)\n    o = warpgroup_mma_wait(0, deps=[o])\n",
        RaceError, "copy_tile(desc, [batch, head, row, 0]",
    ),
    "Q stage released before its last product": Bug(
        HOPPER_CAUSAL, "            wait(k, n)\n            s = warpgroup_mma_wait",
        "            wait(k, n)\n            release(q, q_number)\n            s = warpgroup_mma_wait",
        (RaceError, BarrierError, DeadlockError), "(q.empty[0] has completed phase 1",
    ),
    "too few bytes expected": Bug(
        HOPPER, "mbarrier.expect(full, desc.block_type.nbytes)", "mbarrier.expect(full, desc.block_type.nbytes // 2)",
        BarrierError, "mbarrier.expect(full, desc.block_type.nbytes // 2)",
    ),
    "too many bytes expected": Bug(
        HOPPER, "mbarrier.expect(full, desc.block_type.nbytes)", "mbarrier.expect(full, desc.block_type.nbytes * 2)",
        BarrierError, "mbarrier.expect(full, desc.block_type.nbytes * 2)",
    ),
    "one arrival too many counted": Bug(
        HOPPER, "k = make_ring(k_desc, KV_STAGES, WARPGROUPS)", "k = make_ring(k_desc, KV_STAGES, WARPGROUPS + 1)",
        DeadlockError, "waits for k.empty[0]",
    ),
    "one arrival too few counted": Bug(
        HOPPER, "v = make_ring(v_desc, KV_STAGES, WARPGROUPS)", "v = make_ring(v_desc, KV_STAGES, WARPGROUPS - 1)",
        (RaceError, BarrierError, DeadlockError), "(v.empty[0] has completed phase 1",
    ),
    "causal mask off by one": Bug(
        HOPPER_CAUSAL, "keys[None, :] <= keys_seen(problem, row)[:, None]", "keys[None, :] < keys_seen(problem, row)[:, None]",
        WrongResultError, 'gl.where(keys[None, :] < keys_seen(problem, row)[:, None], s, float("-inf"))',
    ),
    "last key masked off by one": Bug(
        HOPPER, "(keys < problem.seqlen_k)[None, :]", "(keys <= problem.seqlen_k)[None, :]",
        WrongResultError, 'gl.where((keys <= problem.seqlen_k)[None, :], s, float("-inf"))',
    ),
    "row stored past the tensor": Bug(
        HOPPER, "there = (rows < problem.seqlen_q)[:, None]", "there = (rows <= problem.seqlen_q)[:, None]",
        (BoundsError, RaceError), "gl.store(pointers",
    ),
    "P read before its last quarter is stored": Bug(
        BLACKWELL, "    mbarrier.wait(softmax.p_rest, phase)\n", "", RaceError, "tcgen05_mma(p.slice(96, 32)",
    ),
    "P announced before it is stored": Bug(
        BLACKWELL, "            p.slice(64, QUARTER).store(c.to(dtype))\n            mbarrier.arrive(softmax.p_ready)",
        "            mbarrier.arrive(softmax.p_ready)\n            p.slice(64, QUARTER).store(c.to(dtype))",
        RaceError, "p.slice(64, QUARTER).store(c.to(dtype))",
    ),
    "O rescaled late": Bug(
        BLACKWELL, "        factors = gl.convert_layout(factor, one_per_thread(RESCALE_COLUMNS)",
        "        mbarrier.arrive(softmax.p_ready)\n        factors = gl.convert_layout(factor, one_per_thread(RESCALE_COLUMNS)",
        RaceError, 'o.store(packed("mul", o.load',
    ),
    "S read before it is complete": Bug(
        BLACKWELL, "            mbarrier.wait(softmax.s_full, s_phase)\n", "", (RaceError, UninitializedError), "softmax.s.slice(start, QUARTER).load(row_per_thread(QUARTER))",
    ),
    "ring slot of K never released": Bug(
        BLACKWELL, "            tcgen05_commit(kv.empty.index(k_slot))\n            p_phase", "            p_phase", (DeadlockError, RaceError), "kv.empty",
    ),
    "ring slot of V released before its products": Bug(
        BLACKWELL, "            issue_pv(softmax1, tile_at(kv, v_slot), p_phase, step != 0)\n            tcgen05_commit(kv.empty.index(v_slot))",
        "            tcgen05_commit(kv.empty.index(v_slot))\n            issue_pv(softmax1, tile_at(kv, v_slot), p_phase, step != 0)",
        (RaceError, BarrierError), "v.slice(0, 64), softmax.o",
    ),
    "statistics overwritten before they are read": Bug(
        BLACKWELL, "            mbarrier.wait(softmax.rows_empty.index(0), n - LAG & 1)\n            rescale", "            rescale",
        (RaceError, BarrierError), "mbarrier.wait(softmax.rows_full.index(0), n & 1)",
    ),
    "statistics slot of the wrong group released": Bug(
        BLACKWELL, "correct(softmax0, n, step != 0, softmax1)", "correct(softmax0, n, step != 0, softmax0)",
        (RaceError, BarrierError, DeadlockError), "rows_empty",
    ),
    "arrive count of P one too small": Bug(
        BLACKWELL, "p_ready = barriers(1, 2)", "p_ready = barriers(1, 1)",
        (RaceError, BarrierError, DeadlockError), "mbarrier.wait(softmax.p_ready, phase) (softmax0.p_ready[0] has completed phase 1",
    ),
    "arrive count of P one too large": Bug(
        BLACKWELL, "p_ready = barriers(1, 2)", "p_ready = barriers(1, 3)", DeadlockError, "mbarrier.wait(softmax.p_ready, phase)",
    ),
    "two tiles in the same tensor memory": Bug(
        BLACKWELL, "    softmax1 = make_softmax()\n",
        "    other = make_softmax()\n    softmax1 = Softmax(softmax0.s, other.o, other.s_full, other.p_ready, other.p_rest, other.o_full, other.rows, other.rows_full, other.rows_empty)\n",
        RaceError, "softmax0.s",
    ),
    "P beyond the columns of S": Bug(
        BLACKWELL, "right = softmax.s.slice(TILE_N // 2, TILE_N // 2)", "right = softmax.s.slice(TILE_N // 2 + 32, TILE_N // 2)",
        BoundsError, "right = softmax.s.slice(TILE_N // 2 + 32, TILE_N // 2)",
    ),
    "P over the wrong columns": Bug(
        BLACKWELL, "tcgen05_mma(p.slice(96, 32), v", "tcgen05_mma(softmax.s.reinterpret(v.dtype, [ROWS, 256], None).slice(32, 32), v",
        (UninitializedError, RaceError), "softmax.s.reinterpret",
    ),
    "O accumulates onto nothing": Bug(
        BLACKWELL, "issue_pv(softmax0, tile_at(kv, v_slot), p_phase, step != 0)", "issue_pv(softmax0, tile_at(kv, v_slot), p_phase, True)",
        UninitializedError, "softmax.o, use_acc=use_acc)",
    ),
    "O announced before its last product": Bug(
        BLACKWELL, "        issue_pv(softmax0, tile_at(kv, v_slot), p_phase, blocks != 1)\n        tcgen05_commit(softmax0.o_full)",
        "        tcgen05_commit(softmax0.o_full)\n        issue_pv(softmax0, tile_at(kv, v_slot), p_phase, blocks != 1)",
        RaceError, "softmax.o.slice(start, STORE_COLUMNS).load",
    ),
    "Q overwritten while in use": Bug(
        BLACKWELL, "        tcgen05_commit(kv.empty.index(k_slot))\n        for step", "        tcgen05_commit(kv.empty.index(k_slot))\n        tcgen05_commit(q.empty.index(q0))\n        for step",
        RaceError, "copy_tile(desc, [batch, head, row, 0]",
    ),
    "too many columns": Bug(
        BLACKWELL, "o = allocate_tensor_memory(gl.float32, [ROWS, 128]", "o = allocate_tensor_memory(gl.float32, [ROWS, 256]",
        LayoutError, "into [128, 256]",
    ),
    "more columns than there are": Bug(
        BLACKWELL, "o = allocate_tensor_memory(gl.float32, [ROWS, 128], accumulator(128))",
        "o = allocate_tensor_memory(gl.float32, [2, ROWS, 128], accumulator(128)).index(0)", AllocationError, "o = allocate_tensor_memory",
    ),
    "too many stages": Bug(
        BLACKWELL, "KV_STAGES = gl.constexpr(5)", "KV_STAGES = gl.constexpr(6)", AllocationError, "allocate_shared_memory",
    ),
    "barrier initialised twice": Bug(
        BLACKWELL, "mbarrier.init(made.index(i), count=ARRIVALS)", "mbarrier.init(made.index(0), count=ARRIVALS)",
        BarrierError, "mbarrier.init(made.index(0), count=ARRIVALS)",
    ),
    "causal mask of the last row off by one": Bug(
        BLACKWELL_CAUSAL, "hide_keys(softmax, row_diagonal + 1 - key)", "hide_keys(softmax, row_diagonal + 2 - key)",
        WrongResultError, 'gl.where((seen & (1 << (columns & 15))) != 0, s, float("-inf"))',
    ),
    "P of the other CTA is not waited for": Bug(
        PAIR, "p_ready = barriers(1, 2, True)", "p_ready = barriers(1, 2, False)", RaceError, "tcgen05_mma(p.slice(0, 64)",
    ),
    "K of the other CTA is not waited for": Bug(
        PAIR, "    full = barriers(SLOTS, 1, True)", "    full = barriers(SLOTS, 1, False)",
        (RaceError, UninitializedError), "tcgen05_mma(q, k.permute((1, 0))",
    ),
    "bytes of both CTAs expected in each": Bug(
        PAIR, "mbarrier.expect(full, desc.nbytes_per_cta)", "mbarrier.expect(full, desc.block_type.nbytes)",
        BarrierError, "mbarrier.expect(full, desc.block_type.nbytes)",
    ),
}  # fmt: skip


def inputs(kernel: str, keys: int = 700) -> tuple[np.ndarray, ...]:
    """Several tiles, an odd length, two query heads to one of K and V."""
    shape = Source(kernel_path(kernel)).header()["workload"]
    rows = 600 if kernel == PAIR else 300
    rng = np.random.default_rng(1)
    q, k, v = (
        rng.standard_normal((1, heads, length, shape[width])).astype(np.float16)
        for heads, length, width in ((2, rows, "head_dim_qk"), (1, keys, "head_dim_qk"), (1, keys, "head_dim_v"))
    )
    q[:, 0] *= 8  # row maxima move by more than the threshold, so that O is rescaled
    return q, k, v


def run(kernel: str, text: str | None = None, mode: str = "late", seed: int = 0, keys: int = 700) -> None:
    q, k, v = inputs(kernel, keys)
    path = kernel_path(kernel)
    window = header_window(Source(path).header())
    done = emulate(path, q, k, v, text=text, mode=mode, seed=seed, sms=1 if kernel != PAIR else 2)
    judge(done, q, k, v, q.shape[3] ** -0.5, window).require()


def mutated(bug: Bug) -> str:
    text = kernel_path(bug.kernel).read_text(encoding="utf-8")
    parts = text.split(bug.old)
    assert len(parts) > bug.which + 1, "the substitution must match"
    return bug.old.join(parts[: bug.which + 1]) + bug.new + bug.old.join(parts[bug.which + 1 :])


@pytest.mark.parametrize("kernel", sorted({bug.kernel for bug in BUGS.values()}))
@pytest.mark.parametrize("mode", ["late", "random"])
def test_the_kernel_itself_is_clean(kernel: str, mode: str) -> None:
    run(kernel, mode=mode)


@pytest.mark.parametrize("name", BUGS)
def test_planted_bug_is_caught_at_its_line(name: str) -> None:
    bug = BUGS[name]
    with pytest.raises(bug.error) as caught:
        run(bug.kernel, mutated(bug))
    message = str(caught.value)
    assert re.search(r"line \d+: ", message)
    assert bug.says in message


def test_missing_fence_between_a_store_and_the_tensor_core() -> None:
    path = ROOT / "tests" / "support" / "gluon_p_through_smem.py"
    text = path.read_text(encoding="utf-8")
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 1, 64, 64)).astype(np.float16) for _ in range(3))
    judge(emulate(path, q, k, v), q, k, v, 0.125, (-1, -1)).require()
    assert "    fence_async_shared()\n" in text
    with pytest.raises(RaceError, match="fence_async_shared") as caught:
        emulate(path, q, k, v, text=text.replace("    fence_async_shared()\n", ""))
    assert "o = warpgroup_mma(p_smem" in str(caught.value) and "p_smem.store(p.to(gl.float16))" in str(caught.value)


def test_a_copy_in_flight_when_the_program_ends() -> None:
    path = ROOT / "tests" / "support" / "gluon_p_through_smem.py"
    text = path.read_text(encoding="utf-8")
    last = "    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, accumulator()))\n"
    assert last in text
    late = "    mbarrier.expect(full, 8192)\n    copy_tile(k_desc, [0, 0, 0, 0], full, k)\n"
    ones = np.ones((1, 1, 64, 64), np.float16)
    with pytest.raises(RaceError, match=r"ends while the copy issued at line \d+: copy_tile\(k_desc"):
        emulate(path, ones, ones, ones, text=text.replace(last, late + last))


@pytest.mark.parametrize("name", ["P announced before it is stored", "V stage released early", "dropped wait for V"])
@pytest.mark.parametrize("seed", [1, 2])
def test_planted_bug_is_caught_at_random_moments_too(name: str, seed: int) -> None:
    bug = BUGS[name]
    with pytest.raises(EmulationError, match="line "):
        run(bug.kernel, mutated(bug), mode="random", seed=seed)


SYNCHRONISING = re.compile(
    r"mbarrier\.(wait|arrive|expect)\(|tcgen05_(commit|mma)\(|copy_tile\(|issue_(qk|pv)\(|correct\("
    r"|softmax\.rows\.index\(0\)\.store\("
    r"|(\w+) = warpgroup_mma_wait\(\d, deps=\[\w+\]\)|(wait|release|load)\("
)


@pytest.mark.parametrize("kernel", [HOPPER, BLACKWELL])
def test_every_line_that_synchronises_is_needed(kernel: str) -> None:
    """Each alone is replaced by nothing, and each must be missed."""
    lines = kernel_path(kernel).read_text(encoding="utf-8").splitlines()
    places = [i for i, line in enumerate(lines) if SYNCHRONISING.match(line.strip())]
    assert len(places) > 15
    survived = set()
    for i in places:
        code = lines[i].strip()
        text = "\n".join([*lines[:i], lines[i].replace(code, "pass"), *lines[i + 1 :]]) + "\n"
        try:
            run(kernel, text, keys=400)
        except EmulationError as error:
            assert re.search(r"line \d+: ", str(error)), code
        else:
            survived.add(code)
    assert not survived


def test_what_is_superfluous_for_long_tiles_is_needed_for_short_ones() -> None:
    text = kernel_path(HOPPER).read_text(encoding="utf-8")
    wait = "    mbarrier.wait(ring.empty.index(n % slots), n // slots & 1 ^ 1)\n"
    assert wait in text
    for_all_but_q = "    if slots != Q_STAGES * WARPGROUPS:\n    " + wait
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((1, heads, length, 128)).astype(np.float16) for heads, length in ((2, 700), (1, 64)))
    emulate(HOPPER, q, k, k, sms=1)
    with pytest.raises(EmulationError, match=r"q\.full"):
        emulate(HOPPER, q, k, k, sms=1, text=text.replace(wait, for_all_but_q))
