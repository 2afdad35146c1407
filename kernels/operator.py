"""``tilecast.attention``: fused attention on the shipped kernels, as a torch operator.

Two ways lead to a kernel.  Plain eager calls go straight there, because the dispatcher would cost more than all the
rest of this file.  Whatever wants to watch or rewrite operators (torch.compile, FakeTensorMode, FlopCounterMode, tensor
subclasses, functorch, the profiler, jit.trace) sees ``torch.ops.tilecast.attention_forward`` with its fake kernel, FLOP
formula and autograd refusal.  Both end in `_forward`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, overload

import torch
from torch.utils.flop_counter import register_flop_formula

from tilecast.kernels import registry
from tilecast.kernels.errors import (
    NO_BACKWARD,
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

_DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
#: Kernels of a problem: (device, dtype, head_dim_qk, head_dim_v, mask) -> (first seqlen_q, last seqlen_q, launch,
#: whether it takes a window), best first.  The device is CUDA's index, -1 for the CPU.
_Kernels = tuple[tuple[int, int, Callable[..., Any], bool], ...]
_kernels: dict[tuple[int, Any, int, int, str], _Kernels] = {}

_tensor = torch.Tensor
_is_compiling = torch.compiler.is_compiling
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_functorch = torch._C._functorch.peek_interpreter_stack
_profiling = torch.autograd._profiler_enabled
_jit_tracing = torch._C._get_tracing_state
_grad_enabled = torch.is_grad_enabled


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
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale q k^T + mask) v, fused; forward only.

    q: (batch, heads_q, seqlen_q, head_dim), k: (batch, heads_kv, seqlen_k, head_dim), v: (batch, heads_kv, seqlen_k,
    head_dim_v), all bfloat16 or all float16 on one CUDA device; heads_q is a multiple of heads_kv (GQA, MQA).  With
    ``layout="bshd"`` heads and seqlen change places in q, k, v and the output.  Views with unit last stride and strides
    and address of whole 16 bytes are read in place; another tensor is copied first.

    causal: hide keys after the diagonal.  The diagonal ends bottom right: query i sits at key i + seqlen_k - seqlen_q,
    as in FlashAttention (SDPA's is_causal starts top left, which differs when the lengths do).
    window: (left, right) keys beside the diagonal that stay visible, -1 for no limit; causal=True means right = 0.
    scale: 1 / sqrt(head_dim) unless given.
    return_lse: also return the natural log of each row's sum of exp(score), float32 (batch, heads_q, seqlen_q).
    fallback: "sdpa" sends what is not supported (dtype, device, head_dim, gradients) to PyTorch's SDPA with these same
    semantics; None (the default) raises.

    Rows that see no key give zeros and an lse of -inf.  Output memory follows q: heads innermost where q's are.
    Bit-for-bit deterministic, and what one sequence gets does not depend on the rest of the batch or on the number of
    heads: kernels are chosen by facts of one sequence and use no atomics.

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
    # A dispatch mode, a functorch level, the profiler or a tracer must see the operator: only bare calls skip it.
    # (Meta tensors have no kernel but the fake one.)
    if (
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
    ):
        try:
            if (q.requires_grad or k.requires_grad or v.requires_grad) and _grad_enabled():
                raise UnsupportedError(NO_BACKWARD)
            out, lse = _forward(q, k, v, scale, left, right, return_lse)
        except UnsupportedError:
            if fallback is None:
                raise
            out, lse = _fall_back(q, k, v, scale, left, right, return_lse)
    else:
        out, lse = _watched(q, k, v, scale, left, right, return_lse, fallback)
    if layout == "bshd":
        out = out.transpose(1, 2)
    return (out, lse) if return_lse else out


def _watched(
    q: Any, k: Any, v: Any, scale: float | None, left: int, right: int, return_lse: bool, fallback: str | None
) -> tuple[Any, Any]:
    """The same through the dispatcher."""
    check_ranks(q, k, v)
    if not _is_compiling():
        try:
            return _operator(q, k, v, scale, left, right, return_lse)  # type: ignore[no-any-return]
        except UnsupportedError:
            if fallback is None:
                raise
        return _fall_back(q, k, v, scale, left, right, return_lse)
    # torch.compile cannot catch what an operator raises: ask beforehand.
    check_agreement(q, k, v)
    refusal = _refusal(q, k, v, scale, left, right)
    if refusal is None:
        return _operator(q, k, v, scale, left, right, return_lse)  # type: ignore[no-any-return]
    if fallback is None:
        raise UnsupportedError(refusal)
    return _fall_back(q, k, v, scale, left, right, return_lse)


def _fall_back(
    q: Any, k: Any, v: Any, scale: float | None, left: int, right: int, return_lse: bool
) -> tuple[Any, Any | None]:
    """PyTorch's SDPA on what is unsupported; a mistake stays one."""
    check_ranks(q, k, v)
    check_agreement(q, k, v)
    return sdpa_attention(q, k, v, scale, left, right, return_lse)


def _forward(
    q: Any, k: Any, v: Any, scale: float | None, left: int, right: int, return_lse: bool
) -> tuple[Any, Any | None]:
    """Choose a kernel, allocate, launch.  (batch, heads, seqlen, head_dim) views; lse is None unless asked for."""
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
    elif refusal := scale_refusal(scale):
        raise UnsupportedError(refusal)
    mask, left, right = registry.reduce_mask(left, right, seqlen_q, seqlen_k)
    kernels = _kernels.get((device, dtype, head_dim, head_dim_v, mask))
    if kernels is None:
        kernels = _find_kernels(q, k, v, mask)
    for first, last, launch, windowed in kernels:  # noqa: B007 (the kernel is used after the loop)
        if first <= seqlen_q <= last:
            break
    else:
        raise UnsupportedError(
            f"attention: the kernels for head_dim {head_dim}/{head_dim_v} {mask} start at {kernels[-1][0]} query rows, "
            f"got {seqlen_q}; fallback='sdpa' runs it"
        )
    out = _empty_output(q, head_dim_v)
    lse = torch.empty((batch, heads, seqlen_q), dtype=torch.float32, device=q.device) if return_lse else None
    if not (batch and heads and seqlen_q and seqlen_k):
        # Nothing to attend to (or nobody who would): no launch.
        out.zero_()
        if lse is not None:
            lse.fill_(-math.inf)
    elif windowed:
        launch(_readable(q), _readable(k), _readable(v), out, lse, scale, left, right)
    else:
        launch(_readable(q), _readable(k), _readable(v), out, lse, scale)
    return out, lse


def _readable(tensor: Any) -> Any:
    """The tensor, or a contiguous copy where its last stride is not 1 or a row does not start at 16 bytes."""
    a, b, c, last = tensor.stride()
    if last != 1 or (a | b | c) & 7 or tensor.data_ptr() & 15:
        # Not .contiguous(): that returns the tensor itself when only its address, or a stride nobody uses, is odd.
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor


def _empty_output(q: Any, head_dim_v: int) -> Any:
    """(batch, heads, seqlen_q, head_dim_v), dense, in the memory order of q: heads inside seqlen or seqlen inside heads."""
    batch, heads, seqlen, _ = q.shape
    outer = heads * seqlen * head_dim_v
    if q.stride(1) < q.stride(2):
        strides = (outer, head_dim_v, heads * head_dim_v, 1)
    else:
        strides = (outer, seqlen * head_dim_v, head_dim_v, 1)
    return torch.empty_strided((batch, heads, seqlen, head_dim_v), strides, dtype=q.dtype, device=q.device)


# --- which kernel, and why none --------------------------------------------------------------------------------


def _refusal(q: Any, k: Any, v: Any, scale: float | None, left: int, right: int) -> str | None:
    """Why no kernel runs this valid problem; None when one does."""
    if _grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return NO_BACKWARD
    if scale is not None and (refusal := scale_refusal(scale)):
        return refusal
    if q.dtype not in _DTYPE_NAMES:
        return _dtype_refusal(q.dtype)
    # Shapes alone, as FakeTensorMode also has them on a machine without a GPU: nothing will run.
    if q.device.type == "meta" or (q.device.type == "cuda" and not torch.cuda.is_available()):
        return None
    mask = "none" if left < 0 and right < 0 else "causal" if left < 0 and right == 0 else "window"
    return _kernel_refusal(q, v.shape[3], mask)


def _dtype_refusal(dtype: Any) -> str:
    return f"q, k, v: expected dtype torch.bfloat16 or torch.float16, got {dtype}; cast them, or use fallback='sdpa'"


def _kernel_refusal(q: Any, head_dim_v: int, mask: str) -> str | None:
    """Why no shipped kernel computes such problems on q's device; None when one does."""
    head_dim = q.shape[3]
    served = _served(q.device.type, q.get_device(), _DTYPE_NAMES[q.dtype], mask)
    if isinstance(served, str):
        return served
    # Compared one by one: under torch.compile the sizes may be symbols, and this makes them constants.
    for known, known_v in served:
        if head_dim == known and head_dim_v == known_v:
            return None
    have = ", ".join([f"{a}" if a == b else f"{a}/{b}" for a, b in served])
    got = f"{head_dim}" if head_dim == head_dim_v else f"{head_dim}/{head_dim_v}"
    return f"head_dim: expected one that a shipped kernel has ({have}), got {got}; fallback='sdpa' runs it"


def _served(kind: str, device: int, dtype: str, mask: str) -> tuple[tuple[int, int], ...] | str:
    """(head_dim, head_dim_v) that the shipped kernels take on a device, or the sentence that says why none does."""
    capability = _capability(kind, device)
    if isinstance(capability, str):
        return capability
    served = registry.head_dims(capability, dtype, mask)
    if not served:
        version = f"compute capability {capability[0]}.{capability[1]}"
        return f"q, k, v: no shipped kernel for {dtype}, mask '{mask}' on {version}; fallback='sdpa' runs it"
    return served


# Reads the index file and asks the driver: torch.compile takes its answer as a constant.  This is all that
# torch.compiler.assume_constant_result does, without importing the whole compiler into programs that never compile.
_served._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _capability(kind: str, device: int) -> tuple[int, int] | str:
    """Compute capability of a device, or the sentence that says why its tensors cannot run."""
    if kind != "cuda":
        return f"q, k, v: expected tensors on a CUDA device, got device '{kind}'; move them, or use fallback='sdpa'"
    if torch.version.hip is not None:
        return "q, k, v: expected an NVIDIA GPU, got PyTorch for ROCm; fallback='sdpa' runs there"
    major, minor = torch.cuda.get_device_capability(device)
    return major, minor


def _find_kernels(q: Any, k: Any, v: Any, mask: str) -> _Kernels:
    """The kernels of a problem met for the first time, imported and remembered; UnsupportedError where there is none."""
    # Devices by index alone look the same when neither is CUDA.
    check_agreement(q, k, v)
    dtype, device, head_dim, head_dim_v = q.dtype, q.get_device(), q.shape[3], v.shape[3]
    refusal = _kernel_refusal(q, head_dim_v, mask) if dtype in _DTYPE_NAMES else _dtype_refusal(dtype)
    if refusal:
        raise UnsupportedError(refusal)
    capability = _capability(q.device.type, device)
    assert not isinstance(capability, str)
    try:
        found = tuple(
            (e.seqlen_q_min, e.seqlen_q_max, _on_device(registry.launcher(e), device), e.mask == "window")
            for e in registry.candidates(capability, _DTYPE_NAMES[dtype], head_dim, head_dim_v, mask)
        )
    except ImportError as error:
        raise UnsupportedError(
            f"attention: the kernels need Triton 3.6 or newer, and importing one gave '{error}'; "
            "pip install 'tilecast[gpu]', or use fallback='sdpa'"
        ) from error
    _kernels[(device, dtype, head_dim, head_dim_v, mask)] = found
    return found


def _on_device(launch: Callable[..., Any], device: int) -> Callable[..., Any]:
    """Triton launches on the current device; on a machine with several, make that the tensors' own."""
    if device < 0 or torch.cuda.device_count() < 2:
        return launch

    def launch_there(*arguments: Any) -> None:
        if torch.cuda.current_device() == device:
            launch(*arguments)
        else:
            with torch.cuda.device(device):
                launch(*arguments)

    return launch_there


# --- the operator ----------------------------------------------------------------------------------------------


def _run(q: Any, k: Any, v: Any, scale: float | None, left: int, right: int, return_lse: bool) -> tuple[Any, Any]:
    """The operator on a device.  A schema has no optional outputs: lse is of size 0 when nobody asked."""
    out, lse = _forward(q, k, v, scale, left, right, return_lse)
    return out, torch.empty((0,), dtype=torch.float32, device=q.device) if lse is None else lse


def _fake(q: Any, k: Any, v: Any, scale: float | None, left: int, right: int, return_lse: bool) -> tuple[Any, Any]:
    """Shapes, strides and refusals of the operator, without a device."""
    check_ranks(q, k, v)
    check_agreement(q, k, v)
    if refusal := _refusal(q, k, v, scale, left, right):
        raise UnsupportedError(refusal)
    shape = q.shape[:3] if return_lse else (0,)
    return _empty_output(q, v.shape[3]), torch.empty(shape, dtype=torch.float32, device=q.device)


def _refuse_gradients(
    keys: Any, q: Any, k: Any, v: Any, scale: float | None, left: int, right: int, return_lse: bool
) -> tuple[Any, Any]:
    """Autograd of the operator: there is none yet, so say so; otherwise go on below autograd."""
    if _grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise UnsupportedError(NO_BACKWARD)
    below = keys & torch._C._after_autograd_keyset
    with torch._C._AutoDispatchBelowAutograd():
        return _operator.redispatch(below, q, k, v, scale, left, right, return_lse)  # type: ignore[no-any-return]


def _register() -> tuple[Any, Any]:
    library = torch.library.Library("tilecast", "DEF")
    # Exact strides: the output's memory order is q's, so a compiler may not choose another one.
    tags = tuple(
        getattr(torch.Tag, name) for name in ("pt2_compliant_tag", "needs_exact_strides") if hasattr(torch.Tag, name)
    )
    library.define(
        "attention_forward(Tensor q, Tensor k, Tensor v, float? scale, SymInt window_left, SymInt window_right, "
        "bool return_lse) -> (Tensor, Tensor)",
        tags=tags,
    )
    operator = torch.ops.tilecast.attention_forward
    library.impl("attention_forward", _run, "CUDA")
    # No kernel runs there; registered so that a direct call says so in our words.
    library.impl("attention_forward", _run, "CPU")
    library.impl("attention_forward", _refuse_gradients, "Autograd", with_keyset=True)
    torch.library.register_fake("tilecast::attention_forward", _fake, lib=library)
    register_flop_formula(operator)(attention_flops)
    return library, operator.default


# The registrations live as long as the library object.
_library, _operator = _register()
