"""The hooks inside Triton's own Autotuner, as it calls them; no GPU: nothing is launched."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import tilecast
from tilecast.explore.autotune import AutotuneError
from tilecast.model.chip.evaluate import evaluate_seconds
from tilecast.model.kernel.variants.fa2 import Fa2Variant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine

triton = pytest.importorskip("triton")
from triton import language as tl  # noqa: E402

A100 = load_machine("a100")


@triton.jit
def kernel(Q, K, V, Out, scale, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, IS_CAUSAL: tl.constexpr):  # noqa: N803
    pass


def configs() -> list:
    return [
        triton.Config({"BLOCK_M": m, "BLOCK_N": n}, num_warps=warps, num_stages=stages)
        for m in (64, 128, 256)
        for n in (32, 64, 128)
        for warps in (4, 8)
        for stages in (2, 4)
    ]


def tensor(heads: int = 16, seqlen: int = 4096, dim: int = 128, dtype: str = "torch.bfloat16") -> SimpleNamespace:
    return SimpleNamespace(shape=(4, heads, seqlen, dim), dtype=dtype)


def pruned(hooks: dict, given: list | None = None, fn=kernel, q=None, k=None, **kwargs) -> list:
    """What the real Autotuner leaves to time."""
    tuner = triton.autotune(configs=given or configs(), key=["scale"], prune_configs_by=hooks)(fn)
    q = q or tensor()
    args = (q, k or q, k or q, q, 0.1)
    tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
    return tuner.prune_configs(kwargs)


def test_the_best_by_forecast_are_left_to_time() -> None:
    left = pruned(tilecast.prune_configs_by("a100", top_k=3), IS_CAUSAL=True)
    work = Workload(4, 16, 16, 4096, 4096, 128, 128, "causal")

    def seconds(c) -> float:
        meta = c.all_kwargs()
        variant = Fa2Variant("fa2", meta["BLOCK_M"], meta["BLOCK_N"], c.num_warps, c.num_stages, "longest-first")
        return evaluate_seconds(work, A100, variant)

    from tilecast.model.families import legality

    legal = [
        c
        for c in configs()
        if legality(
            Fa2Variant("fa2", c.kwargs["BLOCK_M"], c.kwargs["BLOCK_N"], c.num_warps, c.num_stages), work, A100
        ).legal
    ]
    assert 3 < len(legal) < len(configs())
    assert [str(c) for c in left] == [str(c) for c in sorted(legal, key=seconds)[:3]]


def test_illegal_configurations_never_reach_the_compiler() -> None:
    hooks = tilecast.prune_configs_by("a100", top_k=1.0)
    kept = {
        (c.kwargs["BLOCK_M"], c.kwargs["BLOCK_N"], c.num_warps, c.num_stages) for c in pruned(hooks, IS_CAUSAL=False)
    }
    # 256 rows of 128 columns in four warps: 512 registers a thread; four stages of 128 keys: 288 KB.
    assert not any(m == 256 and warps == 4 for m, n, warps, stages in kept)
    assert not any(n == 128 and stages == 4 for m, n, warps, stages in kept)
    assert (128, 64, 8, 2) in kept


def test_where_nothing_is_legal_one_is_left_to_fail_with_the_kernels_own_words() -> None:
    big = [triton.Config({"BLOCK_M": 256, "BLOCK_N": 256}, num_warps=4, num_stages=s) for s in (4, 5)]
    assert pruned(tilecast.prune_configs_by("a100"), big, IS_CAUSAL=False) == big[:1]


def test_other_names_and_fixed_values() -> None:
    @triton.jit
    def other(q_ptr, k_ptr, v_ptr, out_ptr, scale, Z, H, N_CTX, TILE_Q: tl.constexpr, TILE_K: tl.constexpr):  # noqa: N803
        pass

    names = {"q": "q_ptr", "k": "k_ptr", "v": "v_ptr", "block_m": "TILE_Q", "block_n": "TILE_K", "batch": "Z", "heads_q": "H",
             "heads_kv": "H", "seqlen_q": "N_CTX", "seqlen_k": "N_CTX"}  # fmt: skip
    hooks = tilecast.prune_configs_by("h200-sxm", names=names, head_dim=64, head_dim_v=64, causal=False)
    meta = {"TILE_Q": 128, "TILE_K": 64, "num_warps": 4, "num_stages": 2, "Z": 2, "H": 8, "N_CTX": 2048}
    flat = SimpleNamespace(shape=(2 * 8 * 2048, 64), dtype="torch.float16")
    got = hooks["perf_model"](q_ptr=flat, k_ptr=flat, v_ptr=flat, **meta)
    work = Workload(2, 8, 8, 2048, 2048, 64, 64, "none", None, "fp16")
    assert got == evaluate_seconds(work, load_machine("h200-sxm"), Fa2Variant("fa2", 128, 64, 4, 2, "grid"))


def test_grouped_heads_lengths_and_dtype_come_from_the_tensors() -> None:
    hooks = tilecast.prune_configs_by("h200-sxm")
    arguments = {"Q": tensor(16, 1024, 64, "torch.float16"), "K": tensor(4, 3000, 64), "V": tensor(4, 3000, 64)}
    got = hooks["perf_model"](**arguments, BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=2, num_ctas=1)
    work = Workload(4, 16, 4, 1024, 3000, 64, 64, "none", None, "fp16")
    assert got == evaluate_seconds(work, load_machine("h200-sxm"), Fa2Variant("fa2", 64, 64, 4, 2, "grid"))


def test_warps_the_model_does_not_know_come_last() -> None:
    hooks = tilecast.prune_configs_by(A100)
    meta = {"Q": tensor(), "K": tensor(), "V": tensor(), "BLOCK_M": 64, "BLOCK_N": 64, "num_stages": 2}
    assert hooks["perf_model"](**meta, num_warps=2) == float("inf")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tilecast.prune_configs_by("a100", names={"blok_m": "M"}), "unknown name 'blok_m'; did you mean block_m"),
        (lambda: tilecast.prune_configs_by("a100", top_k=0), "top_k takes a whole number"),
        (lambda: tilecast.prune_configs_by("a100", top_k=1.5), "top_k takes a whole number"),
        (lambda: pruned(tilecast.prune_configs_by("a100", names={"block_m": "BLOCK_Q"})), "no argument or meta-parameter 'BLOCK_Q'; did you mean BLOCK_"),
        (lambda: pruned(tilecast.prune_configs_by("a100", names={"causal": "CAUSAL"})), "no argument or meta-parameter 'CAUSAL'"),
        (lambda: pruned(tilecast.prune_configs_by("a100"), q=SimpleNamespace(shape=(64, 128), dtype="torch.float16")), "batch is not known"),
        (lambda: pruned(tilecast.prune_configs_by("a100"), q=tensor(dtype="torch.float64")), "is torch.float64"),
        (lambda: pruned(tilecast.prune_configs_by("a100"), q=tensor(16), k=tensor(5)), "make no workload"),
    ],
)  # fmt: skip
def test_mistakes_are_one_sentence(call, message: str) -> None:
    with pytest.raises(AutotuneError, match=message):
        call()
