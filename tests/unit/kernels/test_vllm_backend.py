"""The vLLM backend against vLLM's contract: on stand-ins for it everywhere, on vLLM itself where it is installed.

The kernels need a GPU: here a reference in float64 stands in for them, behind the checks of `attention_kvcache`.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import math
import sys
import types
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from support import vllm_contract  # noqa: E402
from support.paged_reference import serve as reference  # noqa: E402

from tilecast.kernels.engines import vllm_plugin  # noqa: E402
from tilecast.kernels.errors import UnsupportedError  # noqa: E402
from tilecast.kernels.serving import calls  # noqa: E402

PATH = vllm_plugin.BACKEND.rpartition(".")[0]
HERE = importlib.util.find_spec("vllm") is not None
LAYER = types.SimpleNamespace(_k_scale=torch.ones(1), _v_scale=torch.ones(1))
CAPABILITY = types.SimpleNamespace(major=9, minor=0)


@pytest.fixture(
    params=["stand-in", pytest.param("vllm", marks=pytest.mark.skipif(not HERE, reason="vLLM is not installed"))]
)
def module(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """`vllm_backend`, imported with vLLM or with what stands in for it."""
    if request.param == "stand-in":
        for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
            monkeypatch.delitem(sys.modules, name)
        for name, made in vllm_contract.stand_ins().items():
            monkeypatch.setitem(sys.modules, name, made)
    # Calls met before are remembered with the kernels that they started: here each is looked at anew.
    monkeypatch.setattr(calls, "key_of", lambda *given: None)
    monkeypatch.delitem(sys.modules, PATH, raising=False)
    found = importlib.import_module(PATH)
    yield found
    sys.modules.pop(PATH, None)


LENGTHS = ((1, 37), (1, 16), (5, 40), (20, 20))


def batch(module: Any, page: int = 16, heads: tuple[int, int] = (4, 2), dim: int = 64, order: str = "NHD"):  # type: ignore[no-untyped-def]
    """(query, cache, vLLM's metadata, dense keys and values) of `LENGTHS`; unused rows of the cache are NaN."""
    draw = torch.Generator().manual_seed(1)
    counts = [-(-keys // page) for _, keys in LENGTHS]
    blocks = sum(counts) + 2
    shape = (blocks, page, heads[1], 2 * dim) if order == "NHD" else (blocks, heads[1], page, 2 * dim)
    cache = torch.full(shape, math.nan, dtype=torch.float16)
    cache = cache.transpose(1, 2) if order == "NHD" else cache
    pages = torch.randperm(blocks, generator=draw).to(torch.int32)
    table = torch.zeros(len(LENGTHS), max(counts) + 1, dtype=torch.int32)
    dense, first = [], 0
    for b, (_, keys) in enumerate(LENGTHS):
        table[b, : counts[b]] = pages[first : first + counts[b]]
        first += counts[b]
        kv = torch.randn(keys, heads[1], 2 * dim, generator=draw).half()
        dense.append(kv)
        for place in range(keys):
            cache[table[b, place // page], :, place % page] = kv[place]
    starts = torch.tensor([0, *(q for q, _ in LENGTHS)]).cumsum(0).to(torch.int32)
    query = torch.randn(int(starts[-1]) + 3, heads[0], dim, generator=draw).half()
    common = _common(module)(
        query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=torch.tensor([k for _, k in LENGTHS], dtype=torch.int32),
        num_reqs=len(LENGTHS), num_actual_tokens=int(starts[-1]), max_query_len=20, max_seq_len=40, block_table_tensor=table,
        slot_mapping=torch.zeros(int(starts[-1]), dtype=torch.int64), causal=True,
    )  # fmt: skip
    return query, cache, common, dense


def _common(module: Any) -> Any:
    return importlib.import_module("vllm.v1.attention.backend").CommonAttentionMetadata


def builder(module: Any, longest: int = 4096) -> Any:
    config = types.SimpleNamespace(model_config=types.SimpleNamespace(max_model_len=longest))
    return module.TilecastMetadataBuilder(None, ["layer"], config, torch.device("cpu"))


def impl(module: Any, monkeypatch: pytest.MonkeyPatch, *given: Any, **more: Any) -> Any:
    """An instance without vLLM's process groups, which only an engine has."""
    found = module.TilecastImpl
    for base in found.__mro__[1:]:
        if "__new__" in vars(base) and base is not object:
            monkeypatch.setattr(base, "__new__", lambda cls, *a, **k: object.__new__(cls))
    return found(*given, **more)


@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize(
    "more", [{}, {"sliding_window": 9}, {"logits_soft_cap": 5.0}, {"sinks": torch.linspace(-1, 1, 4).double()}]
)
def test_forward_is_attention_to_the_paged_cache(module, monkeypatch, order, more) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(calls, "serve", reference)
    query, cache, common, dense = batch(module, order=order)
    layer = impl(module, monkeypatch, 4, 64, 0.1, 2, **more)
    output = torch.full_like(query, 7.0)
    metadata = builder(module).build(0, common)
    assert layer.forward(LAYER, query, query, query, cache, metadata, output) is output
    sinks, window = more.get("sinks"), more.get("sliding_window")
    for b, (queries, keys) in enumerate(LENGTHS):
        rows = slice(int(common.query_start_loc[b]), int(common.query_start_loc[b + 1]))
        k, v = dense[b].double().repeat_interleave(2, 1).split(64, -1)
        scores = torch.einsum("qhd,khd->hqk", query[rows].double(), k) * 0.1
        if "logits_soft_cap" in more:
            scores = 5.0 * torch.tanh(scores / 5.0)
        age = torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)[None]
        scores = scores.masked_fill((age < 0) | (age >= (window or keys)), -math.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, queries, 1)], -1)
        want = torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :keys], v)
        assert torch.allclose(output[rows].double(), want, atol=2e-3)
    # Rows beyond the batch's tokens are padding, and stay.
    assert (output[int(common.query_start_loc[-1]) :] == 7.0).all()


def test_outputs_with_heads_and_dims_together_are_written_too(module, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(calls, "serve", reference)
    query, cache, common, _ = batch(module)
    layer, metadata = impl(module, monkeypatch, 4, 64, 0.1, 2), builder(module).build(0, common)
    apart, together = torch.zeros_like(query), torch.zeros_like(query).flatten(1)
    for output in (apart, together):
        layer.forward(LAYER, query, query, query, cache, metadata, output)
    assert torch.equal(apart.flatten(1), together)


def test_a_captured_graph_is_right_for_any_length_of_the_model(module, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    _, _, common, _ = batch(module)
    assert builder(module).build(0, common).max_seq_len == 40
    assert builder(module).build_for_cudagraph_capture(common).max_seq_len == 4096
    seen = []
    monkeypatch.setattr(calls, "serve", lambda *a: (seen.append(a[-6]), reference(*a))[1])
    query, cache, common, _ = batch(module)
    layer = impl(module, monkeypatch, 4, 64, 0.1, 2)
    layer.forward(LAYER, query, query, query, cache, builder(module).build_for_cudagraph_capture(common), query.clone())
    # No more than the table has room for: 4 pages of 16.
    assert seen == [4 * 16]


def test_a_profiling_run_gives_zeros(module, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    output = torch.full((3, 4, 64), 7.0)
    assert not impl(module, monkeypatch, 4, 64, 0.1, 2).forward(LAYER, output, output, output, None, None, output).any()


def test_keys_and_values_go_to_vllm_s_own_writer(module, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    written = []
    stand_in = types.ModuleType("writer")
    stand_in.triton_reshape_and_cache_flash = lambda *a: written.append(a)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.ops.triton_reshape_and_cache_flash", stand_in)
    _, cache, common, _ = batch(module)
    key = torch.zeros(27, 2, 64, dtype=torch.float16)
    impl(module, monkeypatch, 4, 64, 0.1, 2).do_kv_cache_update(LAYER, key, key, cache, common.slot_mapping)
    ((_, _, k_cache, v_cache, slots, kind, *_),) = written
    assert k_cache.shape == v_cache.shape == (cache.shape[0], 16, 2, 64)
    assert k_cache.data_ptr() == cache.data_ptr() and v_cache.data_ptr() == cache.data_ptr() + 128
    assert kind == "auto" and slots is common.slot_mapping


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, None),
        ({"head_size": 84}, "head_size not supported"),
        ({"head_size": 80}, None),
        (
            {"head_size": 80, "device_capability": types.SimpleNamespace(major=8, minor=0)},
            "head size 80 on a GPU of compute capability 8.0",
        ),
        ({"device_capability": types.SimpleNamespace(major=8, minor=0)}, None),
        ({"dtype": torch.float32}, "dtype not supported"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype not supported"),
        ({"kv_cache_dtype": "float16"}, "kv_cache_dtype float16 beside queries of torch.bfloat16"),
        ({"block_size": 8}, "block_size not supported"),
        ({"block_size": 528}, None),
        ({"use_mla": True}, "MLA not supported"),
        ({"has_sink": True, "has_sliding_window": True, "use_batch_invariant": True}, None),
        ({"use_non_causal": True}, "non-causal attention not supported"),
        ({"device_capability": types.SimpleNamespace(major=7, minor=5)}, "compute capability not supported"),
    ],
)
def test_vllm_is_told_what_is_possible(module, changed, reason) -> None:  # type: ignore[no-untyped-def]
    asked = {
        "head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16, "use_mla": False,
        "has_sink": False, "use_sparse": False, "use_mm_prefix": False, "use_per_head_quant_scales": False,
        "device_capability": CAPABILITY, "attn_type": "decoder", **changed,
    }  # fmt: skip
    found = module.TilecastBackend.validate_configuration(**asked)
    assert found == [] if reason is None else reason in found


def test_what_is_not_possible_is_refused(module, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UnsupportedError, match="alibi_slopes: expected None"):
        impl(module, monkeypatch, 4, 64, 0.1, 2, alibi_slopes=[1.0] * 4)
    with pytest.raises(UnsupportedError, match="attn_type: expected decoder attention"):
        impl(module, monkeypatch, 4, 64, 0.1, 2, attn_type="encoder_only")
    _, _, common, _ = batch(module)
    common.causal = torch.tensor([True])
    with pytest.raises(UnsupportedError, match="causal: expected True or False for the whole batch"):
        builder(module).build(0, common)
    output = torch.zeros(1)
    with pytest.raises(UnsupportedError, match="output_scale: expected None"):
        impl(module, monkeypatch, 4, 64, 0.1, 2).forward(LAYER, output, output, output, output, None, output, output)


def test_every_method_takes_what_vllm_s_takes(module) -> None:  # type: ignore[no-untyped-def]
    """Names of parameters, in vLLM's order: on vLLM itself this finds what a new version changed."""
    for ours in (module.TilecastBackend, module.TilecastMetadataBuilder, module.TilecastImpl):
        base = ours.__mro__[1]
        for name, function in inspect.getmembers(ours, callable):
            theirs = getattr(base, name, None)
            if name not in vars(ours) or theirs is None or (name.startswith("__") and name != "__init__"):
                continue
            mine, wanted = (list(inspect.signature(f).parameters) for f in (function, theirs))
            assert mine[: len(wanted)] == wanted, f"{ours.__name__}.{name}"


def test_nothing_abstract_is_left(module) -> None:  # type: ignore[no-untyped-def]
    for ours in (module.TilecastBackend, module.TilecastMetadataBuilder, module.TilecastImpl):
        assert not getattr(ours, "__abstractmethods__", ())
    assert module.TilecastBackend.get_name() == "CUSTOM"
    assert module.TilecastBackend.get_impl_cls() is module.TilecastImpl
    assert module.TilecastBackend.get_builder_cls() is module.TilecastMetadataBuilder


# --- the plugin ---------------------------------------------------------------------------------------------------


def test_the_plugin_registers_however_often_it_is_called(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    made = vllm_contract.stand_ins()
    for module_name, stand_in in made.items():
        monkeypatch.setitem(sys.modules, module_name, stand_in)
    vllm_plugin.register()
    vllm_plugin.register()
    assert made["vllm.v1.attention.backends.registry"].registered == {"CUSTOM": vllm_plugin.BACKEND}


def test_the_plugin_leaves_another_s_place_alone(monkeypatch, caplog) -> None:  # type: ignore[no-untyped-def]
    made = vllm_contract.stand_ins()
    for module_name, stand_in in made.items():
        monkeypatch.setitem(sys.modules, module_name, stand_in)
    registry = made["vllm.v1.attention.backends.registry"]
    registry.registered["CUSTOM"] = "their.Backend"
    with caplog.at_level(logging.WARNING):
        vllm_plugin.register()
    assert registry.registered == {"CUSTOM": "their.Backend"} and "CUSTOM is taken by their.Backend" in caplog.text


def test_the_plugin_never_stops_an_engine(monkeypatch, caplog) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.registry", types.ModuleType("registry"))
    for name in vllm_contract.MODULES[:-3]:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    with caplog.at_level(logging.WARNING):
        vllm_plugin.register()
    assert "expected vLLM 0.30 or newer" in caplog.text


@pytest.mark.skipif(not HERE, reason="vLLM is not installed")
def test_vllm_s_registry_finds_the_backend() -> None:
    vllm_plugin.register()
    vllm_plugin.register()
    registry = importlib.import_module("vllm.v1.attention.backends.registry")
    found = registry.AttentionBackendEnum.CUSTOM.get_class()
    assert found.__name__ == "TilecastBackend"
    # A layer of vLLM looks its backend up again by the name that the backend gives.
    assert registry.AttentionBackendEnum[found.get_name()].get_class() is found


@pytest.mark.skipif(not HERE, reason="vLLM is not installed")
def test_vllm_s_writer_of_caches_takes_what_it_is_given() -> None:
    import ast

    spec = importlib.util.find_spec("vllm.v1.attention.ops.triton_reshape_and_cache_flash")
    assert spec is not None and spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    (function,) = [
        n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "triton_reshape_and_cache_flash"
    ]
    names = [argument.arg for argument in function.args.args]
    assert names[:8] == [
        "key",
        "value",
        "key_cache",
        "value_cache",
        "slot_mapping",
        "kv_cache_dtype",
        "k_scale",
        "v_scale",
    ]
    assert len(names) - len(function.args.defaults) == 8
