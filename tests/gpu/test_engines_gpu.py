"""The sglang backend on a GPU, on what stands in for sglang: chunks and decodes, and a captured decode step that follows its batch."""

from __future__ import annotations

import importlib
import sys

import pytest

torch = pytest.importorskip("torch")

from support import sglang_contract as contract  # noqa: E402
from support.sglang_runs import batch, dense, layer, runner  # noqa: E402

PATH = "tilecast.kernels.engines.sglang_backend"
Mode = contract.ForwardMode


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        monkeypatch.delitem(sys.modules, name)
    for name, made in contract.stand_ins().items():
        monkeypatch.setitem(sys.modules, name, made)
    monkeypatch.delitem(sys.modules, PATH, raising=False)
    yield importlib.import_module(PATH).TilecastAttnBackend
    sys.modules.pop(PATH, None)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn])
def test_chunks_and_decodes(backends, dtype) -> None:
    run = runner(16, 2048, dtype, "cuda")
    factors = {"k_scale": torch.tensor(0.5, device="cuda"), "v_scale": torch.tensor(2.0, device="cuda")}
    backend, one = backends(run), layer(**(factors if dtype.itemsize == 1 else {}))
    draw, lengths = torch.Generator("cuda").manual_seed(4), [0, 0, 0]
    history: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[], [], []]
    for mode, news in (
        (Mode.EXTEND, [700, 3, 90]),
        (Mode.EXTEND, [400, 1, 7]),
        (Mode.DECODE, [1, 1, 1]),
        (Mode.MIXED, [1, 300, 1]),
    ):
        lengths = [keys + new for keys, new in zip(lengths, news, strict=True)]
        forward = batch(run, mode, list(zip(news, lengths, strict=True)))
        q, k, v = (torch.randn(sum(news), heads, 64, generator=draw, device="cuda").half() for heads in (4, 2, 2))
        backend.init_forward_metadata(forward)
        out = backend.forward(q.flatten(1), k, v, one, forward).view(-1, 4, 64)
        at = 0
        for number, new in enumerate(news):
            rows = slice(at, at + new)
            history[number].append((k[rows], v[rows]))
            ks, vs = (torch.cat([pair[i] for pair in history[number]]) for i in (0, 1))
            if dtype.itemsize == 1:
                ks, vs = ((x / s).to(dtype).float() * s for x, s in ((ks, 0.5), (vs, 2.0)))
            assert torch.allclose(out[rows].double(), dense(q[rows], ks, vs, one, None), atol=4e-3)
            at += new


def test_a_captured_decode_step_follows_its_batch(backends) -> None:
    run = runner(64, 4096, torch.bfloat16, "cuda")
    pool = run.token_to_kv_pool
    pool.k.normal_(), pool.v.normal_()
    backend, one = backends(run), layer()
    backend.init_cuda_graph_state(3, 3)
    kept = batch(run, Mode.DECODE, [(1, 1), (1, 1), (1, 1)])
    q, k, v = (torch.randn(3, heads, 64, device="cuda").bfloat16() for heads in (4, 2, 2))

    def step():
        backend.init_forward_metadata_in_graph(kept)
        return backend.forward(q.flatten(1), k, v, one, kept)

    backend.init_forward_metadata_out_graph(kept, in_capture=True)
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for lengths in ([5, 4000, 77], [900, 1, 2049]):
        now = batch(run, Mode.DECODE, [(1, n) for n in lengths])
        for name in ("seq_lens", "out_cache_loc", "req_pool_indices"):
            getattr(kept, name).copy_(getattr(now, name))
        graph.replay()
        got = out.clone()
        backend.init_forward_metadata(now)
        assert torch.equal(backend.forward(q.flatten(1), k, v, one, now), got)
