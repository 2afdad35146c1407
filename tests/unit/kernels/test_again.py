"""Calls met before: what tells two calls apart, what is kept of them, and that the second goes straight to its launch."""

from __future__ import annotations

import gc
import weakref

import pytest

torch = pytest.importorskip("torch")

from tilecast.kernels import again, registry  # noqa: E402


@pytest.fixture
def launches(op, monkeypatch):
    """The operator on stand-ins that can be started again: (what was planned, what was started again), gradients too."""
    from tilecast.kernels import gradients

    made = registry.launcher
    planned, started = [], []

    def launcher(entry):
        launch = made(entry)

        def start_of(*like):
            planned.append(tuple(like[0].shape))
            if entry.direction == "bwd":
                settings = like[9:12]

                def start(q, k, v, out, lse, dout, dlse, *found):
                    started.append((dout,))
                    launch(q, k, v, out, lse, dout, *found, *settings, dlse)

            else:
                settings = like[5:]

                def start(q, k, v, out, lse):
                    started.append((q, k, v))
                    launch(q, k, v, out, lse, *settings)

            return start

        launch.started = start_of
        return launch

    monkeypatch.setattr(registry, "launcher", launcher)
    monkeypatch.setattr(op, "_memory", again.Memory())
    monkeypatch.setattr(gradients, "_memory", again.Memory())
    return planned, started


def problem(seed: int = 0, keys: int = 7):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(2, heads, rows, 64, generator=draw).half() for heads, rows in ((4, 5), (2, keys), (2, keys))]


def odd_of(x, heads_inside: bool = False):
    """``x`` at an address that is no whole 16 bytes, in its memory order or with heads inside the lengths."""
    like = x.transpose(1, 2) if heads_inside else x
    made = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(like.shape).copy_(like.detach())
    return made.transpose(1, 2) if heads_inside else made


def test_the_second_call_of_a_shape_starts_at_once_and_is_the_same(op, launches) -> None:
    planned, started = launches
    for seed in range(3):
        q, k, v = problem(seed)
        for mask in ({}, {"causal": True}, {"window": (2, 1)}, {"scale": 0.5}, {"return_lse": True}):
            got = op.attention(q, k, v, **mask)
            want = op.attention(q.float(), k.float(), v.float(), **mask, fallback="sdpa")
            for one, other in zip(*((x if isinstance(x, tuple) else (x,)) for x in (got, want)), strict=True):
                torch.testing.assert_close(one.float(), other.float(), atol=2e-3, rtol=1e-2)
    assert len(planned) == 5 and len(started) == 10
    assert all(a is b for a, b in zip(started[-1], (q, k, v), strict=True))


def test_what_differs_is_another_call(op, launches) -> None:
    planned, _ = launches
    q, k, v = problem()
    strided = k.transpose(1, 2).contiguous().transpose(1, 2)
    for one in (
        (q, k, v),
        (q, strided, v),
        (q[:1], k[:1], v[:1]),
        (q.bfloat16(), k.bfloat16(), v.bfloat16()),
        (q, k, k),
    ):
        for _ in range(2):
            op.attention(*one)
    assert len(planned) == 5
    for _ in range(3):  # copied in every call
        torch.testing.assert_close(op.attention(odd_of(q), k, v), op.attention(q, k, v))
    assert len(planned) == 6


def test_calls_with_gradients_are_known_too_and_stay_differentiable(op, launches) -> None:
    planned, started = launches
    for seed in range(2):
        for with_lse in (False, True):
            inputs = [x.requires_grad_() for x in problem(seed)]
            wide = [x.detach().double().requires_grad_() for x in inputs]
            for one, options in ((inputs, {}), (wide, {"fallback": "sdpa"})):
                out, lse = op.attention(*one, return_lse=True, **options)
                assert out.requires_grad
                # Gradients that lie as the outputs do.
                (out * out.detach()).sum().add((lse * lse.detach()).sum() if with_lse else 0).backward()
            for x, y in zip(inputs, wide, strict=True):
                torch.testing.assert_close(x.grad.double(), y.grad, atol=2e-2, rtol=2e-2)
    # Forwards are planned once and start again three times; gradients of the lse are other calls.
    assert len(planned) == 3 and len(started) == 5


@pytest.mark.parametrize("heads_inside", [False, True])
def test_what_is_copied_is_known_too_and_copied_once_for_both_passes(op, launches, heads_inside) -> None:
    planned, started = launches
    for seed in range(3):
        inputs = [odd_of(x, heads_inside).requires_grad_() for x in problem(seed)]
        wide = [x.detach().double().requires_grad_() for x in inputs]
        op.launched.clear()
        out = op.attention(*inputs)
        found = torch.autograd.grad(out.sum(), inputs)  # the gradient of a sum is copied too
        (_, forward), (_, backward) = op.launched
        for x, one, other, gradient in zip(inputs, forward[:3], backward[:3], found, strict=False):
            assert one is other and one.data_ptr() % 16 == 0 and torch.equal(one, x)
            assert one.stride() == gradient.stride() and one.transpose(1, 2).is_contiguous() is heads_inside
        assert out.transpose(1, 2).is_contiguous() is heads_inside
        exact = torch.autograd.grad(op.attention(*wide, fallback="sdpa").sum(), wide)
        for x, y in zip(found, exact, strict=True):
            torch.testing.assert_close(x.double(), y, atol=2e-2, rtol=2e-2)
    assert len(planned) == 2 and len(started) == 4


def test_gradients_of_one_query_are_known_too(op, launches) -> None:
    planned, started = launches
    for seed in range(3):
        inputs = [x[:, :, :1].requires_grad_() if i == 0 else x.requires_grad_() for i, x in enumerate(problem(seed))]
        wide = [x.detach().double().requires_grad_() for x in inputs]
        for one, options in ((inputs, {}), (wide, {"fallback": "sdpa"})):
            out, lse = op.attention(*one, return_lse=True, **options)
            made = torch.autograd.grad((out * out.detach()).sum() + (lse * lse.detach()).sum(), one)
            one[:] = made
        for x, y in zip(inputs, wide, strict=True):
            assert x.shape == y.shape
            torch.testing.assert_close(x.double(), y, atol=2e-2, rtol=2e-2)
    assert len(planned) == 2 and planned[-1][1:3] == (2, 2) and len(started) == 4


def test_gradients_of_gradients_are_refused_however_often_the_call_was_met(op, launches) -> None:
    from tilecast.kernels.errors import UnsupportedError

    inputs = [x.requires_grad_() for x in problem()]
    for _ in range(2):
        out = op.attention(*inputs)
        torch.autograd.grad(out, inputs, out.detach())
    out = op.attention(*inputs)
    with pytest.raises(UnsupportedError, match="gradient"):
        torch.autograd.grad(out, inputs, out, create_graph=True)


def test_onlookers_still_see_the_operator(op, launches) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import FlopCounterMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    q, k, v = problem()
    for _ in range(2):
        op.attention(q, k, v)
    with Watch():
        op.attention(q, k, v)
    assert "tilecast.attention_forward.default" in seen
    with FlopCounterMode(display=False) as counter:
        op.attention(q, k, v)
    assert counter.get_total_flops() == 4 * 2 * 4 * 5 * 7 * 64


def test_no_tensor_is_kept(op, launches, collects_own) -> None:
    _, started = launches
    given = problem()
    results = [op.attention(*given, return_lse=True) for _ in range(2)]
    op.launched.clear()
    started.clear()
    kept = [weakref.ref(x) for x in (*given, *results[0], *results[1])]
    del given, results
    gc.collect()
    assert [one() for one in kept] == [None] * 7


def test_a_memory_forgets_everything_when_it_is_full(monkeypatch) -> None:
    monkeypatch.setattr(again, "MOST_CALLS", 2)
    memory = again.Memory()
    for key in "abc":
        memory.remember(key, key.upper)
    assert [memory.find(key) is None for key in "abc"] == [True, True, False]
    memory.remember("d", None)
    memory.remember(["no key"], str.upper)
    assert memory.find("d") is None and memory.find(["no key"]) is None


# --- scratch of serving launches --------------------------------------------------------------------------------------


class Zeros:
    """A tensor of a device that is not there."""

    def __init__(self, count, kind):
        self.count, self.kind, self.used_on = count, kind, []

    def numel(self):
        return self.count

    def record_stream(self, stream):
        self.used_on.append(stream)

    def __getitem__(self, part):
        return (self, part.start, part.stop)


@pytest.fixture
def scratch(monkeypatch):
    """Counters on such a device, and where calls stand: (counters, {"stream", "capturing"})."""
    from types import SimpleNamespace

    from tilecast.kernels import scratch as module

    at = {"stream": 1, "capturing": False}
    monkeypatch.setattr(module, "capturing", lambda: at["capturing"])
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: at["stream"], raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: at["stream"])
    monkeypatch.setattr(module, "lasting_zeros", lambda count, kind, device: Zeros(count, kind))
    monkeypatch.setattr(module.Counters, "_empty", lambda self, floats: ("new", floats))
    return module.Counters(SimpleNamespace(type="cuda", index=0)), at


def test_a_streams_launches_share_scratch_and_streams_do_not(scratch) -> None:
    counters, at = scratch
    first = counters.get(1000, 10)
    assert first == counters.get(500, 20) and first[0].kind == torch.float32 and first[1].kind == torch.int32
    at["stream"] = 2
    other = counters.get(1000, 10)
    assert all(a is not b for a, b in zip(first, other, strict=True))


def test_scratch_that_grows_stays_until_its_stream_has_used_it(scratch) -> None:
    counters, _ = scratch
    before = counters.get(1000, 10)
    after = counters.get(1 << 20, 5000)
    assert all(x.used_on == [1] for x in before) and not after[0].used_on
    assert after[0].numel() >= 1 << 20 and after[1].numel() >= 5000
    # Much is never kept.
    assert counters.get((1 << 20) + 1, 1) == (("new", (1 << 20) + 1), after[1])


def test_a_capture_has_scratch_of_its_own(scratch) -> None:
    counters, at = scratch
    eager = counters.get(1000, 10)
    at["capturing"] = True
    (_, one), (_, two) = counters.get(1000, 10), counters.get(1000, 10)
    assert one[0] is two[0] is not eager[1] and one[1:] == (0, 10) and two[1:] == (12, 22)
    assert counters.get(1000, 10)[0] == ("new", 1000)


def test_captures_that_take_most_counters_leave_more_to_the_next(scratch) -> None:
    from tilecast.kernels.scratch import _COUNTERS

    counters, at = scratch
    counters.get(1000, 10)
    stock = counters._stock
    at["capturing"] = True
    counters.get(1000, _COUNTERS // 2 + 4)
    at["capturing"] = False
    counters.get(1000, 10)
    assert counters._stock is not stock and counters._taken == 0


def test_counters_of_a_captured_launch_outlast_their_stock(scratch) -> None:
    """A graph keeps no tensor: once a stock was given back, replays counted in memory that was somebody else's."""
    import gc
    import weakref

    from tilecast.kernels.scratch import _COUNTERS

    counters, at = scratch
    counters.get(1000, 10)
    stocks = []
    for _ in range(3):
        stocks.append(weakref.ref(counters._stock))
        at["capturing"] = True
        counters.get(1000, _COUNTERS // 2 + 4)
        at["capturing"] = False
        counters.get(1000, 10)
    gc.collect()
    assert all(stock() is not None for stock in stocks) and counters._stock is not stocks[-1]()
