"""``tilecast.attention`` of 8-bit tensors: descaling factors in, bf16 out, through ``torch.ops.tilecast.attention_e4m3_forward``.

q, k and v are torch.float8_e4m3fn, on Blackwell also torch.float8_e5m2; what they stand for is each times its factor, as in
FlashAttention-3: float32, one number or one to a (batch, key head), for q as well.  On Hopper a kernel is two launches: one
brings V along its keys, which that matrix unit asks of 8-bit operands, and the other is attention.  There are no gradients.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from tilecast.kernels import registry
from tilecast.kernels.copying import empty_output, readable
from tilecast.kernels.errors import (
    NO_TRANSFORMS,
    AttentionError,
    UnsupportedError,
    check_agreement,
    check_ranks,
    scale_refusal,
)
from tilecast.kernels.fallback import sdpa_attention
from tilecast.kernels.flops import attention_flops
from tilecast.kernels.registration import register
from tilecast.kernels.selection import (
    Known,
    find_kernels,
    kernel_refusal,
    wants_gradients,
)

E4M3 = torch.float8_e4m3fn
NAMES = {E4M3: "fp8", torch.float8_e5m2: "e5m2"}
NO_GRADIENTS = (
    "attention: expected tensors without requires_grad in 8 bits, whose kernels have no gradients; "
    "detach them, or use fallback='sdpa'"
)
Factors = tuple[Any, Any, Any]
_kernels: Known = {}


def attention_e4m3(
    q: Any,
    k: Any,
    v: Any,
    factors: Factors,
    scale: float | None,
    left: int,
    right: int,
    return_lse: bool,
    fallback: str | None,
) -> tuple[Any, Any | None]:
    """(out, lse) of (batch, heads, seqlen, head_dim) tensors; ``factors`` of q, k and v are tensors or None.

    Raises as `operator.attention`.
    """
    check_ranks(q, k, v)
    check_agreement(q, k, v)
    check_factors(q, k, factors)
    refused = refusal(q, k, v, scale, left, right)
    if refused is None:
        out, lse = _operator(q, k, v, *factors, scale, left, right, return_lse)
        return out, lse if return_lse else None
    if fallback is None:
        raise UnsupportedError(refused)
    wide_q, wide_k, wide_v = (descaled(x, factor) for x, factor in zip((q, k, v), factors, strict=True))
    return sdpa_attention(wide_q, wide_k, wide_v, scale, left, right, return_lse)


def check_factors(q: Any, k: Any, factors: Factors) -> None:
    """AttentionError for descaling factors of another type, shape or device, and for any that 16-bit tensors come with."""
    want = (q.shape[0], k.shape[1])
    for name, factor in zip(("q_descale", "k_descale", "v_descale"), factors, strict=True):
        if factor is None:
            continue
        if q.dtype not in NAMES:
            known = " or ".join(map(str, NAMES))
            raise AttentionError(f"{name}: expected q, k, v of {known} where factors are given, got {q.dtype}")
        if not isinstance(factor, torch.Tensor) or factor.dtype != torch.float32:
            got = factor.dtype if isinstance(factor, torch.Tensor) else type(factor).__name__
            raise AttentionError(f"{name}: expected a float32 tensor, got {got}")
        if factor.device != q.device:
            raise AttentionError(f"{name}: expected device {q.device} as q has, got {factor.device}")
        if tuple(factor.shape) not in ((), (1,), want):
            raise AttentionError(f"{name}: expected one number or (batch, heads_kv) {want}, got {tuple(factor.shape)}")


def refusal(q: Any, k: Any, v: Any, scale: float | None, left: int, right: int) -> str | None:
    """Why no kernel runs this valid problem; None when one does."""
    if scale is not None and (refused := scale_refusal(scale)):
        return refused
    if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None:
        return NO_TRANSFORMS
    if wants_gradients(q, k, v):
        return NO_GRADIENTS
    # Shapes alone, as FakeTensorMode also has them on a machine without a GPU: nothing will run.
    if q.device.type == "meta" or (q.device.type == "cuda" and not torch.cuda.is_available()):
        return None
    return kernel_refusal(q, v.shape[3], _mask(q, k, left, right)[0], "fwd", NAMES)


def descaled(x: Any, factor: Any) -> Any:
    """What an 8-bit tensor stands for, in bf16; heads share the factors of (batch, heads_kv) in groups."""
    wide = x.float()
    if factor is not None:
        if factor.ndim == 2:
            factor = factor.repeat_interleave(x.shape[1] // factor.shape[1], 1)[..., None, None]
        wide = wide * factor
    return wide.to(torch.bfloat16)


def _mask(q: Any, k: Any, left: int, right: int) -> tuple[str, int, int]:
    """`registry.reduce_mask`, for lengths that may be 0."""
    return registry.reduce_mask(left, right, max(q.shape[2], 1), max(k.shape[2], 1))


# --- the operator -----------------------------------------------------------------------------------------------------


def _check(q: Any, k: Any, v: Any, factors: tuple[Any, Any, Any], scale: float | None, left: int, right: int) -> None:
    """AttentionError for what is no problem of attention, UnsupportedError for one that no kernel runs."""
    check_ranks(q, k, v)
    check_agreement(q, k, v)
    check_factors(q, k, factors)
    if refused := refusal(q, k, v, scale, left, right):
        raise UnsupportedError(refused)


def _run(
    q: Any, k: Any, v: Any, q_descale: Any, k_descale: Any, v_descale: Any, scale: float | None, left: int, right: int,
    return_lse: bool,
) -> tuple[Any, Any]:  # fmt: skip
    """The operator on a device.  A schema has no optional outputs: lse is of size 0 when not asked for."""
    _check(q, k, v, (q_descale, k_descale, v_descale), scale, left, right)
    head_dim, seqlen_q = q.shape[3], q.shape[2]
    mask, left, right = _mask(q, k, left, right)
    kernels = _kernels.get((q.get_device(), q.dtype, head_dim, v.shape[3], mask))
    if kernels is None:
        kernels = find_kernels(q, k, v, mask, names=NAMES, known=_kernels)
    kernel = next((one for one in kernels if one.fits(seqlen_q, k.shape[2])), None)
    if kernel is None:
        raise UnsupportedError(
            f"attention: no 8-bit kernel for head_dim {head_dim} takes {seqlen_q} query rows; fallback='sdpa' runs it"
        )
    out, lse = _outputs(q, v, True)
    if out.numel() and k.numel():
        launch = kernel.launch
        factors = (factor if factor is None else factor.contiguous() for factor in (q_descale, k_descale, v_descale))
        read_v = v if getattr(launch, "any_v", False) else _read(v)
        # Causal kernels know their mask.
        limits = (left, right) if kernel.windowed else (-1, -1)
        launch(_read(q), _read(k), read_v, out, lse, head_dim**-0.5 if scale is None else scale, *limits, *factors)
    else:
        out.zero_()
        lse.fill_(-math.inf)
    return out, lse if return_lse else lse.new_empty((0,))


def _read(tensor: Any) -> Any:
    """As `copying.readable`, for rows of bytes: strides of whole 16."""
    a, b, c, _ = tensor.stride()
    return tensor.contiguous().clone() if (a | b | c) & 15 else readable(tensor)[0]


def _outputs(q: Any, v: Any, with_lse: bool) -> tuple[Any, Any]:
    out = empty_output(q, v.shape[3], torch.bfloat16)
    return out, torch.empty(q.shape[:3] if with_lse else (0,), dtype=torch.float32, device=q.device)


def _fake(
    q: Any, k: Any, v: Any, q_descale: Any, k_descale: Any, v_descale: Any, scale: float | None, left: int, right: int,
    return_lse: bool,
) -> tuple[Any, Any]:  # fmt: skip
    """Shapes, strides and refusals of the operator, without a device."""
    _check(q, k, v, (q_descale, k_descale, v_descale), scale, left, right)
    return _outputs(q, v, return_lse)


def _flops(
    q_shape: Any, k_shape: Any, v_shape: Any, _q: Any, _k: Any, _v: Any, scale: Any, left: int, right: int, *_: Any, **__: Any
) -> int:  # fmt: skip
    """As for other dtypes."""
    return attention_flops(q_shape, k_shape, v_shape, scale, left, right)


_library, _operator = register(
    "attention_e4m3_forward(Tensor q, Tensor k, Tensor v, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, "
    "float? scale, SymInt window_left, SymInt window_right, bool return_lse) -> (Tensor, Tensor)",
    _run,
    _fake,
    flops=_flops,
)
