"""Gradients of the attention operator without a GPU: what reaches the backward pass, what comes back, what is refused.

The stand-in kernels of `conftest` run on the CPU; the generated ones are in `codegen/portable/test_triton_backward.py`.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from support.stand_in_kernels import BACKWARD, tensors

from tilecast.kernels import registry
from tilecast.kernels.errors import UnsupportedError

MASKS = [{}, {"causal": True}, {"window": (3, 1)}]


def leaves(torch, **shape):
    return [t.requires_grad_() for t in tensors(torch, **shape)]


def exact(torch, inputs, options, dout, dlse=None):
    """Gradients of the same call in float64, by the fallback."""
    from tilecast.kernels.operator import attention

    wide = [t.detach().double().requires_grad_() for t in inputs]
    out, lse = attention(*wide, **options, return_lse=True, fallback="sdpa")
    total = (out * dout.double()).sum()
    if dlse is not None:
        total = total + (lse * dlse).sum()
    return torch.autograd.grad(total, wide)


@pytest.mark.parametrize("options", MASKS, ids=str)
def test_gradients_of_out_and_lse(torch, op, options) -> None:
    inputs = leaves(torch)
    dout, dlse = torch.randn(2, 4, 5, 64).half(), torch.randn(2, 4, 5)
    out, lse = op.attention(*inputs, **options, return_lse=True)
    found = torch.autograd.grad((out, lse), inputs, (dout, dlse), retain_graph=True)
    for mine, true in zip(found, exact(torch, inputs, options, dout, dlse), strict=True):
        assert torch.allclose(mine.double(), true, atol=4e-3)
    # Of one output alone: the other one's gradient is not even made.
    of_out = torch.autograd.grad(out, inputs, dout, retain_graph=True)
    assert op.launched[-1][1][-1] is None
    for mine, true in zip(of_out, exact(torch, inputs, options, dout), strict=True):
        assert torch.allclose(mine.double(), true, atol=4e-3)
    of_lse = torch.autograd.grad(lse, inputs, dlse)
    for mine, true in zip(of_lse, exact(torch, inputs, options, torch.zeros_like(dout), dlse), strict=True):
        assert torch.allclose(mine.double(), true, atol=4e-3)


def test_the_backward_pass_gets_the_reduced_mask_and_readable_tensors(torch, op) -> None:
    for options, module, window in (
        ({"causal": True}, "bk64_64_causal", (-1, -1)),
        ({"window": (6, 4)}, "bk64_64_none", (-1, -1)),
        ({"causal": True, "window": (2, 0)}, "bk64_64_window", (2, 0)),
    ):
        inputs = leaves(torch)
        # The gradient of a sum is one number, expanded.
        op.attention(*inputs, **options).sum().backward()
        name, arguments = op.launched[-1]
        assert (name, arguments[10:12]) == (module, window)
        dout = arguments[5]
        assert dout.stride(3) == 1 and not any(n % 8 for n in dout.stride()[:3]) and bool((dout == 1).all())
    odd = tensors(torch)[0].transpose(2, 3).contiguous().transpose(2, 3)
    inputs = leaves(torch)
    out = op.attention(*inputs)
    torch.autograd.grad(out, inputs, odd)
    assert torch.equal(op.launched[-1][1][5], odd) and op.launched[-1][1][5].stride(3) == 1


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_query_heads_of_one_query_are_rows(torch, op, layout) -> None:
    for options, rows in (({}, 3), ({"causal": True}, 3), ({"causal": True, "window": (4, 0)}, 1)):
        inputs = leaves(torch, heads=6, heads_kv=2, seqlen_q=1)
        given = [t.transpose(1, 2) if layout == "bshd" else t for t in inputs]
        dout, dlse = torch.randn_like(given[0]), torch.randn(2, 6, 1)
        for _ in range(2):  # as it is met, and as it is remembered
            out, lse = op.attention(*given, **options, layout=layout, return_lse=True)
            found = torch.autograd.grad((out, lse), inputs, (dout, dlse))
            wide = dout.transpose(1, 2) if layout == "bshd" else dout
            for mine, true in zip(found, exact(torch, inputs, options, wide, dlse), strict=True):
                assert mine.shape == true.shape and torch.allclose(mine.double(), true, atol=4e-3)
            q, k, _, out, lse, dout_there, dq = op.launched[-1][1][:7]
            assert (
                q.shape[1:3]
                == out.shape[1:3]
                == dout_there.shape[1:3]
                == dq.shape[1:3]
                == ((2, 3) if rows == 3 else (6, 1))
            )
            assert lse.shape == q.shape[:3] and lse.is_contiguous() and k.shape[1] == 2


def test_any_order_of_sums_is_for_those_who_ask(torch, op) -> None:
    inputs = leaves(torch)
    compiled = torch.compile(op.attention, backend="aot_eager", fullgraph=True)
    for attention in (op.attention, compiled):
        for options, want in (({}, True), ({"deterministic": True}, True), ({"deterministic": False}, False)):
            attention(*inputs, **options).sum().backward()
            assert op.orders.pop() is want
    q, k, v = tensors(torch)
    out, lse = op.attention(q, k, v, return_lse=True)
    for more, want in (((), True), ((False,), False)):
        torch.ops.tilecast.attention_backward(out, q, k, v, out, lse, None, None, -1, -1, *more)
        assert op.orders.pop() is want
    from tilecast.kernels.transformers_adapter import attention_function

    for made, want in ((attention_function(), True), (attention_function(deterministic=False), False)):
        made(None, *inputs, None)[0].sum().backward()
        assert op.orders.pop() is want
    # What the whole program was told goes first.
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        op.attention(*inputs, deterministic=False).sum().backward()
    finally:
        torch.use_deterministic_algorithms(before)
    assert op.orders.pop() is True


def test_gradients_follow_the_memory_order_of_their_tensors(torch, op) -> None:
    inputs = [t.transpose(1, 2).contiguous().requires_grad_() for t in tensors(torch, d=192, dv=128)]
    out = op.attention(*inputs, layout="bshd")
    found = torch.autograd.grad(out, inputs, torch.ones_like(out))
    assert all(mine.is_contiguous() and mine.shape == t.shape for mine, t in zip(found, inputs, strict=True))
    launched = op.launched[-1][1]
    assert all(launched[i].transpose(1, 2).is_contiguous() for i in (6, 7, 8))
    # Heads that are the same memory: each has a gradient of its own, which autograd adds up.
    q, k, v = tensors(torch, heads_kv=1)
    one = k.clone().requires_grad_()
    op.attention(q, one.expand(-1, 4, -1, -1), v.expand(-1, 4, -1, -1)).sum().backward()
    two = k.clone().requires_grad_()
    op.attention(q, two, v).sum().backward()
    assert torch.allclose(one.grad, two.grad, atol=2e-3)


def test_what_a_backward_reads_may_not_change_after_the_forward_and_a_copy_does_not(torch, op) -> None:
    for place in range(3):
        inputs = leaves(torch)
        kept = [x.detach().clone().requires_grad_() if i == place else x for i, x in enumerate(inputs)]
        out = op.attention(*kept)
        with torch.no_grad():
            kept[place].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
        # Rows that no kernel reads as they are: the forward has copied them, and gradients are of what it copied.
        want = torch.autograd.grad(op.attention(*inputs).sum(), inputs)
        wider = torch.nn.functional.pad(inputs[place].detach(), (0, 3))
        odd = [wider[..., :64].requires_grad_() if i == place else x for i, x in enumerate(inputs)]
        out = op.attention(*odd)
        with torch.no_grad():
            odd[place].mul_(2)
        for x, y in zip(torch.autograd.grad(out.sum(), odd), want, strict=True):
            assert torch.equal(x, y)


def test_copies_are_what_hooks_and_checkpoints_see(torch, op) -> None:
    from torch.autograd.graph import saved_tensors_hooks
    from torch.utils.checkpoint import checkpoint

    inputs = [torch.nn.functional.pad(x, (0, 3))[..., :64].requires_grad_() for x in tensors(torch)]
    want = torch.autograd.grad(op.attention(*inputs).sum(), inputs)
    kept: list = []
    with saved_tensors_hooks(lambda x: kept.append(x) or len(kept) - 1, lambda i: kept[i]):
        out = op.attention(*inputs)
    assert [x.is_contiguous() for x in kept] == [True] * 5 and all(map(torch.equal, kept[:3], inputs))
    for found in (torch.autograd.grad(out.sum(), inputs), *(
        torch.autograd.grad(checkpoint(op.attention, *inputs, use_reentrant=False).sum(), inputs) for _ in range(2)
    )):  # fmt: skip
        assert all(map(torch.equal, found, want))


def test_only_what_asks_gets_a_gradient(torch, op) -> None:
    for wanted in range(3):
        inputs = [t.requires_grad_(i == wanted) for i, t in enumerate(tensors(torch))]
        out, lse = op.attention(*inputs, return_lse=True)
        assert out.requires_grad and lse.requires_grad
        out.sum().backward()
        assert [t.grad is not None for t in inputs] == [i == wanted for i in range(3)]
    inputs = leaves(torch)
    with torch.no_grad():
        assert not op.attention(*inputs).requires_grad
    with torch.inference_mode():
        op.attention(*inputs)
    assert not op.attention(*[t.detach() for t in inputs]).requires_grad


@pytest.mark.parametrize("shape", [{"batch": 0}, {"seqlen_q": 0}, {"seqlen_k": 0}, {"heads": 0, "heads_kv": 0}])
def test_empty_problems_have_zero_gradients(torch, op, shape) -> None:
    inputs = leaves(torch, **shape)
    op.attention(*inputs).sum().backward()
    assert all(t.grad.shape == t.shape and not t.grad.any() for t in inputs) and not op.launched


def test_checkpointing_gives_the_same_gradients(torch, op) -> None:
    from torch.utils.checkpoint import checkpoint

    def layer(q, k, v):
        return op.attention(q * 2, k, v, causal=True)

    expected = torch.autograd.grad(layer(*(inputs := leaves(torch))).sum(), inputs)
    for reentrant in (False, True):
        again = leaves(torch)
        found = (
            torch.autograd.grad(checkpoint(layer, *again, use_reentrant=reentrant).sum(), again)
            if not reentrant
            else None
        )
        if reentrant:
            checkpoint(layer, *again, use_reentrant=True).sum().backward()
            found = [t.grad for t in again]
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


# --- the operators as tracers see them -------------------------------------------------------------------------------


def test_compiled_gradients_are_the_eager_ones(torch, op) -> None:
    def layer(q, k, v):
        out, lse = op.attention(q * 1, k, v, causal=True, return_lse=True)
        return (out * 2).sum() + lse.sum()

    for dynamic in (None, True):
        torch._dynamo.reset()
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        for seqlen in (5, 6, 7):
            inputs = leaves(torch, seqlen_q=seqlen)
            found = torch.autograd.grad(compiled(*inputs), inputs)
            expected = torch.autograd.grad(layer(*inputs), inputs)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    torch._dynamo.reset()
    plain = torch.compile(lambda *t: op.attention(*t, causal=True), fullgraph=True, backend="aot_eager")
    inputs = leaves(torch)
    plain(*inputs).sum().backward()
    assert all(t.grad is not None for t in inputs)


def test_operators_pass_opcheck(torch, op) -> None:
    inputs = leaves(torch)
    torch.library.opcheck(torch.ops.tilecast.attention_forward.default, (*inputs, None, 3, 0, True))
    q, k, v = (t.detach() for t in inputs)
    out, lse = op.attention(q, k, v, window=(3, 0), return_lse=True)
    for dlse in (None, torch.randn_like(lse)):
        arguments = (torch.randn_like(out), q, k, v, out, lse, dlse, None, 3, 0)
        torch.library.opcheck(torch.ops.tilecast.attention_backward.default, arguments)


def test_watchers_see_the_backward_operator(torch, op) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    inputs = leaves(torch)
    with FlopCounterMode(display=False) as counter:
        op.attention(*inputs, causal=True).sum().backward()
    forward = 2 * 2 * 4 * 128 * (3 + 4 + 5 + 6 + 7)
    assert counter.get_total_flops() == forward + forward * 5 // 2
    with torch.profiler.profile() as profile:
        op.attention(*inputs, causal=True).sum().backward()
    assert {"tilecast::attention_forward", "tilecast::attention_backward"} <= {e.name for e in profile.events()}


def test_meta_and_fake_tensors_have_gradients(torch, op) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    meta = [t.detach().to("meta").requires_grad_() for t in tensors(torch, d=192, dv=128)]
    op.attention(*meta).sum().backward()
    assert [t.grad.shape for t in meta] == [t.shape for t in meta]
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(t).requires_grad_() for t in tensors(torch)]
        op.attention(*fake).sum().backward()
        assert [t.grad.stride() for t in fake] == [t.stride() for t in fake]


# --- refusals --------------------------------------------------------------------------------------------------------


def test_a_second_derivative_is_refused(torch, op) -> None:
    inputs = leaves(torch)
    with pytest.raises(UnsupportedError, match="a gradient of a gradient is asked for"):
        torch.autograd.grad(op.attention(*inputs).sum(), inputs, create_graph=True)


def test_function_transforms_are_refused_or_fall_back(torch, op) -> None:
    q, k, v = tensors(torch)
    tangents = (torch.ones_like(q),)
    transforms = [
        lambda f: torch.vmap(lambda x: f(x[None], k[:1], v[:1]))(q),
        lambda f: torch.func.grad(lambda x: f(x, k, v).sum())(q),
        lambda f: torch.func.vjp(lambda x: f(x, k, v), q),
        lambda f: torch.func.jvp(lambda x: f(x, k, v), (q,), tangents),
    ]
    for transform in transforms:
        with pytest.raises(UnsupportedError, match=r"got one under a torch\.func transform"):
            transform(op.attention)
    asked = torch.func.grad(lambda x: op.attention(x, k, v, fallback="sdpa").sum())(q)
    assert asked.shape == q.shape and not op.launched


def test_forward_mode_is_refused(torch, op) -> None:
    import torch.autograd.forward_ad as forward_ad

    q, k, v = tensors(torch)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(UnsupportedError, match="forward-mode differentiation"):
            op.attention(dual, k, v)


def test_the_bare_operator_needs_the_lse(torch, op) -> None:
    with pytest.raises(UnsupportedError, match="expected return_lse=True where a gradient is asked for, got False"):
        torch.ops.tilecast.attention_forward(*leaves(torch), None, -1, -1, False)


def test_devices_without_a_backward_pass_refuse_or_fall_back(torch, op, monkeypatch) -> None:
    inputs = leaves(torch)
    monkeypatch.setattr(registry, "shipped_backward", lambda: tuple(replace(e, head_dim_qk=32) for e in BACKWARD))
    for call in (op.attention, torch.compile(op.attention, backend="aot_eager")):
        with pytest.raises(UnsupportedError, match="expected at most that of a shipped backward pass"):
            call(*inputs)
    op.attention(*inputs, fallback="sdpa").sum().backward()
    assert all(t.grad is not None for t in inputs)
    monkeypatch.setattr(registry, "shipped_backward", lambda: ())
    with pytest.raises(
        UnsupportedError, match=r"no shipped backward pass for fp16, mask 'none' on compute capability 9\.0"
    ):
        op.attention(*inputs)
    assert not op.attention(*[t.detach() for t in inputs]).requires_grad


def test_a_direct_call_of_the_backward_operator_checks_its_tensors(torch, op) -> None:
    q, k, v = tensors(torch)
    out, lse = op.attention(q, k, v, return_lse=True)
    operator = torch.ops.tilecast.attention_backward
    with pytest.raises(ValueError, match="k: expected head_dim 64 as q has, got 32"):
        operator(out, q, k[..., :32], v, out, lse, None, None, -1, -1)
    assert math.isfinite(float(operator(out, q, k, v, out, lse, None, None, -1, -1)[0].sum()))
