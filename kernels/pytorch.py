"""tilecast as PyTorch's own flash attention: under ``F.scaled_dot_product_attention``, with no line of a model changed.

    import tilecast, torch
    tilecast.register_flash_attention()
    torch.nn.attention.activate_flash_attention_impl("tilecast")
    ...
    torch.nn.attention.restore_flash_attention_impl()

While it is active, SDPA calls for which PyTorch chooses its flash backend run on tilecast's kernels, forward and backward,
and what these do not do (dropout, other head dimensions, a causal mask over unequal lengths, a debug mask) goes to the
kernel underneath, exactly as before.  Operators, autograd formulas, fake kernels and FLOP counts stay PyTorch's.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch

from tilecast.kernels.errors import UnsupportedError
from tilecast.kernels.gradients import backward_into, same_bits
from tilecast.kernels.operator import forward_into

#: What `torch.nn.attention.activate_flash_attention_impl` knows it by.
NAME = "tilecast"
_FORWARD = "_scaled_dot_product_flash_attention"
_BACKWARD = "_scaled_dot_product_flash_attention_backward"
#: Problems that no kernel of ours runs, as they were met: (backward, device, dtype, head_dim, causal).
_Problem = tuple[bool, int, Any, int, bool]


def register_flash_attention(deterministic: bool = True) -> None:
    """Make "tilecast" an implementation that `torch.nn.attention.activate_flash_attention_impl` knows; activates nothing.

    deterministic: whether gradients have the same bits every run (`tilecast.attention`); torch.use_deterministic_algorithms goes
    first.  The last registration before an activation counts.
    Raises UnsupportedError where PyTorch has no such registry (before 2.10).
    """
    try:
        from torch.nn.attention import register_flash_attention_impl
    except ImportError:
        raise UnsupportedError(
            f"register_flash_attention: expected PyTorch 2.10 or newer, which lets packages register flash attention, got "
            f"{torch.__version__}; call tilecast.attention, or upgrade"
        ) from None
    register_flash_attention_impl(NAME, register_fn=functools.partial(_activate, deterministic))


def _activate(deterministic: bool) -> _Active:
    """What PyTorch calls when "tilecast" is activated; it keeps the result and calls its ``remove`` to restore."""
    return _Active("CUDA", deterministic)


class _Active:
    """tilecast's kernels in front of PyTorch's for tensors of ``key``, until `remove`."""

    def __init__(self, key: str, deterministic: bool = True) -> None:
        self._deterministic = deterministic
        self._underneath = {name: torch.library.get_kernel(f"aten::{name}", key) for name in (_FORWARD, _BACKWARD)}
        self._refused: set[_Problem] = set()
        self._library: Any = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            # PyTorch warns of kernels that are overridden, which is what was asked for.
            warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
            self._library.impl(_FORWARD, self.forward, key, with_keyset=True)
            self._library.impl(_BACKWARD, self.backward, key, with_keyset=True)

    def remove(self) -> None:
        """PyTorch's kernels again; what runs already ends on ours."""
        if self._library is not None:
            self._library._destroy()
        self._library = None

    def forward(
        self, keys: Any, query: Any, key: Any, value: Any, dropout_p: float = 0.0, is_causal: bool = False,
        return_debug_mask: bool = False, *, scale: float | None = None,
    ) -> Any:  # fmt: skip
        """``aten::_scaled_dot_product_flash_attention``."""
        problem = (False, query.get_device(), query.dtype, query.shape[3], is_causal)
        if not return_debug_mask and self._ours(problem, query, key, value, dropout_p, is_causal):
            out = torch.empty_like(query)
            lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
            try:
                forward_into(out, lse, query, key, value, scale, -1, 0 if is_causal else -1)
            except UnsupportedError:
                self._refused.add(problem)
            else:
                seed = torch.empty((2,), dtype=torch.uint64, device=query.device)
                offset = torch.empty((), dtype=torch.uint64, device=query.device)
                mask = torch.empty((0,), dtype=query.dtype, device=query.device)
                return out, lse, None, None, query.shape[2], key.shape[2], seed, offset, mask
        given = query, key, value, dropout_p, is_causal, return_debug_mask
        return self._underneath[_FORWARD].call_boxed(keys, *given, scale=scale)

    def backward(
        self, keys: Any, grad_out: Any, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, cum_seq_q: Any,
        cum_seq_k: Any, max_q: int, max_k: int, dropout_p: float, is_causal: bool, philox_seed: Any, philox_offset: Any,
        *, scale: float | None = None,
    ) -> Any:  # fmt: skip
        """``aten::_scaled_dot_product_flash_attention_backward``; it takes the output and lse of either forward."""
        problem = (True, query.get_device(), query.dtype, query.shape[3], is_causal)
        if self._ours(problem, query, key, value, dropout_p, is_causal):
            made = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
            try:
                backward_into(
                    made, grad_out, query, key, value, out, logsumexp, None, scale, -1, 0 if is_causal else -1,
                    same_bits(self._deterministic),
                )  # fmt: skip
            except UnsupportedError:
                self._refused.add(problem)
            else:
                return made
        given = (
            grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
            philox_seed, philox_offset,
        )  # fmt: skip
        return self._underneath[_BACKWARD].call_boxed(keys, *given, scale=scale)

    def _ours(self, problem: _Problem, query: Any, key: Any, value: Any, dropout_p: float, is_causal: bool) -> bool:
        """Whether our kernels mean the same: no dropout, something to attend to, and no mask whose corner is in question."""
        return (
            dropout_p == 0.0
            and problem not in self._refused
            and bool(query.numel() and key.numel())
            and query.shape[3] == value.shape[3]
            and not (is_causal and query.shape[2] != key.shape[2])
        )
