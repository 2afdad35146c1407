"""Gradients of the attention operator: ``torch.ops.tilecast.attention_backward``, and how autograd comes to call it.

Plain eager calls pass through `differentiable`, which costs less than the dispatcher; whatever watches operators sees
``attention_forward``, of which `keep_for_gradients` and `gradients` are the autograd formula.  Both keep q, k, v, the
output and the lse, and both end in the same operator.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from tilecast.kernels import registry
from tilecast.kernels.again import Memory, facts_of, watched
from tilecast.kernels.copying import empty_output, readable
from tilecast.kernels.errors import NO_DOUBLE_BACKWARD, NO_LSE, UnsupportedError, check_agreement, check_ranks
from tilecast.kernels.flops import attention_backward_flops
from tilecast.kernels.registration import register
from tilecast.kernels.selection import Kernels, backward_kernels, find_kernels

_tensor, _empty_strided = torch.Tensor, torch.empty_strided
_grad_enabled = torch.is_grad_enabled
_memory = Memory()


def differentiable(
    forward: Callable[..., tuple[Any, Any, Any]], q: Any, k: Any, v: Any, scale: float | None, left: int, right: int,
    deterministic: bool,
) -> tuple[Any, Any]:  # fmt: skip
    """(out, lse) of ``forward`` (`operator._forward`) on real tensors, with gradients of q, k and v, which need not have the same bits
    every run unless ``deterministic``."""
    return _Attention.apply(forward, q, k, v, scale, left, right, deterministic)  # type: ignore[no-any-return]


class _Attention(torch.autograd.Function):  # type: ignore[misc]
    """Attention of plain eager calls."""

    @staticmethod
    def forward(
        ctx: Any, forward: Any, q: Any, k: Any, v: Any, scale: float | None, left: int, right: int, deterministic: bool
    ) -> tuple[Any, Any]:
        out, lse, read = forward(q, k, v, scale, left, right, True)
        # A problem without a backward pass is refused where it can still go elsewhere.
        _kernels_of(q, k, v, *registry.reduce_mask(left, right, q.shape[2], k.shape[2])[:1])
        # A copy in place of what was copied: the backward reads what the forward did, and does not copy it again.
        _keep(ctx, (*((q, k, v) if read is None else read), out, lse), scale, left, right, deterministic)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:
        return (None, *gradients(ctx, *given)[:7])


def keep_for_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, Any]) -> None:
    """What a call of ``attention_forward`` keeps; UnsupportedError for one that made no lse."""
    q, k, v, scale, left, right, return_lse, deterministic = inputs
    if not return_lse:
        raise UnsupportedError(NO_LSE)
    _keep(ctx, (q, k, v, *output), scale, left, right, deterministic)


def _keep(ctx: Any, tensors: tuple[Any, ...], *options: Any) -> None:
    ctx.save_for_backward(*tensors)
    ctx.options = options
    # Most calls use one of the two outputs: zeros for the other would cost memory and time.
    ctx.set_materialize_grads(False)


def gradients(ctx: Any, dout: Any, dlse: Any) -> tuple[Any, ...]:
    """Gradients of the inputs of ``attention_forward`` from those of its outputs, each None where nothing uses it."""
    if dout is None and dlse is None:
        return (None,) * 8
    q, k, v, out, lse = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    # Not where a mode or the profiler watches, or the caller wants gradients of these: then it is the dispatcher's.
    plain = type(dout) is _tensor and not _grad_enabled() and not watched(q)
    run = _run if plain else torch.ops.tilecast.attention_backward
    found = run(dout, q, k, v, out, lse, dlse, *ctx.options)
    return (*found, None, None, None, None, None)


def _kernels_of(q: Any, k: Any, v: Any, mask: str) -> Kernels:
    """Backward passes of a problem; UnsupportedError where there is none."""
    found = backward_kernels.get((q.get_device(), q.dtype, q.shape[3], v.shape[3], mask))
    return find_kernels(q, k, v, mask, "bwd") if found is None else found


def same_bits(asked: bool) -> bool:
    """Whether gradients must have the same bits every run: where that is asked for, or of the whole program."""
    return asked or torch.are_deterministic_algorithms_enabled()


def _run(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dlse: Any, scale: float | None, left: int, right: int,
    deterministic: bool = True,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """The operator on a device: dq, dk, dv, each in the memory order of its tensor."""
    deterministic = same_bits(deterministic)
    facts = facts_of((q, k, v, out, lse, dout, dlse), False) if type(q) is _tensor else None
    key = None if facts is None else (facts, scale, left, right, deterministic)
    known = _memory.find(key)
    if known is not None:
        return known(q, k, v, out, lse, dout, dlse)  # type: ignore[no-any-return]
    check_ranks(q, k, v)
    check_agreement(q, k, v)
    made = empty_output(q, q.shape[3]), empty_output(k, k.shape[3]), empty_output(v, v.shape[3])
    asked = q, k, v, out, lse, dout, dlse
    q, k, v, out, lse, dout, dlse = _as_read(*asked)
    start = backward_into(made, dout, q, k, v, out, lse, dlse, scale, left, right, deterministic)
    if key is not None and start is not None:
        call = _known_call(start(), made)
        copied = any(x is not y for x, y in zip(asked, (q, k, v, out, lse, dout, dlse), strict=True))
        _memory.remember(key, (lambda *tensors: call(*_as_read(*tensors))) if copied else call)
    return made


def _as_read(q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, dlse: Any) -> tuple[Any, ...]:
    """The same tensors as kernels read them: a copy, in its memory order, where one is not."""
    *read, dout = readable(q, k, v, out, dout)
    return (*read, lse.contiguous(), dout, None if dlse is None else dlse.contiguous())


def _known_call(start: Any, made: tuple[Any, ...]) -> Callable[..., tuple[Any, Any, Any]]:
    """The call of tensors like those that ``start`` was made for, whose results were ``made``; it keeps none."""
    like = [(tuple(x.shape), x.stride()) for x in made]
    (q_like, k_like, v_like), dtype, device = like, made[0].dtype, made[0].device

    def known(*tensors: Any) -> tuple[Any, Any, Any]:
        dq = _empty_strided(*q_like, dtype=dtype, device=device)
        dk = _empty_strided(*k_like, dtype=dtype, device=device)
        dv = _empty_strided(*v_like, dtype=dtype, device=device)
        start(*tensors, dq, dk, dv)
        return dq, dk, dv

    return known


def backward_into(
    made: tuple[Any, Any, Any], dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dlse: Any, scale: float | None,
    left: int, right: int, deterministic: bool,
) -> Callable[[], Any] | None:  # fmt: skip
    """The gradients of q, k and v into the three tensors ``made``, which the caller allocated (`operator.forward_into`).

    Returns what gives the same for other tensors like these, as kernels read them, as (q, k, v, out, lse, dout, dlse, dq, dk, dv) -> None;
    None where nothing was launched that can be started again.
    """
    dq, dk, _ = made
    if not (dq.numel() and dk.numel()):
        for gradient in made:
            gradient.zero_()
        return None
    mask, left, right = registry.reduce_mask(left, right, q.shape[2], k.shape[2])
    kernels = _kernels_of(q, k, v, mask)
    read = (*_as_read(q, k, v, out, lse, dout, dlse), *made)
    as_rows = mask == "none" and q.shape[2] == 1
    given = _heads_as_rows(*read) if as_rows else read
    heads, rows = given[0].shape[1:3]
    together = heads // given[1].shape[1] * rows
    kernel = next((one for one in kernels if one.fits(rows, k.shape[2], together)), kernels[-1])
    launch = kernel.launch
    arguments = (
        *given[:6], *given[7:], 1.0 / math.sqrt(q.shape[3]) if scale is None else scale,
        *((left, right) if kernel.windowed else (-1, -1)), given[6],
    )  # fmt: skip
    launch(*arguments, None, deterministic)
    if not hasattr(launch, "started"):
        return None
    if not as_rows:
        return lambda: launch.started(*arguments, deterministic)

    def started() -> Callable[..., None]:
        start = launch.started(*arguments, deterministic)
        return lambda *tensors: start(*_heads_as_rows(*tensors))

    return started


def _heads_as_rows(q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, dlse: Any, *made: Any) -> tuple[Any, ...]:
    """The same tensors, and dq, dk and dv, with the query heads that share a key/value head as so many rows of one: of one query that
    sees all keys they are, and one tile has all of them."""
    heads = k.shape[1], -1
    q, out, lse, dout, dq = (x.squeeze(2).unflatten(1, heads) for x in (q, out, lse, dout, made[0]))
    return q, k, v, out, lse, dout, None if dlse is None else dlse.squeeze(2).unflatten(1, heads), dq, *made[1:]


def _fake(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dlse: Any, scale: float | None, left: int, right: int,
    deterministic: bool = True,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Shapes and strides of the operator, without a device."""
    check_ranks(q, k, v)
    check_agreement(q, k, v)
    return empty_output(q, q.shape[3]), empty_output(k, k.shape[3]), empty_output(v, v.shape[3])


def _refuse_double_backward(keys: Any, *arguments: Any) -> Any:
    """Autograd of the operator: there is none, so say so; otherwise go on below autograd."""
    if _grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in arguments):
        raise UnsupportedError(NO_DOUBLE_BACKWARD)
    below = keys & torch._C._after_autograd_keyset
    with torch._C._AutoDispatchBelowAutograd():
        return _operator.redispatch(below, *arguments)


_library, _operator = register(
    "attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dlse, float? scale, "
    "SymInt window_left, SymInt window_right, bool deterministic=True) -> (Tensor, Tensor, Tensor)",
    _run,
    _fake,
    flops=attention_backward_flops,
)
_library.impl("attention_backward", _refuse_double_backward, "Autograd", with_keyset=True)
