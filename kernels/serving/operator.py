"""``torch.ops.tilecast.attention_serving``: one operator for caches, pages and packed sequences, and how it finds its kernels.

Two kernels share a batch: one takes sequences of few rows (decode), the other those of more (prefill).  Which one takes a
sequence depends on that sequence alone, and so do its splits: it gets the same bits in every batch.
"""

from __future__ import annotations

import importlib
import math
from typing import Any

import torch

from tilecast.kernels import registry
from tilecast.kernels.errors import UnsupportedError, scale_refusal
from tilecast.kernels.selection import DTYPE_NAMES, capability_of, on_device
from tilecast.kernels.serving.launching import Counters, Launcher

_tensor = torch.Tensor
_is_compiling = torch.compiler.is_compiling
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_profiling = torch.autograd._profiler_enabled
#: (device index, dtype, head_dim_qk, head_dim_v) -> ((fewest rows, most rows, launch), ...)
_known: dict[Any, tuple[tuple[int, int, Any], ...]] = {}
_counters: dict[Any, Counters] = {}


def serve(*arguments: Any) -> tuple[Any, Any]:
    """(out, lse) of the operator's arguments: straight to the kernels, or through the dispatcher where somebody watches."""
    watched = (
        _is_compiling() or type(arguments[0]) is not _tensor or arguments[0].is_meta
        or _dispatch_modes() or _function_modes() or _profiling()
    )  # fmt: skip
    return _operator(*arguments) if watched else _run(*arguments)


def _run(
    q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, used_k: Any, table: Any, slots: Any, sinks: Any,
    seqlen_q: int, seqlen_k: int, scale: float | None, softcap: float, left: int, right: int, return_lse: bool,
) -> tuple[Any, Any]:  # fmt: skip
    """The operator on a device; lse is of size 0 when nobody asked."""
    dims = q.shape[-1], v.shape[-1]
    kernels = _known.get((q.get_device(), q.dtype, *dims))
    if kernels is None:
        kernels = _find(q, *dims)
    if scale is None:
        scale = 1.0 / math.sqrt(dims[0])
    elif refused := scale_refusal(scale):
        raise UnsupportedError(refused)
    out, lse = _empty(q, v, return_lse)
    if out.numel() == 0:
        return out, lse
    group = q.shape[-2] // k.shape[-2]
    # Sequences with queries of their own number may be of any length up to the longest.
    most = seqlen_q * group
    least = 1 if cu_q is not None else most
    lists = (cu_q, cu_k, used_k, table, slots, sinks)
    if cu_q is not None and cu_q.shape[0] < 2:
        return out.zero_(), lse
    for first, last, launch in kernels:
        if first <= most and least <= last:
            launch(q, k, v, out, lse if return_lse else None, lists, scale, softcap, seqlen_q, seqlen_k, (left, right))
    return out, lse


def _empty(q: Any, v: Any, return_lse: bool) -> tuple[Any, Any]:
    """(out, lse) as the operator returns them: packed (total, heads, head_dim_v) and (heads, total), or with a batch in front
    (batch, seqlen_q, heads, head_dim_v) and (batch, heads, seqlen_q)."""
    out = torch.empty((*q.shape[:-1], v.shape[-1]), dtype=q.dtype, device=q.device)
    *batch, rows, heads, _ = q.shape
    return out, torch.empty((*batch, heads, rows) if return_lse else (0,), dtype=torch.float32, device=q.device)


def _find(q: Any, dim: int, dim_v: int) -> tuple[tuple[int, int, Any], ...]:
    """The kernels of a problem met for the first time, imported and remembered; UnsupportedError where there is none."""
    if refused := refusal(q, dim, dim_v):
        raise UnsupportedError(refused)
    device = q.device
    if device not in _counters:
        _counters[device] = Counters(device)
    found = []
    for entry in _entries(q, dim, dim_v):
        try:
            module = importlib.import_module(f"{registry.PACKAGE}.{entry.module}")
        except ImportError as error:
            raise UnsupportedError(
                f"attention: the kernels need Triton 3.6 or newer, and importing one gave '{error}'; pip install 'tilecast[gpu]'"
            ) from error
        rows = entry.seqlen_q_min, entry.seqlen_q_max
        launch = Launcher(module, rows, device, _counters[device])
        found.append((*rows, on_device(launch, q.get_device())))
    _known[(q.get_device(), q.dtype, dim, dim_v)] = tuple(found)
    return tuple(found)


def _entries(q: Any, dim: int, dim_v: int) -> tuple[registry.Entry, ...]:
    capability = capability_of(q.device.type, q.get_device())
    if isinstance(capability, str):
        return ()
    return registry.candidates(capability, DTYPE_NAMES[q.dtype], dim, dim_v, "window", registry.shipped_serving())


def refusal(q: Any, dim: int, dim_v: int) -> str | None:
    """Why no serving kernel takes tensors like q with these head dimensions; None where one does."""
    if q.dtype not in DTYPE_NAMES:
        return f"q, k, v: expected dtype torch.bfloat16 or torch.float16, got {q.dtype}; cast them"
    capability = capability_of(q.device.type, q.get_device())
    if isinstance(capability, str):
        return capability.partition("; ")[0]
    if not _entries(q, dim, dim_v):
        have = registry.head_dims(capability, DTYPE_NAMES[q.dtype], "window", registry.shipped_serving())
        names = ", ".join(f"{a}" if a == b else f"{a}/{b}" for a, b in have)
        return f"head_dim: expected one that a serving kernel has ({names}), got {dim}/{dim_v}"
    return None


def _fake(
    q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, used_k: Any, table: Any, slots: Any, sinks: Any,
    seqlen_q: int, seqlen_k: int, scale: float | None, softcap: float, left: int, right: int, return_lse: bool,
) -> tuple[Any, Any]:  # fmt: skip
    """Shapes of the operator, without a device."""
    return _empty(q, v, return_lse)


def _register() -> tuple[Any, Any]:
    library = torch.library.Library("tilecast", "FRAGMENT")
    tags = tuple(
        getattr(torch.Tag, name) for name in ("pt2_compliant_tag", "needs_exact_strides") if hasattr(torch.Tag, name)
    )
    library.define(
        "attention_serving(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_k, "
        "Tensor? block_table, Tensor? cache_batch_idx, Tensor? sinks, SymInt max_seqlen_q, SymInt max_seqlen_k, "
        "float? scale, float softcap, SymInt window_left, SymInt window_right, bool return_lse) -> (Tensor, Tensor)",
        tags=tags,
    )
    library.impl("attention_serving", _run, "CUDA")
    # No kernel runs there; registered so that a direct call says so in our words.
    library.impl("attention_serving", _run, "CPU")
    torch.library.register_fake("tilecast::attention_serving", _fake, lib=library)
    return library, torch.ops.tilecast.attention_serving.default


# The registrations live as long as the library object.
_library, _operator = _register()
