"""Operators of PyTorch: the one way in which those of attention are registered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

#: Those that this PyTorch has.  Exact strides: the output's memory order is q's, so a compiler may not choose another one.
_TAGS = tuple(
    getattr(torch.Tag, name) for name in ("pt2_compliant_tag", "needs_exact_strides") if hasattr(torch.Tag, name)
)


def register(
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    on_cpu: Callable[..., Any] | None = None,
    flops: Callable[..., int] | None = None,
) -> tuple[Any, Any]:
    """(library, operator) of a ``schema`` "name(Tensor q, ...) -> ..."; the registration lives as long as the library object.

    ``fake`` has shapes alone.  Without ``on_cpu`` CPUs go to ``run`` too, so that a direct call is refused in our words.
    """
    name = schema[: schema.index("(")]
    library = torch.library.Library("tilecast", "FRAGMENT")
    library.define(schema, tags=_TAGS)
    library.impl(name, run, "CUDA")
    library.impl(name, on_cpu or run, "CPU")
    torch.library.register_fake(f"tilecast::{name}", fake, lib=library)
    operator = getattr(torch.ops.tilecast, name)
    if flops is not None:
        register_flop_formula(operator)(flops)
    return library, operator.default
