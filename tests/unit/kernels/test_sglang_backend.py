"""The sglang backend against sglang's contract: on stand-ins for it everywhere, on its own sources where the environment names them.

The kernels need a GPU: here a reference in float64 stands in for them, behind the checks of `attention_kvcache`.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import sys
import types
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from support import sglang_contract as contract  # noqa: E402
from support.paged_reference import serve as reference  # noqa: E402
from support.sglang_runs import batch, dense, layer, runner  # noqa: E402

from tilecast.kernels.engines import sglang_plugin  # noqa: E402
from tilecast.kernels.errors import UnsupportedError  # noqa: E402
from tilecast.kernels.serving import calls  # noqa: E402

PATH = "tilecast.kernels.engines.sglang_backend"
SOURCES = contract.sources()
needs_sources = pytest.mark.skipif(not SOURCES, reason="TILECAST_SGLANG names no unpacked sources of sglang")
Mode = contract.ForwardMode


@pytest.fixture(params=[None, *SOURCES], ids=lambda source: "stand-in" if source is None else str(source.parent.name))
def module(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """`sglang_backend`, imported with sglang's base class or with what stands in for it."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        monkeypatch.delitem(sys.modules, name)
    made = contract.stand_ins()
    for name, stand_in in made.items():
        monkeypatch.setitem(sys.modules, name, stand_in)
    if request.param is not None:
        contract.load_base(made, request.param)
    monkeypatch.setattr(calls, "serve", reference)
    monkeypatch.setattr(calls, "key_of", lambda *given: None)
    monkeypatch.delitem(sys.modules, PATH, raising=False)
    yield importlib.import_module(PATH)
    sys.modules.pop(PATH, None)


@pytest.mark.parametrize("page", [16, 32])
@pytest.mark.parametrize("more", [{}, {"sliding_window_size": 9}, {"logit_cap": 5.0}, {"sinks": True}, {"bytes": True}])
def test_extend_then_decode_is_attention_to_all_tokens(module, page: int, more: dict[str, Any]) -> None:  # type: ignore[no-untyped-def]
    """Prompts in two chunks, then two tokens one by one; then a prompt beside decodes, as a mixed batch has them."""
    more = dict(more)
    narrow, sinks = more.pop("bytes", False), torch.linspace(-1, 1, 4).bfloat16() if more.pop("sinks", False) else None
    factors = {"k_scale": torch.tensor(0.5), "v_scale": torch.tensor(2.0)} if narrow else {}
    run = runner(page, dtype=torch.float8_e4m3fn if narrow else torch.float16)
    backend, one, draw = module.TilecastAttnBackend(run), layer(**more, **factors), torch.Generator().manual_seed(4)
    history: dict[int, list[Any]] = {number: [] for number in range(4)}
    lengths = [0, 0, 0]
    for mode, news in (
        (Mode.EXTEND, [20, 3, 33]), (Mode.EXTEND, [5, 1, 7]), (Mode.DECODE, [1, 1, 1]), (Mode.DECODE, [1, 1, 1]),
        (Mode.MIXED, [1, 9, 1]),
    ):  # fmt: skip
        lengths = [keys + new for keys, new in zip(lengths, news, strict=True)]
        forward = batch(run, mode, list(zip(news, lengths, strict=True)))
        q, k, v = (torch.randn(sum(news), heads, 64, generator=draw).half() for heads in (4, 2, 2))
        backend.init_forward_metadata(forward)
        options = {} if sinks is None else {"sinks": sinks}
        out = backend.forward(q.flatten(1), k, v, one, forward, **options).view(-1, 4, 64)
        at = 0
        for number, new in enumerate(news):
            rows = slice(at, at + new)
            history[number].append([x[rows] for x in (k, v)])
            ks, vs = (torch.cat([pair[i] for pair in history[number]]) for i in (0, 1))
            if narrow:
                ks, vs = (((x / s).to(torch.float8_e4m3fn).float() * s) for x, s in ((ks, 0.5), (vs, 2.0)))
            want = dense(q[rows], ks, vs, one, sinks)
            assert torch.allclose(out[rows].double(), want, atol=2e-3)
            at += new


def test_a_captured_pass_has_room_for_any_length_of_the_model(module, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    seen = []
    monkeypatch.setattr(calls, "serve", lambda *a: (seen.append((a[6].shape, a[-6])), reference(*a))[1])
    run = runner(context=64)
    backend = module.TilecastAttnBackend(run)
    backend.init_cuda_graph_state(4, 4)
    assert backend.get_cuda_graph_seq_len_fill_value() == 1
    forward = batch(run, Mode.DECODE, [(1, 20), (1, 18)])
    q, k = torch.zeros(2, 4 * 64).half(), torch.zeros(2, 2, 64).half()
    backend.init_forward_metadata_out_graph(forward, in_capture=True)
    backend.init_forward_metadata_in_graph(forward)
    backend.forward(q, k, k, layer(), forward)
    backend.init_forward_metadata(forward)
    backend.forward(q, k, k, layer(), forward)
    backend.init_forward_metadata(batch(run, Mode.DECODE, [(1, 20), (1, 18)], seq_lens_cpu=None))
    backend.forward(q, k, k, layer(), forward)
    assert seen == [((2, 4), 64), ((2, 2), 20), ((2, 4), 64)]


def test_what_was_saved_by_others_is_not_written_again(module) -> None:  # type: ignore[no-untyped-def]
    run = runner()
    backend, forward = module.TilecastAttnBackend(run), batch(run, Mode.DECODE, [(1, 1), (1, 1)])
    backend.init_forward_metadata(forward)
    kv = torch.ones(2, 2, 64).half()
    out = backend.forward(torch.zeros(2, 256).half(), kv, kv, layer(), forward)
    assert torch.equal(out, torch.ones(2, 256).half())
    again = backend.forward(torch.zeros(2, 256).half(), kv * 3, kv * 3, layer(), forward, save_kv_cache=False)
    assert torch.equal(again, out)
    idle = batch(run, Mode.IDLE, [(1, 1)])
    backend.init_forward_metadata(idle)
    assert backend.forward(torch.zeros(0, 256).half(), None, None, layer(), idle).shape == (0, 256)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"page_size": 1}, "page_size: expected 16, 32, 64, 128, 256 tokens, got 1; start with --page-size 64"),
        ({"use_mla_backend": True}, "got latent attention"),
        ({"kv_cache_dtype": torch.float8_e5m2}, "kv_cache_dtype: expected bfloat16, float16 or float8_e4m3fn, got torch.float8_e5m2"),
        ({"attention_chunk_size": 8192}, "expected a decoder without attention chunks"),
        ({"token_to_kv_pool": types.SimpleNamespace(translate_loc_from_full_to_swa=None)}, "start with --disable-hybrid-swa-memory"),
        ({"kv_index_translator": types.SimpleNamespace(is_translating=True)}, "got a unified pool"),
    ],
)  # fmt: skip
def test_runners_that_are_not_served(module, more, said) -> None:  # type: ignore[no-untyped-def]
    given = runner()
    for name, value in more.items():
        setattr(given, name, value)
    with pytest.raises(UnsupportedError, match=said):
        module.TilecastAttnBackend(given)


@pytest.mark.parametrize(
    ("more", "options", "said"),
    [
        ({"attn_type": types.SimpleNamespace(value="encoder_only")}, {}, "attn_type: expected decoder attention, got encoder_only"),
        ({"is_cross_attention": True}, {}, "got cross attention"),
        ({"logit_cap": 3.0, "logit_capping_method": "clip"}, {}, "logit_capping_method: expected tanh, got clip"),
        ({"xai_temperature_len": 10}, {}, "xai_temperature_len: expected none"),
        ({}, {"q_rope": torch.zeros(1)}, "q_rope: expected None, got Tensor"),
    ],
)  # fmt: skip
def test_layers_that_are_not_served(module, more, options, said) -> None:  # type: ignore[no-untyped-def]
    run = runner()
    backend, forward = module.TilecastAttnBackend(run), batch(run, Mode.DECODE, [(1, 5)])
    backend.init_forward_metadata(forward)
    before = run.token_to_kv_pool.k.clone()
    with pytest.raises(UnsupportedError, match=said):
        backend.forward(torch.zeros(1, 256).half(), *[torch.zeros(1, 2, 64).half()] * 2, layer(**more), forward, **options)  # fmt: skip
    assert torch.equal(run.token_to_kv_pool.k.view(torch.int16), before.view(torch.int16))


def test_speculation_is_refused(module) -> None:  # type: ignore[no-untyped-def]
    run = runner()
    backend = module.TilecastAttnBackend(run)
    for mode, spec in ((Mode.DECODE, object()), (Mode.TARGET_VERIFY, object()), (Mode.DLLM_EXTEND, None)):
        with pytest.raises(UnsupportedError, match="forward_mode: expected decode or extend without speculation"):
            backend.init_forward_metadata(batch(run, mode, [(1, 5)], spec_info=spec))


def test_every_method_takes_what_sglang_s_takes(module) -> None:  # type: ignore[no-untyped-def]
    ours = module.TilecastAttnBackend
    base = ours.__mro__[1]
    for name in [n for n in vars(ours) if inspect.isfunction(vars(ours)[n]) and not n.startswith("_")]:
        mine, wanted = (list(inspect.signature(getattr(c, name)).parameters) for c in (ours, base))
        assert mine[: len(wanted)] == wanted, name
    assert not getattr(ours, "__abstractmethods__", ())


# --- sglang's own sources -----------------------------------------------------------------------------------------


@needs_sources
@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_the_sources_have_what_is_relied_on(source: Path) -> None:
    pool = contract.classes(contract.tree(source, "mem_cache/memory_pool.py"))["MHATokenToKVPool"]
    methods = contract.functions(pool)
    assert methods["set_kv_buffer"][:7] == ["self", "layer", "loc_info", "cache_k", "cache_v", "k_scale", "v_scale"]
    assert {"get_key_buffer", "get_value_buffer"} <= methods.keys()
    # A bare place is taken as well as a KVWriteLoc.
    assert "unwrap_write_loc" in contract.functions(contract.tree(source, "mem_cache/memory_pool.py"))
    information = contract.classes(contract.tree(source, "model_executor/forward_batch_info.py"))
    known = contract.attributes(information["ForwardBatch"])
    assert {"forward_mode", "req_pool_indices", "seq_lens", "seq_lens_cpu", "out_cache_loc", "spec_info", "extend_seq_lens", "extend_seq_lens_cpu"} <= known  # fmt: skip
    assert {"is_idle", "is_decode", "is_extend", "is_dllm_extend"} <= contract.functions(
        information["ForwardMode"]
    ).keys()
    attention = contract.attributes(contract.classes(contract.tree(source, "layers/radix_attention.py"))["RadixAttention"])  # fmt: skip
    assert set(vars(layer())) <= attention
    # Some are set by a mixin.
    files = sorted((source / "srt/model_executor").glob("model_runner*.py"))
    set_there = set().union(*(contract.attributes(contract.tree(source, f"model_executor/{f.name}")) for f in files))
    assert set(vars(runner())) - {"model_config"} <= set_there
    model = contract.attributes(contract.classes(contract.tree(source, "configs/model_config.py"))["ModelConfig"])
    assert set(vars(runner().model_config)) <= model


@needs_sources
@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_the_sources_register_as_the_plugin_does(source: Path) -> None:
    registry = contract.tree(source, "layers/attention/attention_registry.py")
    assert contract.functions(registry)["register_attention_backend"] == ["name"]
    words = (source / "srt/server_args.py").read_text(encoding="utf-8")
    for name in ("ATTENTION_BACKEND_CHOICES", "DETERMINISTIC_ATTENTION_BACKEND_CHOICES", "add_attention_backend_choices", "add_deterministic_attention_backend_choices"):  # fmt: skip
        assert name in words
    assert '"sglang.srt.plugins"' in (source / "srt/plugins/__init__.py").read_text(encoding="utf-8")


# --- the plugin ---------------------------------------------------------------------------------------------------


def test_the_plugin_registers_however_often_it_is_called(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    made = contract.stand_ins()
    for name, stand_in in made.items():
        monkeypatch.setitem(sys.modules, name, stand_in)
    sglang_plugin.register()
    sglang_plugin.register()
    backends = made["sglang.srt.layers.attention.attention_registry"].ATTENTION_BACKENDS  # type: ignore[attr-defined]
    assert backends == {"tilecast": sglang_plugin.create}
    arguments = vars(made["sglang.srt.server_args"])
    assert arguments["ATTENTION_BACKEND_CHOICES"] == ["triton", "tilecast"]
    assert arguments["DETERMINISTIC_ATTENTION_BACKEND_CHOICES"] == ["triton", "tilecast"]
    monkeypatch.delitem(sys.modules, PATH, raising=False)
    assert type(backends["tilecast"](runner())).__name__ == "TilecastAttnBackend"
    monkeypatch.delitem(sys.modules, PATH)


def test_the_plugin_never_stops_an_engine(monkeypatch, caplog) -> None:  # type: ignore[no-untyped-def]
    for name in contract.MODULES:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    with caplog.at_level(logging.WARNING):
        sglang_plugin.register()
    assert "expected sglang 0.5.15 or newer" in caplog.text
