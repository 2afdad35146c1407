"""Launches of GEMM kernels that cost little on the host: what a launch works out for a shape is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilecast.kernels.launching import MOST_PLANS, on_tensor, without_tensor


def gemm_launcher(module: Any) -> Callable[..., None]:
    """``launch`` of a generated GEMM file, which remembers what it works out for a shape.

    The result has the signature, the shapes and the refusals of the file's ``launch``: launch(a, b, c, d, alpha, beta).  It
    keeps up to `MOST_PLANS` shapes and no tensor.
    """
    plans: dict[Any, Any] = {}

    def launch(a: Any, b: Any, c: Any, d: Any, alpha: float = 1.0, beta: float = 1.0) -> None:
        adds = c is not None and beta != 0
        tensors = (a, b, c if adds else d, d)
        # All that compiled code, its arguments and the checks depend on, but addresses and the factors' values.
        key = (
            a.device, adds, alpha != 1 or beta not in (0, 1),
            *[(t.dtype, t.shape, t.stride(), t.data_ptr() & 15) for t in tensors],
        )  # fmt: skip
        plan = plans.get(key)
        if plan is None:
            if len(plans) >= MOST_PLANS:
                plans.clear()
            plan = plans[key] = _plan(module, a, b, c, d, alpha, beta)
        if plan:
            start, descriptors, sizes, flags = plan
            given = tensors if descriptors is None else map(on_tensor, descriptors, tensors)
            start(*given, *sizes, float(alpha), float(beta), *flags)

    return launch


def _plan(module: Any, a: Any, b: Any, c: Any, d: Any, alpha: float, beta: float) -> tuple[Any, ...]:
    """(compiled kernel on its grid, descriptors without tensors or None, sizes, flags); () for an empty D."""
    planned = module.plan(a, b, c, d, alpha, beta)
    if not planned:
        return ()
    grid, arguments = planned
    # An interpreter compiles nothing.
    kernel = module.multiply.warmup(*arguments, grid=grid, **module.OPTIONS) or module.multiply
    described = None
    if hasattr(arguments[0], "block_shape"):
        described = [without_tensor(one) for one in arguments[:4]]
    # Rows or columns of A and of B (of descriptors alone), whether C is added, whether anything is scaled.
    flags = arguments[-4 if described else -2 :]
    return kernel[grid], described, arguments[4 : -2 - len(flags)], flags
