"""Heads that no kernel has as they are: launches on copies with zeros behind the last column, which change no score and no gradient.

Kernels whose copy engine brings the zeros (`registry.Entry.head_dim_min`) need none of this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilecast.kernels.copying import copied


def padded(launch: Callable[..., Any], head_dim: int, head_dim_v: int, direction: str) -> Callable[..., None]:
    """``launch`` of a kernel for (head_dim, head_dim_v), for heads with fewer columns of either; ``direction``: "fwd" or "bwd"."""
    return _forward(launch, head_dim, head_dim_v) if direction == "fwd" else _backward(launch, head_dim, head_dim_v)


def _forward(launch: Callable[..., Any], head_dim: int, head_dim_v: int) -> Callable[..., None]:
    def wide(q: Any, k: Any, v: Any, out: Any, *rest: Any) -> None:
        made = _room(out, head_dim_v)
        launch(*_padded((q, head_dim), (k, head_dim), (v, head_dim_v)), made, *rest)
        _keep(made, out)

    return wide


def _backward(launch: Callable[..., Any], head_dim: int, head_dim_v: int) -> Callable[..., None]:
    def wide(
        q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, dq: Any, dk: Any, dv: Any, *rest: Any
    ) -> None:  # fmt: skip
        gradients = (dq, head_dim), (dk, head_dim), (dv, head_dim_v)
        made = [_room(x, width) for x, width in gradients]
        *read, dout = _padded((q, head_dim), (k, head_dim), (v, head_dim_v), (out, head_dim_v), (dout, head_dim_v))
        launch(*read, lse, dout, *made, *rest)
        for x, (gradient, _) in zip(made, gradients, strict=True):
            _keep(x, gradient)

    return wide


def _padded(*wanted: tuple[Any, int]) -> list[Any]:
    """Each tensor with zeros up to so many columns; itself where it has as many."""
    return copied([(x, None if x.shape[3] == width else width) for x, width in wanted])


def _room(x: Any, width: int) -> Any:
    """Where a kernel writes what is ``x`` in its first columns; ``x`` itself where it has as many."""
    return x if x.shape[3] == width else x.new_empty((*x.shape[:3], width))


def _keep(made: Any, x: Any) -> None:
    if made is not x:
        x.copy_(made[..., : x.shape[3]])
