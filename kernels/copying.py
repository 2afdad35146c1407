"""Tensors as kernels take and make them: copies of those that none reads as they lie, and room for what kernels write.

On a GPU up to three tensors are one launch of a generated kernel (``triton_copy``); where it does not run, PyTorch copies them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilecast.kernels import registry
from tilecast.kernels.launching import keep
from tilecast.kernels.starting import compiled_starter, on_device, takes_of, told_apart

_MODULE, _OLDEST = "triton_copy", (8, 0)
_DTYPES = torch.bfloat16, torch.float16
#: Device index -> the kernel's ``launch``, None where it does not run.
_known: dict[int, Any] = {}


def empty_output(q: Any, head_dim_v: int, dtype: Any = None) -> Any:
    """(batch, heads, seqlen_q, head_dim_v), dense, in the memory order of q: heads inside seqlen or seqlen inside heads."""
    batch, heads, seqlen, _ = q.shape
    outer = heads * seqlen * head_dim_v
    if q.stride(1) < q.stride(2):
        strides = (outer, head_dim_v, heads * head_dim_v, 1)
    else:
        strides = (outer, seqlen * head_dim_v, head_dim_v, 1)
    return torch.empty_strided((batch, heads, seqlen, head_dim_v), strides, dtype=dtype or q.dtype, device=q.device)


def readable(*tensors: Any) -> list[Any]:
    """The tensors, each (batch, heads, seqlen, columns), and of one whose last stride is not 1 or of which a row does not start at 16 bytes a dense
    copy in its memory order.

    Rows that are no whole 16 bytes stay as they are: what takes heads of such widths copies them into wider ones (`padding`).
    """
    # Not .contiguous(): that returns the tensor itself when only its address, or a stride that is not used, is odd.
    if all(map(_is_readable, tensors)):
        return [*tensors]
    return copied([(x, None if _is_readable(x) else x.shape[3]) for x in tensors])


def _is_readable(tensor: Any) -> bool:
    a, b, c, last = tensor.stride()
    return last == 1 and bool(not ((a | b | c) & 7 or tensor.data_ptr() & 15) or tensor.shape[3] & 7)


def copied(wanted: Sequence[tuple[Any, int | None]]) -> list[Any]:
    """Of each tensor (batch, heads, seqlen, columns) a dense copy of so many columns, at least its own, zeros behind them, in its memory order; the
    tensor itself where the number is None."""
    found = [x if columns is None else empty_output(x, columns) for x, columns in wanted]
    apart = [(x, room) for (x, columns), room in zip(wanted, found, strict=True) if columns is not None]
    if apart:
        _copy(*zip(*apart, strict=True))
    return found


def _copy(tensors: tuple[Any, ...], rooms: tuple[Any, ...]) -> None:
    """Write each tensor to its room."""
    device, launch = rooms[0].get_device(), None
    if device >= 0 and all(to.dtype in _DTYPES and not to.shape[3] & 7 for to in rooms):
        launch = _known[device] if device in _known else _known.setdefault(device, _find(device))
    if launch is not None and all(to.shape[3] <= launch.widest for to in rooms):
        for first in range(0, len(rooms), launch.most):
            launch(tensors[first : first + launch.most], rooms[first : first + launch.most])
        return
    for x, to in zip(tensors, rooms, strict=True):
        columns = x.shape[3]
        to[..., :columns].copy_(x)
        to[..., columns:].zero_()


def _find(device: int) -> Callable[..., None] | None:
    """The kernel's ``launch`` on a device; None for AMD's, those before sm_80 and without Triton."""
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) < _OLDEST:
        return None
    try:
        module = importlib.import_module(f"{registry.PACKAGE}.{_MODULE}")
    except ImportError:
        return None
    return on_device(copier(module), device)


def copier(module: Any) -> Callable[..., None]:
    """``launch`` of the generated file as a module, (tensors, rooms), which remembers what it works out for shapes and keeps no tensor; ``most``
    tensors a launch, of up to ``widest`` columns."""
    plans: dict[Any, Any] = {}

    def launch(tensors: tuple[Any, ...], rooms: tuple[Any, ...]) -> None:
        given = (*tensors, *rooms)
        # Rooms start at whole 16 bytes, and compiled code does not depend on where the tensors do.
        key = given[0].device, *[(x.dtype, x.shape, x.stride()) for x in given]
        start = plans.get(key)
        if start is None:
            start = keep(plans, key, _plan(module, tensors, rooms))
        start(*given)

    launch.most, launch.widest = module.MOST, module.WIDEST  # type: ignore[attr-defined]
    return launch


def _plan(module: Any, tensors: tuple[Any, ...], rooms: tuple[Any, ...]) -> Callable[..., None]:
    """The launch of a shape."""
    apart = told_apart((*tensors, *rooms))
    planned = module.plan(apart[: len(rooms)], apart[len(rooms) :])
    if not planned:
        return lambda *_: None
    grid, arguments = planned
    return compiled_starter(module.copy, module.OPTIONS, grid, arguments, takes_of(arguments, apart), len(apart))
