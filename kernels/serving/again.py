"""Serving calls met before, so that they cost the host little: all that their checks and plans depend on, and what these found.

A decode step makes the same call for every layer and token, with other addresses.  `key_of` is what such calls have in
common; a call whose key is known skips the checks, which cannot come out differently, and starts the compiled kernels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from tilecast.kernels.launching import MOST_PLANS

_tensor = torch.Tensor
_is_compiling = torch.compiler.is_compiling
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_profiling = torch.autograd._profiler_enabled
_grad_enabled = torch.is_grad_enabled
_none = type(None)
_known: dict[Any, Callable[..., Any]] = {}
#: Types of tensors met, where all are plain ones or None.
_plain: set[tuple[type, ...]] = set()


def watched(q: Any) -> bool:
    """Whether somebody watches operators, or makes tensors that are none: then a call goes through the dispatcher."""
    return bool(
        _is_compiling() or type(q) is not _tensor or q.is_meta or _dispatch_modes() or _function_modes() or _profiling()
    )


def key_of(tensors: tuple[Any, ...], settings: tuple[Any, ...]) -> Any:
    """What says that a call is one met before; None where it must be looked at anew (something other than plain tensors and
    None in ``tensors``, gradients, an onlooker)."""
    if watched(tensors[0]):
        return None
    kinds = tuple(map(type, tensors))
    if kinds not in _plain:
        if any(kind is not _tensor and kind is not _none for kind in kinds):
            return None
        _plain.add(kinds)
    gradients = _grad_enabled()
    # Values may be columns of the keys (latent attention): then another kernel runs.
    facts = [kinds, gradients, tensors[1].data_ptr() == tensors[2].data_ptr(), settings]
    for tensor in tensors:
        if tensor is not None:
            if gradients and tensor.requires_grad:
                return None
            facts += (tensor.dtype, tensor.shape, tensor.stride(), tensor.data_ptr() & 15, tensor.get_device())
    return tuple(facts)


def find(key: Any) -> Callable[..., Any] | None:
    """The call of a key, taking the tensors of `key_of`; None where it is not known, or cannot be (a window as a list)."""
    try:
        return _known.get(key)
    except TypeError:
        return None


def remember(key: Any, call: Callable[..., Any] | None) -> None:
    """Keep the call of a key, unless there is none; with too many of them, forget all."""
    if call is None:
        return
    if len(_known) >= MOST_PLANS:
        _known.clear()
    with contextlib.suppress(TypeError):  # see `find`
        _known[key] = call
