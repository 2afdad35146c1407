"""``tilecast.attention``: fused attention on the shipped kernels, as a torch operator.

Two ways lead to a kernel.  Plain eager calls go straight there, because the dispatcher would cost more than all the
rest of this file.  Whatever wants to watch or rewrite operators (torch.compile, FakeTensorMode, FlopCounterMode, tensor
subclasses, functorch, the profiler, jit.trace) sees ``torch.ops.tilecast.attention_forward`` with its fake kernel, FLOP
formula and autograd (`gradients`).  Both end in `_forward`.
"""

from __future__ import annotations

import math
from typing import Any, Literal, overload

import torch
from torch.autograd import forward_ad

from tilecast.kernels import registry
from tilecast.kernels.again import Memory, facts_of
from tilecast.kernels.copying import empty_output, readable
from tilecast.kernels.e4m3 import NAMES as EIGHT_BITS
from tilecast.kernels.e4m3 import attention_e4m3
from tilecast.kernels.errors import (
    NO_TRANSFORMS,
    UnsupportedError,
    check_agreement,
    check_names,
    check_ranks,
    check_scale,
    limits,
    scale_refusal,
)
from tilecast.kernels.fallback import sdpa_attention
from tilecast.kernels.flops import attention_flops
from tilecast.kernels.gradients import differentiable, gradients, keep_for_gradients
from tilecast.kernels.registration import register
from tilecast.kernels.selection import (
    find_kernels,
    forward_kernels,
    refusal,
    wants_gradients,
)
from tilecast.kernels.serving import few_rows

_tensor = torch.Tensor
_is_compiling = torch.compiler.is_compiling
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_functorch = torch._C._functorch.peek_interpreter_stack
_profiling = torch.autograd._profiler_enabled
_jit_tracing = torch._C._get_tracing_state
_grad_enabled = torch.is_grad_enabled
_empty_strided, _float = torch.empty_strided, torch.float32
_memory = Memory()


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] | None = None,
    return_lse: Literal[False] = False,
    layout: str = "bhsd",
    fallback: str | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    deterministic: bool = True,
) -> torch.Tensor: ...


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] | None = None,
    *,
    return_lse: Literal[True],
    layout: str = "bhsd",
    fallback: str | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    deterministic: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] | None = None,
    return_lse: bool = False,
    layout: str = "bhsd",
    fallback: str | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    deterministic: bool = True,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale q k^T + mask) v, fused, with gradients of q, k and v.

    q: (batch, heads_q, seqlen_q, head_dim), k: (batch, heads_kv, seqlen_k, head_dim), v: (batch, heads_kv, seqlen_k,
    head_dim_v), on one CUDA device, all bfloat16, all float16, or all float8_e4m3fn or, on Blackwell, float8_e5m2 (no gradients,
    bfloat16 out); heads_q is a multiple of heads_kv (GQA, MQA).  With ``layout="bshd"`` heads and seqlen change places in q, k,
    v and the output.  Views with unit last stride and strides and address of whole 16 bytes are read in place; another tensor
    is copied first.

    causal: hide keys after the diagonal.  The diagonal ends bottom right: query i sits at key i + seqlen_k - seqlen_q,
    as in FlashAttention (SDPA's is_causal starts top left, which differs when the lengths do).
    window: (left, right) keys beside the diagonal that stay visible, -1 for no limit; causal=True means right = 0.
    scale: 1 / sqrt(head_dim) unless given.
    return_lse: also return the natural log of each row's sum of exp(score), float32 (batch, heads_q, seqlen_q).
    q_descale, k_descale, v_descale: what 8-bit tensors are to be multiplied by, float32, one number or (batch, heads_kv).
    deterministic: whether gradients have the same bits every run.  False lets programs add to dq in any order where that is faster
    (Hopper, head_dim 64 and 128); the output has the same bits every run anyway, and torch.use_deterministic_algorithms goes first.
    fallback: "sdpa" sends what is not supported (dtype, device, head_dim, torch.func transforms) to PyTorch's SDPA with
    these same semantics; None (the default) raises.

    Rows that see no key give zeros and an lse of -inf.  Output memory follows q: heads innermost where q's are.
    Bit-for-bit deterministic, gradients too unless asked otherwise, and what one sequence gets does not depend on the rest of the batch: kernels are chosen by
    facts of one sequence (for few queries, short sequences and gradients also its heads) and add in a fixed order.

    Raises AttentionError (a ValueError) for calls that make no sense, UnsupportedError (also a NotImplementedError) for
    what no shipped kernel does.
    """
    if causal is False and window is None:
        left = right = -1
    else:
        left, right = limits(causal, window)
    if scale is not None:
        scale = check_scale(scale)
    if layout != "bhsd" or fallback is not None:
        check_names(layout, fallback)
        if layout == "bshd":
            try:
                q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            except (AttributeError, IndexError):
                check_ranks(q, k, v)
                raise
    if (
        q_descale is not None
        or k_descale is not None
        or v_descale is not None
        or getattr(q, "dtype", None) in EIGHT_BITS
    ):
        factors = (q_descale, k_descale, v_descale)
        out, lse = attention_e4m3(q, k, v, factors, scale, left, right, return_lse, fallback)
    # `again.watched`, written out: where torch.compile gives this function up it would compile that one, and be what watches.
    elif (
        not _is_compiling()
        and type(q) is _tensor
        and type(k) is _tensor
        and type(v) is _tensor
        and not q.is_meta
        and not _dispatch_modes()
        and not _function_modes()
        and not _profiling()
        and _functorch() is None
        and _jit_tracing() is None
        and forward_ad._current_level < 0
    ):
        try:
            if (q.requires_grad or k.requires_grad or v.requires_grad) and _grad_enabled():
                out, lse = differentiable(_forward, q, k, v, scale, left, right, deterministic)
            else:
                out, lse, _ = _forward(q, k, v, scale, left, right, return_lse)
        except UnsupportedError:
            if fallback is None:
                raise
            out, lse = _fall_back(q, k, v, scale, left, right, return_lse)
    else:
        out, lse = _watched(q, k, v, scale, left, right, return_lse, deterministic, fallback)
    if layout == "bshd":
        out = out.transpose(1, 2)
    return (out, lse) if return_lse else out


def _watched(
    q: Any, k: Any, v: Any, scale: float | None, left: int, right: int, return_lse: bool, deterministic: bool,
    fallback: str | None,
) -> tuple[Any, Any]:  # fmt: skip
    """The same through the dispatcher."""
    check_ranks(q, k, v)
    if not _is_compiling():
        try:
            if _functorch() is not None or _has_tangent(q, k, v):
                raise UnsupportedError(NO_TRANSFORMS)
            # Gradients need the lse.
            return _operator(q, k, v, scale, left, right, return_lse or wants_gradients(q, k, v), deterministic)  # type: ignore[no-any-return]
        except UnsupportedError:
            if fallback is None:
                raise
        return _fall_back(q, k, v, scale, left, right, return_lse)
    # torch.compile cannot catch what an operator raises: ask beforehand.
    check_agreement(q, k, v)
    refused = refusal(q, k, v, scale, left, right)
    if refused is None:
        return _operator(q, k, v, scale, left, right, return_lse or wants_gradients(q, k, v), deterministic)  # type: ignore[no-any-return]
    if fallback is None:
        raise UnsupportedError(refused)
    return _fall_back(q, k, v, scale, left, right, return_lse)


def _has_tangent(*tensors: Any) -> bool:
    """Whether forward-mode differentiation is on for one of the tensors."""
    return forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def _fall_back(
    q: Any, k: Any, v: Any, scale: float | None, left: int, right: int, return_lse: bool
) -> tuple[Any, Any | None]:
    """PyTorch's SDPA on what is unsupported; a mistake stays one."""
    check_ranks(q, k, v)
    check_agreement(q, k, v)
    return sdpa_attention(q, k, v, scale, left, right, return_lse)


def forward_into(out: Any, lse: Any, q: Any, k: Any, v: Any, scale: float | None, left: int, right: int) -> None:
    """`attention` below all checks of names: into ``out`` and ``lse``, which the caller made.

    (batch, heads, seqlen, head_dim) tensors; ``out`` with a last stride of 1 and the others multiples of 8.  ``left`` and
    ``right``: keys beside the diagonal, bottom right, that stay visible, -1 for no limit.  Raises as `attention`.
    """
    _forward(q, k, v, scale, left, right, True, (out, lse))


def _forward(
    q: Any, k: Any, v: Any, scale: float | None, left: int, right: int, return_lse: bool, made: Any = None
) -> tuple[Any, Any | None, tuple[Any, Any, Any] | None]:
    """Choose a kernel, allocate (unless the outputs are ``made``), launch; what was met before is launched at once.

    (batch, heads, seqlen, head_dim) views.  The output, the lse (None unless asked for), and q, k and v as the kernel read them where one of
    them was copied for it: a backward pass then need not copy it again.
    """
    key = None
    if made is None:
        facts = facts_of((q, k, v), False) if type(q) is _tensor else None
        if facts is not None:
            key = facts, scale, left, right, return_lse
            known = _memory.find(key)
            if known is not None:
                return known(q, k, v)  # type: ignore[no-any-return]
    try:
        batch, heads, seqlen_q, head_dim = q.shape
        batch_k, heads_kv, seqlen_k, head_dim_k = k.shape
        batch_v, heads_v, seqlen_v, head_dim_v = v.shape
    except ValueError:
        check_ranks(q, k, v)
        raise
    dtype, device = q.dtype, q.get_device()
    if (
        batch_k != batch
        or batch_v != batch
        or heads_v != heads_kv
        or (heads % heads_kv if heads_kv else heads)
        or seqlen_v != seqlen_k
        or head_dim_k != head_dim
        or not head_dim
        or not head_dim_v
        or k.dtype is not dtype
        or v.dtype is not dtype
        or k.get_device() != device
        or v.get_device() != device
    ):
        check_agreement(q, k, v)
    if scale is None:
        scale = 1.0 / math.sqrt(head_dim)
    elif refused := scale_refusal(scale):
        raise UnsupportedError(refused)
    mask, left, right = registry.reduce_mask(left, right, seqlen_q, seqlen_k)
    kernels = forward_kernels.get((device, dtype, head_dim, head_dim_v, mask))
    if kernels is None:
        kernels = find_kernels(q, k, v, mask)
    kernel = next((one for one in kernels if one.fits(seqlen_q, seqlen_k)), None)
    if kernel is None:
        raise UnsupportedError(
            f"attention: the kernels for head_dim {head_dim}/{head_dim_v} {mask} start at {kernels[-1].first} query rows, "
            f"got {seqlen_q}; fallback='sdpa' runs it"
        )
    if made is None:
        out = empty_output(q, head_dim_v)
        lse = torch.empty((batch, heads, seqlen_q), dtype=torch.float32, device=q.device) if return_lse else None
    else:
        out, lse = made
    if not (batch and heads and seqlen_q and seqlen_k):
        # No keys, or no queries: no launch.
        out.zero_()
        if lse is not None:
            lse.fill_(-math.inf)
        return out, lse, None
    asked = q, k, v
    q, k, v = readable(q, k, v)
    copied = q is not asked[0] or k is not asked[1] or v is not asked[2]
    arguments: tuple[Any, ...] = (q, k, v, out, lse, scale)
    started: Any = few_rows.attend(q, k, v, out, lse, scale, left, right)
    if started is not None:
        arguments = (*arguments, left, right)
    else:
        if kernel.windowed:
            arguments = (*arguments, left, right)
        kernel.launch(*arguments)
        started = getattr(kernel.launch, "started", None)
    if key is not None and started is not None:
        call = _known_call(started(*arguments), out, lse)
        _memory.remember(key, _copying(call) if copied else call)
    return out, lse, (q, k, v) if copied else None


def _copying(call: Any) -> Any:
    """``call`` of copies, which are made anew in every call, of those tensors that kernels do not read as they are."""
    if call is None:
        return None

    def copied(*tensors: Any) -> tuple[Any, Any, tuple[Any, ...]]:
        read = tuple(readable(*tensors))
        return (*call(*read)[:2], read)

    return copied


def _known_call(start: Any, out: Any, lse: Any) -> Any:
    """The call of tensors like those that ``start`` was made for, whose results were ``out`` and ``lse``; it keeps none.  None
    without a start."""
    if start is None:
        return None
    shape, strides, dtype, device = tuple(out.shape), out.stride(), out.dtype, out.device
    if lse is None:

        def plain(q: Any, k: Any, v: Any) -> tuple[Any, None, None]:
            out = _empty_strided(shape, strides, dtype=dtype, device=device)
            start(q, k, v, out, None)
            return out, None, None

        return plain

    rows, row_strides = tuple(lse.shape), lse.stride()

    def with_lse(q: Any, k: Any, v: Any) -> tuple[Any, Any, None]:
        out = _empty_strided(shape, strides, dtype=dtype, device=device)
        lse = _empty_strided(rows, row_strides, dtype=_float, device=device)
        start(q, k, v, out, lse)
        return out, lse, None

    return with_lse


# --- the operator ----------------------------------------------------------------------------------------------


def _run(
    q: Any, k: Any, v: Any, scale: float | None, left: int, right: int, return_lse: bool, deterministic: bool = True
) -> tuple[Any, Any]:
    """The operator on a device.  A schema has no optional outputs: lse is of size 0 when not asked for.  ``deterministic`` is for
    gradients."""
    out, lse, _ = _forward(q, k, v, scale, left, right, return_lse)
    return out, torch.empty((0,), dtype=torch.float32, device=q.device) if lse is None else lse


def _fake(
    q: Any, k: Any, v: Any, scale: float | None, left: int, right: int, return_lse: bool, deterministic: bool = True
) -> tuple[Any, Any]:
    """Shapes, strides and refusals of the operator, without a device."""
    check_ranks(q, k, v)
    check_agreement(q, k, v)
    if refused := refusal(q, k, v, scale, left, right):
        raise UnsupportedError(refused)
    shape = q.shape[:3] if return_lse else (0,)
    return empty_output(q, v.shape[3]), torch.empty(shape, dtype=torch.float32, device=q.device)


_library, _operator = register(
    "attention_forward(Tensor q, Tensor k, Tensor v, float? scale, SymInt window_left, SymInt window_right, "
    "bool return_lse, bool deterministic=True) -> (Tensor, Tensor)",
    _run,
    _fake,
    flops=attention_flops,
)
torch.library.register_autograd(
    "tilecast::attention_forward", gradients, setup_context=keep_for_gradients, lib=_library
)
