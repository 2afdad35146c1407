"""What a call of the operator may not be: every refusal is one sentence with what, where, expected, got.

Two kinds, because callers treat them differently: `AttentionError` is a mistake in the call and no other implementation
would make sense of it; `UnsupportedError` is a valid problem that no shipped kernel solves, which ``fallback="sdpa"``
may take over.  Nothing here imports torch: tensors are only asked for their shape, dtype and device.
"""

from __future__ import annotations

import math
from typing import Any

FALLBACKS = ("sdpa",)
LAYOUTS = ("bhsd", "bshd")
#: Kernels multiply the scale by log2(e) in float32; above this the product overflows.
LARGEST_SCALE = 2.0e38
NO_DOUBLE_BACKWARD = (
    "attention: a gradient of a gradient is asked for, and tilecast's gradients have none: "
    "call backward without create_graph=True, or compute that attention with PyTorch's SDPA"
)
NO_LSE = (
    "attention_forward: expected return_lse=True where a gradient is asked for, got False: "
    "tilecast.attention asks for it by itself"
)
NO_TRANSFORMS = (
    "attention: expected a plain call, got one under a torch.func transform or forward-mode differentiation (vmap, jvp, grad, vjp): use tensors with "
    "requires_grad and backward(), a batch dimension, or fallback='sdpa'"
)


class AttentionError(ValueError):
    """A call that makes no sense: mismatched shapes, dtypes or devices, an impossible window, an unknown name."""


class UnsupportedError(AttentionError, NotImplementedError):
    """A valid attention problem that no shipped kernel solves."""


def limits(causal: Any, window: Any) -> tuple[int, int]:
    """(left, right) keys around the bottom-right diagonal that stay visible, -1 for no limit.

    ``causal`` puts right to 0; AttentionError where it contradicts ``window`` or where either has the wrong type.
    """
    if not isinstance(causal, bool):
        what = "a tensor; attention takes no mask tensor" if hasattr(causal, "shape") else repr(causal)
        raise AttentionError(f"causal: expected True or False, got {what}")
    if window is None:
        return (-1, 0) if causal else (-1, -1)
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise AttentionError(f"window: expected two whole numbers (left, right), got {window!r}")
    left, right = window
    for side, value in (("left", left), ("right", right)):
        if isinstance(value, bool) or not isinstance(value, int) or value < -1:
            raise AttentionError(f"window: expected {side} a whole number of at least -1 (no limit), got {value!r}")
    if not causal:
        return left, right
    if right > 0:
        raise AttentionError(f"window: expected right 0 or -1 together with causal=True, got {right}")
    return left, 0


def check_scale(scale: Any) -> float:
    """The softmax scale as a float; AttentionError for what is no finite number."""
    try:
        value = float(scale)
    except (TypeError, ValueError):
        raise AttentionError(f"scale: expected a number, got {scale!r}") from None
    if math.isnan(value) or math.isinf(value):
        raise AttentionError(f"scale: expected a finite number, got {value}")
    return value


def scale_refusal(scale: float) -> str | None:
    """Why the kernels cannot take this scale; None when they can."""
    # The running maximum is taken before scaling, which only a positive factor allows.
    if 0.0 < scale <= LARGEST_SCALE:
        return None
    return f"scale: expected a number above 0 and at most {LARGEST_SCALE:g}, got {scale:g}"


def check_names(layout: Any, fallback: Any) -> None:
    """AttentionError for an unknown layout or fallback."""
    if layout not in LAYOUTS:
        raise AttentionError(f"layout: expected 'bhsd' or 'bshd', got {layout!r}")
    if fallback is not None and fallback not in FALLBACKS:
        raise AttentionError(f"fallback: expected None or 'sdpa', got {fallback!r}")


def check_ranks(q: Any, k: Any, v: Any) -> None:
    """AttentionError unless all three are tensors of four dimensions."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        shape = getattr(tensor, "shape", None)
        if shape is None or not hasattr(tensor, "dtype"):
            raise AttentionError(f"{name}: expected a torch tensor, got {type(tensor).__name__}")
        if len(shape) != 4:
            raise AttentionError(
                f"{name}: expected 4 dimensions (batch, heads, seqlen, head_dim), got {len(shape)}: {tuple(shape)}"
            )


def check_agreement(q: Any, k: Any, v: Any) -> None:
    """AttentionError unless shapes, dtypes and devices of (batch, heads, seqlen, head_dim) tensors fit together."""
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype:
            raise AttentionError(f"{name}: expected dtype {q.dtype} as q has, got {tensor.dtype}")
        if tensor.device != q.device:
            raise AttentionError(f"{name}: expected device {q.device} as q has, got {tensor.device}")
        if tensor.shape[0] != q.shape[0]:
            raise AttentionError(f"{name}: expected batch {q.shape[0]} as q has, got {tensor.shape[0]}")
    heads_q, heads_kv = q.shape[1], k.shape[1]
    if v.shape[1] != heads_kv:
        raise AttentionError(f"v: expected {heads_kv} heads as k has, got {v.shape[1]}")
    if (heads_kv == 0 and heads_q != 0) or (heads_kv != 0 and heads_q % heads_kv != 0):
        raise AttentionError(f"q: expected heads a multiple of the {heads_kv} key/value heads, got {heads_q}")
    if v.shape[2] != k.shape[2]:
        raise AttentionError(f"v: expected seqlen {k.shape[2]} as k has, got {v.shape[2]}")
    if k.shape[3] != q.shape[3]:
        raise AttentionError(f"k: expected head_dim {q.shape[3]} as q has, got {k.shape[3]}")
    for name, tensor in (("q", q), ("v", v)):
        if tensor.shape[3] == 0:
            raise AttentionError(f"{name}: expected head_dim of at least 1, got 0")
