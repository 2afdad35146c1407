"""New keys and values into a cache before attention reads it, queries and keys rotated: what `attention_kvcache` does with k and v.

``torch.ops.tilecast.attention_append`` writes to the cache, and returns the rotated queries and the new lengths: one launch, whose
grid follows from shapes alone, so that a captured one is right for whatever lengths are there on replay.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from tilecast.kernels import registry
from tilecast.kernels.again import watched
from tilecast.kernels.errors import AttentionError, UnsupportedError
from tilecast.kernels.launching import keep
from tilecast.kernels.registration import register
from tilecast.kernels.serving.checks import check_appended_values, check_list, check_new
from tilecast.kernels.starting import compiled_starter, on_device, takes_of, told_apart

#: Kernels for 16-bit caches and for e4m3 bytes.
_MODULES = {False: "triton_append", True: "triton_append_e4m3"}
#: (device index, whether bytes) -> a kernel.
_known: dict[tuple[int, bool], Appender] = {}


def check_append(q: Any, k_cache: Any, v_cache: Any, lists: tuple[Any, ...], new: tuple[Any, ...], longest: int, check: bool) -> None:  # fmt: skip
    """AttentionError for new keys and values that do not fit to a checked call; ``check``: look at numbers on the device too.

    lists: cu_seqlens_q, cu_seqlens_k, cache_seqlens, block_table, cache_batch_idx, sinks, k_descale, v_descale; new: k, v,
    cu_seqlens_k_new, rotary_cos, rotary_sin, rotary_interleaved; longest: the most keys of a sequence.
    """
    k, v, cu_new, cos, sin, interleaved = new
    batch = lists[2].shape[0]
    check_new(q, k, v, k_cache, v_cache, batch, cu_new is not None)
    if cu_new is not None:
        check_list("cu_seqlens_k_new", cu_new, (batch + 1,), q.device)
    check_rotary(q, cos, sin, interleaved)
    if check:
        check_appended_values(k, k_cache, cu_new, lists[2], lists[3], lists[4], cos, longest)


def append(
    q: Any, k_cache: Any, v_cache: Any, lists: Any, new: tuple[Any, ...], interleaved: bool, follows: bool
) -> tuple[Any, Any]:
    """(q, or rotated as another tensor; keys of each sequence after it, int32 (batch,)) of what `check_append` passed.

    ``follows``: whether each query has an angle of its own.
    """
    arguments = (*_tensors(q, k_cache, v_cache, lists, new), interleaved, follows)
    turned, lengths = _operator(*arguments) if watched(q) else _run(*arguments)
    return (q if new[3] is None else turned), lengths


def append_started(
    q: Any, k_cache: Any, v_cache: Any, lists: Any, new: tuple[Any, ...], interleaved: bool, follows: bool
) -> Callable[..., tuple[Any, Any]]:
    """The call of these arguments, which `append` has just made, for others like them:
    (q, k_cache, v_cache, lists, new) -> what `append` returns.  It keeps no tensor."""
    tensors = _tensors(q, k_cache, v_cache, lists, new)
    start, empty = (
        _known[new[0].get_device(), k_cache.dtype == torch.uint8].started(tensors, interleaved, follows),
        _fake,
    )
    turns = new[3] is not None

    def call(q: Any, k_cache: Any, v_cache: Any, lists: Any, new: tuple[Any, ...]) -> tuple[Any, Any]:
        tensors = _tensors(q, k_cache, v_cache, lists, new)
        turned, lengths = empty(*tensors)
        start(tensors, turned, lengths)
        return (turned if turns else q), lengths

    return call


def _tensors(q: Any, k_cache: Any, v_cache: Any, lists: Any, new: tuple[Any, ...]) -> tuple[Any, ...]:
    """Tensors in the order of the operator's arguments."""
    k, v, cu_new, cos, sin = new[:5]
    return (None if cos is None else q, k, v, k_cache, v_cache, lists[0], cu_new, *lists[2:5], *lists[6:], cos, sin)


def check_rotary(q: Any, cos: Any, sin: Any, interleaved: Any) -> None:
    """AttentionError unless cos and sin are tables (positions, half of the columns to rotate), or both None."""
    if (cos is None) != (sin is None):
        raise AttentionError(
            f"rotary_{'cos' if cos is None else 'sin'}: expected a table as well, got None beside the other"
        )
    if not isinstance(interleaved, bool):
        raise AttentionError(f"rotary_interleaved: expected True or False, got {interleaved!r}")
    if cos is None:
        return
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        check_list(name, table, (None, None), q.device, str(q.dtype if table.dtype == q.dtype else torch.float32))
    if cos.shape != sin.shape or cos.stride() != sin.stride() or cos.dtype != sin.dtype:
        raise AttentionError(
            f"rotary_sin: expected shape, strides and dtype of rotary_cos, {tuple(cos.shape)} {cos.dtype}, got {tuple(sin.shape)} {sin.dtype}"
        )
    if not cos.shape[0] or not 1 <= cos.shape[1] <= q.shape[-1] // 2:
        raise AttentionError(
            f"rotary_cos: expected (positions, 1 to {q.shape[-1] // 2} columns: half of those to rotate), got {tuple(cos.shape)}"
        )


class Appender:
    """``launch`` of a generated kernel that appends, with a memory for shapes; it keeps no tensor."""

    def __init__(self, module: Any, device: int) -> None:
        self._module, self._device = module, device
        self._plans: dict[Any, Callable[..., None]] = {}

    def __call__(self, tensors: tuple[Any, ...], turned: Any, lengths: Any, interleaved: bool, follows: bool) -> None:
        """tensors: in the order of the operator's arguments."""
        self.started(tensors, interleaved, follows)(tensors, turned, lengths)

    def started(self, tensors: tuple[Any, ...], interleaved: bool, follows: bool) -> Callable[..., None]:
        """The launch of tensors like these, as (tensors, turned, lengths) -> None; turned of size 0 where there is no q."""
        # All that compiled code, its arguments and the checks depend on, but addresses.
        key = (interleaved, follows, *[None if t is None else (t.dtype, t.shape, t.stride(), t.data_ptr() & 15) for t in tensors])  # fmt: skip
        launch = self._plans.get(key)
        if launch is None:
            launch = keep(self._plans, key, self._plan(tensors, interleaved, follows))
        return launch

    def _plan(self, tensors: tuple[Any, ...], interleaved: bool, follows: bool) -> Callable[..., None]:
        module = self._module
        given = told_apart(_in_order(tensors, *_fake(*tensors)))
        grid, arguments = module.plan(*given[:9], given[9:], interleaved, follows)
        takes = takes_of(arguments, given)
        start = compiled_starter(module.append, module.OPTIONS, grid, arguments, takes, len(given))

        def launch(tensors: tuple[Any, ...], turned: Any, lengths: Any) -> None:
            start(*_in_order(tensors, turned, lengths))

        return on_device(launch, self._device)


def _in_order(tensors: tuple[Any, ...], turned: Any, lengths: Any) -> tuple[Any, ...]:
    """Tensors in the order of the kernel's arguments: rotary tables stand before the lists."""
    q, k, v, k_cache, v_cache, *lists, cos, sin = tensors
    return (q, None if q is None else turned, k, v, k_cache, v_cache, lengths, cos, sin, *lists)


def _run(
    q: Any, k: Any, v: Any, k_cache: Any, v_cache: Any, cu_q: Any, cu_new: Any, used: Any, table: Any, slots: Any, k_descale: Any,
    v_descale: Any, cos: Any, sin: Any, interleaved: bool, follows: bool,
) -> tuple[Any, Any]:  # fmt: skip
    """The operator on a device; the first result is of size 0 where nothing is rotated."""
    narrow, device = k_cache.dtype == torch.uint8, k.get_device()
    launch = _known.get((device, narrow))
    if launch is None:
        launch = _known[device, narrow] = _find(narrow, device)
    tensors = (q, k, v, k_cache, v_cache, cu_q, cu_new, used, table, slots, k_descale, v_descale, cos, sin)
    turned, lengths = _fake(*tensors)
    launch(tensors, turned, lengths, interleaved, follows)
    return turned, lengths


def _find(narrow: bool, device: int) -> Appender:
    """The kernel for a kind of cache, imported; UnsupportedError without Triton."""
    try:
        module = importlib.import_module(f"{registry.PACKAGE}.{_MODULES[narrow]}")
    except ImportError as error:
        raise UnsupportedError(
            f"attention: the kernels need Triton 3.6 or newer, and importing one gave '{error}'; pip install 'tilecast[gpu]'"
        ) from error
    return Appender(module, device)


def _fake(q: Any, k: Any, v: Any, k_cache: Any, v_cache: Any, cu_q: Any, cu_new: Any, used: Any, *_: Any) -> tuple[Any, Any]:  # fmt: skip
    """Shapes of the operator, without a device."""
    turned = torch.empty((0,), dtype=k.dtype, device=k.device) if q is None else torch.empty(q.shape, dtype=q.dtype, device=q.device)  # fmt: skip
    return turned, torch.empty(used.shape, dtype=torch.int32, device=used.device)


_library, _operator = register(
    "attention_append(Tensor? q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k_new, Tensor cache_seqlens, Tensor? block_table, Tensor? cache_batch_idx, Tensor? k_descale, "
    "Tensor? v_descale, Tensor? rotary_cos, Tensor? rotary_sin, bool interleaved, bool follows) -> (Tensor, Tensor)",
    _run,
    _fake,
)
