"""Calls of `attention_kvcache` and `attention_varlen` that make no sense: one sentence each, before anything is launched."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from tilecast import (  # noqa: E402
    AttentionError,
    UnsupportedError,
    attention_kvcache,
    attention_mla,
    attention_varlen,
)


def zeros(*shape, dtype=torch.float16):
    return torch.zeros(shape, dtype=dtype)


def whole(*values):
    return torch.tensor(values, dtype=torch.int32)


Q, CACHE, POOL = zeros(2, 1, 8, 64), zeros(2, 100, 2, 64), zeros(9, 16, 2, 64)
TABLE, USED = torch.zeros(2, 3, dtype=torch.int32), whole(20, 30)


@pytest.mark.parametrize(
    ("given", "options", "said"),
    [
        ((Q[0], CACHE, CACHE), {}, r"q: expected dimensions \(batch, seqlen_q, heads, head_dim\), got 3"),
        ((Q, CACHE.float(), CACHE), {}, "k: expected dtype torch.float16 as q has"),
        ((Q, zeros(2, 100, 3, 64), zeros(2, 100, 3, 64)), {}, "heads a multiple of the 3 key/value heads, got 8"),
        ((Q, CACHE, zeros(2, 99, 2, 64)), {}, "v: expected"),
        ((Q, zeros(2, 100, 2, 96), CACHE), {}, "k: expected head_dim 64 as q has, got 96"),
        ((Q, CACHE.transpose(2, 3).contiguous().transpose(2, 3), CACHE), {}, "k: expected a last stride of 1"),
        ((Q, zeros(1, 100, 2, 64), zeros(1, 100, 2, 64)), {}, "k_cache: expected a row for each of 2 sequences, got 1"),
        ((Q, CACHE, CACHE, whole(1)), {}, r"cache_seqlens: expected shape \(2\)"),
        ((Q, CACHE, CACHE, USED.long()), {}, "cache_seqlens: expected dtype torch.int32, got torch.int64"),
        ((Q, POOL, POOL, None, TABLE), {}, "cache_seqlens: expected the keys of each sequence"),
        ((Q, POOL, POOL, USED, TABLE[:1]), {}, r"block_table: expected shape \(2, any\)"),
        ((Q, POOL, POOL, USED, TABLE, whole(0, 1)), {}, "cache_batch_idx: expected None together with block_table"),
        ((Q, POOL, POOL, USED, TABLE), {"max_seqlen_k": 49}, "max_seqlen_k: expected at most the 48 keys"),
        ((Q, CACHE, CACHE), {"max_seqlen_k": 101}, "max_seqlen_k: expected at most the 100 keys of the cache"),
        ((Q, CACHE, CACHE), {"max_seqlen_q": 1}, "max_seqlen_q: expected None without cu_seqlens_q"),
        ((Q[0], CACHE, CACHE), {"cu_seqlens_q": whole(0, 1)}, "max_seqlen_q: expected the most queries"),
        ((Q, CACHE, CACHE), {"softcap": -1.0}, "softcap: expected a number of at least 0"),
        ((Q, CACHE, CACHE), {"sinks": zeros(7)}, r"sinks: expected shape \(8\)"),
        ((Q, CACHE, CACHE), {"causal": True, "window": (3, 3)}, "window: expected right 0 or -1"),
        ((Q, POOL.to(torch.float8_e4m3fn), POOL, USED, TABLE), {}, "v: expected dtype torch.float8_e4m3fn as k has"),
        ((Q, CACHE, CACHE), {"k_descale": zeros(1)}, "k_descale: expected a float32 tensor on cpu, got torch.float16"),
        ((Q, CACHE, CACHE), {"v_descale": torch.zeros(2, 8)}, r"v_descale: expected one number or shape \(batch, heads_kv\) = \(2, 2\)"),
        ((Q, POOL, POOL, USED, TABLE + 9), {"check": True}, "block_table: expected pages 0 to 8, got 9 for sequence 0, entry 0"),
        ((Q, POOL, POOL, whole(20, 49), TABLE), {"check": True}, "cache_seqlens: expected 0 to 48 keys, got 49 for sequence 1"),
        ((Q, CACHE, CACHE, None, None, whole(0, 2)), {"check": True}, "cache_batch_idx: expected 0 to 1, got 2"),
        ((Q, CACHE, CACHE, 101), {}, "cache_seqlens: expected 0 to 100 keys, got 101"),
        ((Q, CACHE, CACHE, -1), {}, "cache_seqlens: expected 0 to 100 keys, got -1"),
        ((Q, POOL, POOL, whole(-1, 2), TABLE), {"check": True}, "cache_seqlens: expected 0 to 48 keys, got -1 for sequence 0"),
        ((Q, CACHE, CACHE), {"k_descale": torch.tensor([-1.0]), "check": True}, "k_descale: expected finite numbers above 0, got -1 to -1"),
        ((Q, CACHE, CACHE), {"v_descale": torch.tensor([float("inf")]), "check": True}, "v_descale: expected finite numbers above 0, got inf to inf"),
        ((Q[0], CACHE, CACHE), {"cu_seqlens_q": torch.empty(0, dtype=torch.int32), "max_seqlen_q": 1}, "cu_seqlens_q: expected where each sequence begins, and the end"),
    ],
)  # fmt: skip
def test_caches_that_make_no_sense(given, options, said) -> None:
    with pytest.raises(AttentionError, match=said):
        attention_kvcache(*given, **options)


NEW = {"k": zeros(2, 3, 2, 64), "v": zeros(2, 3, 2, 64)}
ANGLES = {"rotary_cos": zeros(33, 32), "rotary_sin": zeros(33, 32)}


@pytest.mark.parametrize(
    ("given", "options", "said"),
    [
        ((Q, POOL, POOL, USED, TABLE), {"k": NEW["k"]}, "v: expected a torch tensor to append, got NoneType"),
        ((Q, POOL, POOL, USED, TABLE), ANGLES, "k: expected a torch tensor to append, got NoneType"),
        ((Q, CACHE, CACHE), NEW, "cache_seqlens: expected the keys before those of k and v, got None"),
        ((Q, POOL, POOL, USED, TABLE), {**NEW, "v": zeros(2, 2, 2, 64)}, r"v: expected as many new values as there are keys, \(2, 3, 2, 64\)"),
        ((Q, POOL, POOL, USED, TABLE), {**NEW, "k": zeros(2, 3, 1, 64)}, r"k: expected \(..., heads_kv, head_dim\) = \(2, 64\) as k_cache has"),
        ((Q, POOL, POOL, USED, TABLE), {**NEW, "k": zeros(1, 3, 2, 64)}, "k: expected a batch of 2 as q has, got 1"),
        ((Q, POOL, POOL, USED, TABLE), {**NEW, "k": NEW["k"][0]}, r"k: expected dimensions \(batch, seqlen_new, heads_kv, head_dim\), got 3"),
        ((Q, POOL, POOL, USED, TABLE), {**NEW, "k": NEW["k"].float()}, "k: expected torch.float16 on cpu as q has, got torch.float32"),
        ((Q, POOL, POOL, USED, TABLE), {**NEW, "k": zeros(2, 3, 2, 68)[..., 4:]}, "k: expected a last stride of 1 and others in multiples of 8"),
        ((Q, POOL, POOL, USED, TABLE), {"k": NEW["k"][0], "v": NEW["v"][0], "cu_seqlens_k_new": whole(0, 3)}, r"cu_seqlens_k_new: expected shape \(3\)"),
        ((Q, POOL, POOL, USED, TABLE), {**NEW, "rotary_cos": zeros(33, 32)}, "rotary_sin: expected a table as well, got None"),
        ((Q, POOL, POOL, USED, TABLE), {**NEW, "rotary_cos": zeros(33, 33), "rotary_sin": zeros(33, 33)}, r"rotary_cos: expected \(positions, 1 to 32 columns"),
        ((Q, POOL, POOL, USED, TABLE), {**NEW, **ANGLES, "rotary_sin": zeros(34, 32)}, "rotary_sin: expected shape, strides and dtype of rotary_cos"),
        ((Q, POOL, POOL, USED, TABLE), {**NEW, **ANGLES, "rotary_interleaved": 1}, "rotary_interleaved: expected True or False, got 1"),
        ((Q, POOL, POOL, whole(20, 46), TABLE + whole(0, 3)[:, None] + whole(0, 1, 2)), {**NEW, "check": True}, "cache_seqlens: expected 0 to 45 keys before 3 more, got 46 for sequence 1"),
        ((Q, POOL, POOL, USED, TABLE), {**NEW, "check": True}, "block_table: expected places of their own for new keys, got 0 for sequences 0 and 1"),
        ((Q, POOL, POOL, whole(20, 32), TABLE + whole(0, 3)[:, None] + whole(0, 1, 2) * 3), {**NEW, "check": True}, "block_table: expected 0 to 8 for new keys, got 9 for sequence 1"),
        ((Q, POOL, POOL, whole(20, 31), TABLE + whole(0, 3)[:, None] + whole(0, 1, 2)), {**NEW, **ANGLES, "check": True}, "rotary_cos: expected angles of 34 positions for sequence 1, got 33"),
        ((Q, CACHE, CACHE, USED, None, whole(1, 1)), {**NEW, "check": True}, "cache_batch_idx: expected places of their own for new keys, got 1 for sequences 0 and 1"),
    ],
)  # fmt: skip
def test_appends_that_make_no_sense(given, options, said) -> None:
    with pytest.raises(AttentionError, match=said):
        attention_kvcache(*given, **options)


PACKED, KEYS = zeros(10, 8, 64), zeros(12, 2, 64)


@pytest.mark.parametrize(
    ("starts_q", "starts_k", "options", "said"),
    [
        (whole(0, 4, 10), whole(0, 12), {}, r"cu_seqlens_k: expected shape \(3\)"),
        (whole(0, 4, 10), None, {}, "cu_seqlens_k: expected a tensor"),
        (whole(0, 7, 4), whole(0, 6, 12), {"check": True}, "cu_seqlens_q: expected numbers that do not fall, got 7 and then 4"),
        (whole(1, 4, 10), whole(0, 6, 12), {"check": True}, "cu_seqlens_q: expected 0 first, got 1"),
        (whole(0, 4, 11), whole(0, 6, 12), {"check": True}, "cu_seqlens_q: expected at most the 10 rows there are, got 11"),
        (whole(0, 2, 10), whole(0, 6, 12), {"check": True}, "cu_seqlens_q: expected at most max_seqlen_q = 7 in a sequence, got 8"),
        (whole(0, 4, 10), whole(0, 6, 12), {"block_table": TABLE}, "cu_seqlens_k: expected None together with block_table"),
        (whole(0, 4, 10), None, {"block_table": TABLE}, "seqused_k: expected the keys of each sequence"),
        (whole(0, 4, 10), whole(0, 6, 12), {"seqused_k": whole(6, 7), "check": True}, "seqused_k: expected 0 to 6 keys, got 7 for sequence 1"),
    ],
)  # fmt: skip
def test_packed_sequences_that_make_no_sense(starts_q, starts_k, options, said) -> None:
    with pytest.raises(AttentionError, match=said):
        attention_varlen(PACKED, KEYS, KEYS, starts_q, starts_k, 7, 12, **options)


@pytest.mark.parametrize(
    ("cache", "options", "said"),
    [
        (zeros(9, 64, 2, 576), {}, r"kv_cache: expected \(pages, page size, 1, latent width\).*got \(9, 64, 2, 576\)"),
        (zeros(9, 64, 1, 576), {"head_dim_v": 576}, "head_dim_v: expected a whole number of 1 to 575, got 576"),
        (zeros(9, 64, 1, 512), {}, "head_dim_v: expected a whole number of 1 to 511, got 512"),
    ],
)
def test_latent_caches_that_make_no_sense(cache, options, said) -> None:
    with pytest.raises(AttentionError, match=said):
        attention_mla(zeros(2, 1, 16, 576), cache, USED, TABLE, **options)


@pytest.mark.parametrize("count", [0, 65, True, 32.0])
def test_columns_of_values_that_there_are_not(count) -> None:
    with pytest.raises(AttentionError, match="head_dim_v: expected a whole number of 1 to 64, got"):
        attention_kvcache(Q, CACHE, CACHE, head_dim_v=count)


def test_a_call_of_latent_attention_that_was_met_before_makes_no_view(monkeypatch) -> None:
    from tilecast.kernels.again import Memory
    from tilecast.kernels.serving import calls

    q, cache = zeros(2, 1, 16, 576), zeros(9, 64, 1, 576)
    served, started = [], []

    def serve(q, k, v, *rest):
        served.append(v)
        return torch.zeros(*q.shape[:-1], v.shape[-1]), None

    def start(arguments):
        def call(q, k, v, lists):
            started.append((k, v))
            return "out", None

        return call

    monkeypatch.setattr(calls, "serve", serve)
    monkeypatch.setattr(calls, "started", start)
    monkeypatch.setattr(calls, "_memory", Memory())
    for width in (512, 512, 256, 512):
        attention_mla(q, cache, USED, TABLE, width, causal=True)
    assert [v.shape[-1] for v in served] == [512, 256]
    assert all(v.data_ptr() == cache.data_ptr() for v in served)
    assert len(started) == 2 and all(k is cache and v is cache for k, v in started)


def test_what_no_kernel_does_is_unsupported() -> None:
    with pytest.raises(UnsupportedError, match="expected pages of 16, 32, 64, 128, 256 tokens, got 24"):
        attention_kvcache(Q, zeros(9, 24, 2, 64), zeros(9, 24, 2, 64), USED, TABLE)
    with pytest.raises(UnsupportedError, match="serving kernels have no backward pass"):
        attention_kvcache(Q.clone().requires_grad_(), CACHE, CACHE)
    with pytest.raises(UnsupportedError, match="expected tensors on a CUDA device, got device 'cpu'"):
        attention_kvcache(Q, CACHE, CACHE, 5)


def test_shapes_without_a_device() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q, k, v = (
            torch.empty(shape, dtype=torch.bfloat16) for shape in ((2, 3, 8, 192), (2, 50, 2, 192), (2, 50, 2, 128))
        )
        out, lse = attention_kvcache(q, k, v, return_lse=True)
        assert (out.shape, lse.shape, lse.dtype) == ((2, 3, 8, 128), (2, 8, 3), torch.float32)
        used = torch.empty(2, dtype=torch.int32)
        angles = torch.empty(50, 96, dtype=torch.bfloat16)
        out = attention_kvcache(q, k, v, used, k=k[:, :3], v=v[:, :3], rotary_cos=angles, rotary_sin=angles)
        assert out.shape == (2, 3, 8, 128)
        starts = torch.empty(3, dtype=torch.int32)
        out, lse = attention_varlen(q[0], k[0], v[0], starts, starts, 3, 50, return_lse=True)
        assert (out.shape, lse.shape) == ((3, 8, 128), (8, 3))
