"""Calls met before, so that they cost the host little: all that their checks and plans depend on, and what these found.

A training or a decode step makes the same calls for every layer and token, with other addresses.  `facts_of` is what such calls
have in common; a call whose key is known skips the checks, which cannot come out differently, and starts the compiled kernels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from tilecast.kernels.native.library import library

#: Calls that a memory holds; when there are more, it forgets them all.
MOST_CALLS = 256
_tensor = torch.Tensor
_is_compiling = torch.compiler.is_compiling
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_functorch = torch._C._functorch.peek_interpreter_stack
_profiling = torch.autograd._profiler_enabled
_jit_tracing = torch._C._get_tracing_state
_grad_enabled = torch.is_grad_enabled
_none = type(None)
#: Types of tensors met, where all are plain ones or None.
_plain: set[tuple[type, ...]] = set()


def watched(q: Any) -> bool:
    """Whether a mode or the profiler watches operators, or makes tensors that are none: then a call goes through the dispatcher.

    A dispatch mode, a functorch level, the profiler or a tracer must see the operator; meta tensors have no kernel but the
    fake one.
    """
    return bool(
        _is_compiling()
        or type(q) is not _tensor
        or q.is_meta
        or _dispatch_modes()
        or _function_modes()
        or _profiling()
        or _functorch() is not None
        or _jit_tracing() is not None
        or forward_ad._current_level >= 0
    )


def key_of(tensors: tuple[Any, ...], settings: tuple[Any, ...]) -> Any:
    """What says that a call is one met before; None where it must be looked at anew (something other than plain tensors and
    None in ``tensors``, gradients, an onlooker)."""
    if watched(tensors[0]):
        return None
    facts = facts_of(tensors, _grad_enabled())
    return None if facts is None else (facts, settings)


def facts_of(tensors: tuple[Any, ...], gradients: bool) -> Any:
    """All that plans depend on of tensors, at least three and None among them; None where one is no plain tensor, or requires a
    gradient while there are ``gradients``."""
    if tensors[0].is_cuda:
        native = library()
        if native is not None:
            facts = native.facts(tensors, gradients)
            if facts is not None:
                return facts
    kinds = tuple(map(type, tensors))
    if kinds not in _plain:
        if any(kind is not _tensor and kind is not _none for kind in kinds):
            return None
        _plain.add(kinds)
    # Values may be columns of the keys (latent attention): then another kernel runs.
    facts = [kinds, gradients, tensors[1].data_ptr() == tensors[2].data_ptr()]
    for tensor in tensors:
        if tensor is not None:
            if gradients and tensor.requires_grad:
                return None
            facts += (tensor.dtype, tensor.shape, tensor.stride(), tensor.data_ptr() & 15, tensor.get_device())
    return tuple(facts)


class Memory:
    """Calls by their keys."""

    def __init__(self) -> None:
        self._calls: dict[Any, Callable[..., Any]] = {}

    def find(self, key: Any) -> Callable[..., Any] | None:
        """The call of a key; None where it is not known, or cannot be (a window as a list)."""
        try:
            return self._calls.get(key)
        except TypeError:
            return None

    def remember(self, key: Any, call: Callable[..., Any] | None) -> None:
        """Keep the call of a key, unless there is none; with too many of them, forget all."""
        if call is None:
            return
        if len(self._calls) >= MOST_CALLS:
            self._calls.clear()
        with contextlib.suppress(TypeError):  # see `find`
            self._calls[key] = call
