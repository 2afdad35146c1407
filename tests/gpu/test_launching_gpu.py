"""Launches in C on the GPU: calls that were met before, on other streams, in graphs, in threads, on memory that comes again."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import tilecast  # noqa: E402
from tilecast.kernels import registry  # noqa: E402
from tilecast.kernels.launching import backward_launcher, launcher  # noqa: E402
from tilecast.kernels.native.library import library  # noqa: E402

SHAPE = (2, 4, 300, 64)


def draw(seed: int, *shape: int) -> Any:
    source = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape or SHAPE, generator=source, device="cuda", dtype=torch.bfloat16)


def step(seed: int) -> tuple[Any, Any]:
    """(results of ours, what they should be): attention with gradients, a product."""
    inputs = [draw(3 * seed + i).requires_grad_() for i in range(3)]
    out = tilecast.attention(*inputs, causal=True)
    grads = torch.autograd.grad(out, inputs, draw(seed + 1000))
    wide = [x.detach().float().requires_grad_() for x in inputs]
    want = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=True)
    want_grads = torch.autograd.grad(want, wide, draw(seed + 1000).float())
    c, a, b = draw(seed, 64, 128), draw(seed + 1, 64, 256), draw(seed + 2, 256, 128)
    return (out, *grads, tilecast.addmm(c, a, b)), (want, *want_grads, torch.addmm(c.float(), a.float(), b.float()))


def near(found: tuple[Any, Any]) -> None:
    for got, want in zip(*found, strict=True):
        assert (got.float() - want).abs().max() <= 0.02 * want.abs().max()


def test_launches_are_in_c() -> None:
    assert library() is not None


def test_memory_that_comes_again_and_again() -> None:
    for seed in range(12):
        kept = [draw(seed, 1, 1, 8 * (seed % 3) + 8, 64) for _ in range(seed % 4)]  # moves what follows
        near(step(seed))
        del kept


def test_calls_follow_the_stream_of_their_time() -> None:
    near(step(0))
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        q, k, v = (torch.zeros(SHAPE, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        torch.cuda._sleep(20_000_000)
        for x, seed in ((q, 1), (k, 2), (v, 3)):
            x.copy_(draw(seed))
        out = tilecast.attention(q, k, v)
    side.synchronize()
    assert torch.equal(out, tilecast.attention(draw(1), draw(2), draw(3)))


def test_a_graph_of_calls_met_before_is_replayed_on_new_numbers() -> None:
    q, k, v = (draw(i) for i in range(3))
    lengths = torch.full((2,), 300, device="cuda", dtype=torch.int32)

    def run() -> tuple[Any, Any]:
        rows, keys, values = (x.transpose(1, 2).contiguous() for x in (q[:, :, -1:], k, v))
        return tilecast.attention(q, k, v), tilecast.attention_kvcache(rows, keys, values, lengths)

    for _ in range(3):
        run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for seed in (10, 20):
        for i, x in enumerate((q, k, v)):
            x.copy_(draw(seed + i))
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(one, other) for one, other in zip(found, run(), strict=True))


def test_threads_launch_the_same_plans() -> None:
    near(step(0))
    wrong: list[Exception] = []

    def work(number: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for seed in range(8):
                    near(step(100 * number + seed))
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_hooks_and_the_profiler_see_every_launch() -> None:
    from triton import knobs

    q, k, v = (draw(i) for i in range(3))
    seen: list[str] = []

    def hook(metadata: Any) -> None:
        seen.append(metadata.get()["name"])

    run: Callable[[], Any] = lambda: tilecast.attention(q, k, v)  # noqa: E731
    run()
    want = run()
    knobs.runtime.launch_enter_hook.add(hook)
    try:
        assert torch.equal(run(), want) and seen == ["attention"]
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    assert torch.equal(run(), want) and len(seen) == 1
    with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as profile:
        run()
        torch.cuda.synchronize()
    names = {event.key for event in profile.key_averages()}
    assert "tilecast::attention_forward" in names


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs")
def test_each_device_launches_its_own() -> None:
    found = [tilecast.attention(*(draw(i).to(f"cuda:{device}") for i in range(3))) for device in (0, 1, 0, 1)]
    assert all(torch.equal(found[0].cpu(), one.cpu()) for one in found)


def whole(module: Any) -> Any:
    """A generated file whose products take every column of its tiles."""
    return SimpleNamespace(**{name: value for name, value in vars(module).items() if name != "HEAD_COLUMNS"})


def modules_of(direction: str, columns: int, mask: str) -> list[Any]:
    """The files that compute heads of so many columns here and may leave some out."""
    known = registry.shipped() if direction == "fwd" else registry.shipped_backward()
    found = registry.candidates(torch.cuda.get_device_capability(), "bf16", columns, columns, mask, known)
    modules = [importlib.import_module(f"{registry.PACKAGE}.{entry.module}") for entry in found]
    return [module for module in modules if columns < sum(getattr(module, "HEAD_COLUMNS", ()))]


@pytest.mark.parametrize("mask", ["none", "causal", "window"])
@pytest.mark.parametrize("columns", [40, 72, 80, 96, 112, 136, 160, 192, 240])
def test_products_of_zeros_change_no_bit(columns, mask) -> None:
    limits = {"none": (-1, -1), "causal": (-1, 0), "window": (100, 0)}[mask]
    q, k, v = draw(1, 2, 4, 333, columns), draw(2, 2, 2, 457, columns), draw(3, 2, 2, 457, columns)
    modules = modules_of("fwd", columns, mask)
    if not modules:
        pytest.skip("no kernel here leaves any out")
    for module in modules:
        found = []
        for one in (module, whole(module)):
            out, lse = torch.empty_like(q), torch.empty(q.shape[:3], device="cuda")
            launcher(one)(q, k, v, out, lse, columns**-0.5, *limits)
            found.append((out, lse))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)), module.__name__


@pytest.mark.parametrize("mask", ["none", "causal", "window"])
@pytest.mark.parametrize("columns", [40, 80, 96, 112, 160, 240])
def test_products_of_zeros_change_no_bit_of_gradients(columns, mask) -> None:
    limits = {"none": (-1, -1), "causal": (-1, 0), "window": (100, 0)}[mask]
    q, k, v, dout = (draw(i, 2, heads, 333, columns) for i, heads in ((1, 4), (2, 2), (3, 2), (4, 4)))
    modules = modules_of("bwd", columns, mask)
    if not modules:
        pytest.skip("no kernel here leaves any out")
    out, lse = tilecast.attention(q, k, v, window=limits, return_lse=True)
    for module in modules:
        found = []
        for one in (module, whole(module)):
            made = [torch.empty_like(x) for x in (q, k, v)]
            backward_launcher(one)(q, k, v, out, lse, dout, *made, columns**-0.5, *limits)
            found.append(made)
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)), module.__name__


HEIGHTS = [entry for entry in registry.read_index(registry.INDEX) if entry.taller is not None]


@pytest.mark.parametrize("lengths", [(1200, 1200), (500, 1900), (2049, 2049)], ids=str)
@pytest.mark.parametrize("entry", HEIGHTS, ids=lambda entry: entry.module)
def test_tiles_of_two_heights_give_the_same_bits(entry, lengths) -> None:
    (queries, keys), (columns, columns_v) = lengths, (entry.head_dim_qk, entry.head_dim_v)
    q, k, v = draw(1, 2, 4, queries, columns), draw(2, 2, 2, keys, columns), draw(3, 2, 2, keys, columns_v)
    # Sharp scores that rise along the keys move the references of rows.
    q, k = 4 * q, k * torch.linspace(0.1, 3.0, keys, device="cuda", dtype=k.dtype)[:, None]
    found = []
    for name in (entry.module, entry.taller[0]):
        out, lse = torch.empty_like(draw(4, 2, 4, queries, columns_v)), torch.empty(q.shape[:3], device="cuda")
        module = importlib.import_module(f"{registry.PACKAGE}.{name}")
        launcher(module)(q, k, v, out, lse, columns**-0.5, -1, 0 if entry.mask == "causal" else -1)
        found.append((out, lse))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
