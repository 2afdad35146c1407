"""Launches of generated kernels that cost little on the host: what a launch works out for a shape is kept.

A generated file's own ``launch`` checks its tensors, makes their descriptors and asks Triton for compiled code in every
call.  `launcher` of the file, imported as a module, is the same function with a memory:

    launch = launcher(kernel)
    launch(q, k, v, out, lse, scale)

The second launch of a shape only looks it up, gives the descriptors their tensors and starts the compiled kernel.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

#: Shapes that a launcher remembers; when there are more, it forgets them all.
MOST_PLANS = 256
LOG2E = 1.4426950408889634


def launcher(module: Any) -> Callable[..., None]:
    """``launch`` of a generated file, which remembers what it works out for a shape.

    ``module`` is the file as a module: its ``plan``, its kernel ``attention`` and its ``OPTIONS``.  The result has the
    signature, the shapes and the refusals of the file's ``launch``: launch(q, k, v, out, lse, scale, window_left=-1,
    window_right=-1).  It keeps up to `MOST_PLANS` shapes and no tensor.
    """
    plans: dict[Any, Any] = {}

    def launch(
        q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float, window_left: int = -1, window_right: int = -1
    ) -> None:
        if not 0.0 < scale <= 2.0e38:  # the row maximum is taken before scaling; times log2(e), 2e38 is still a float32
            raise ValueError(f"scale: expected a number above 0 and at most 2e+38, got {scale:g}")
        scale_log2 = max(scale * LOG2E, 1e-37)  # a hidden score is -inf, which times 0 would be NaN
        if lse is None:
            lse = q.new_empty(q.shape[:3], dtype=torch.float32)
        tensors = (q, k, v, out, lse)
        # All that compiled code, its arguments and the checks depend on, but addresses and scale.
        key = (
            q.device,
            *[(t.dtype, t.shape, t.stride(), t.data_ptr() % 16) for t in tensors],
            window_left,
            window_right,
        )
        plan = plans.get(key)
        if plan is None:
            if len(plans) >= MOST_PLANS:
                plans.clear()
            plan = plans[key] = _plan(module, tensors, window_left, window_right)
        if plan:
            start, descriptors, described, pointers, numbers = plan
            if descriptors:
                start(*map(on_tensor, descriptors, described(tensors)), *pointers(tensors), *numbers, scale_log2)
            else:
                start(*tensors, *numbers, scale_log2)
        else:
            out.zero_()
            lse.fill_(float("-inf"))

    return launch


def _plan(module: Any, tensors: tuple[Any, ...], window_left: int, window_right: int) -> tuple[Any, ...]:
    """What launches of one shape share, without their tensors; () for empty tensors, ValueError for what is not taken.

    (compiled kernel on its grid, descriptors, what picks their tensors, what picks the tensors passed as they are,
    numbers).  Picks are from (q, k, v, out, lse); a kernel takes descriptors, tensors and numbers in this order, then
    the scale, and one without descriptors takes all five tensors.
    """
    # One tensor may be given twice, and still every argument must tell which one it is of.
    apart = [t[...] if any(t is other for other in tensors[:i]) else t for i, t in enumerate(tensors)]
    planned = module.plan(*apart, window_left, window_right)
    if not planned:
        return ()
    grid, arguments = planned
    # An interpreter compiles nothing.
    kernel = module.attention.warmup(*arguments, 1.0, grid=grid, **module.OPTIONS) or module.attention
    place = {id(tensor): i for i, tensor in enumerate(apart)}
    made = [argument for argument in arguments if id(getattr(argument, "base", None)) in place]
    pointers = [place[id(argument)] for argument in arguments if id(argument) in place]
    numbers = arguments[len(made) + len(pointers) :]
    if not made:
        return kernel[grid], (), None, None, numbers
    described = _picker([place[id(descriptor.base)] for descriptor in made])
    return (
        kernel[grid],
        [without_tensor(one) for one in made],
        described,
        _picker(pointers),
        numbers,
    )


def backward_launcher(module: Any) -> Callable[..., None]:
    """``launch`` of a generated backward pass, which remembers what it works out for a shape.

    ``module`` is the file as a module: its ``plan``, its ``OPTIONS``, what it rounds lengths up to, and its ``workspaces``
    where it needs more than terms.  The result has the signature, the shapes and the refusals of the file's ``launch``.
    """
    plans: dict[Any, Any] = {}
    whole = module.PADDED.value
    workspaces = getattr(module, "workspaces", _nothing_more)

    def launch(
        q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, dq: Any, dk: Any, dv: Any, scale: float,
        window_left: int = -1, window_right: int = -1, dlse: Any = None, terms: Any = None,
    ) -> None:  # fmt: skip
        if not 0.0 < scale <= 2.0e38:  # times log2(e), 2e38 is still a float32
            raise ValueError(f"scale: expected a number above 0 and at most 2e+38, got {scale:g}")
        if terms is None:
            terms = lse.new_empty((*q.shape[:2], 2, -(-q.shape[2] // whole) * whole))
        tensors = (q, k, v, out, lse, dout, dlse, dq, dk, dv, terms, *workspaces(terms))
        key = (
            q.device,
            *[None if t is None else (t.dtype, t.shape, t.stride(), t.data_ptr() % 16) for t in tensors],
            window_left,
            window_right,
        )
        steps = plans.get(key)
        if steps is None:
            if len(plans) >= MOST_PLANS:
                plans.clear()
            steps = plans[key] = _backward_steps(module, tensors, window_left, window_right)
        scales = max(scale * LOG2E, 1e-37), scale  # the first as in the forward pass
        for start, recipe, scaled in steps:
            arguments = [
                value if at is None else tensors[at] if value is None else on_tensor(value, tensors[at])
                for at, value in recipe
            ]
            start(*arguments, *(scales if scaled else ()))
        if not steps:
            for gradient in (dq, dk, dv):
                gradient.zero_()

    return launch


def _nothing_more(terms: Any) -> tuple[Any, ...]:
    """Workspaces of a backward pass that needs only ``terms``."""
    return ()


def _backward_steps(module: Any, tensors: tuple[Any, ...], window_left: int, window_right: int) -> list[Any]:
    """(compiled kernel on its grid, recipe of its arguments, whether the scales follow) of each launch of a shape.

    A recipe says for each argument (place among ``tensors`` or None, value or None): a tensor as it is, a descriptor of
    one, which is its type and fields, or a number.
    """
    # One tensor may be given twice, and still every argument must tell which one it is of.
    apart = [t[...] if t is not None and any(t is other for other in tensors[:i]) else t for i, t in enumerate(tensors)]
    recipe = _recipes(apart)
    steps = []
    for number, ((kernel, grid, arguments), options) in enumerate(
        zip(module.plan(*apart, window_left, window_right), module.OPTIONS, strict=False)
    ):
        scales = (1.0, 1.0) if number else ()
        # An interpreter compiles nothing.
        compiled = kernel.warmup(*arguments, *scales, grid=grid, **options) or kernel
        steps.append((compiled[grid], [recipe(argument) for argument in arguments], bool(number)))
    return steps


def _recipes(apart: list[Any]) -> Callable[[Any], tuple[int | None, Any]]:
    """What gives the recipe of an argument made from one of the tensors ``apart``."""
    place = {id(tensor): i for i, tensor in enumerate(apart) if tensor is not None}

    def recipe(argument: Any) -> tuple[int | None, Any]:
        base = getattr(argument, "base", None)
        if base is not None and id(base) in place:
            return place[id(base)], without_tensor(argument)
        return (place[id(argument)], None) if id(argument) in place else (None, argument)

    return recipe


def e4m3_launcher(module: Any) -> Callable[..., None]:
    """``launch`` of a generated e4m3 kernel, which remembers what it works out for a shape.

    ``module`` is the file as a module: its ``plan`` of one launch, or of two, which then has ``PREPARE_WARPS`` for the first,
    ``workspaces`` and ``OPTIONS``.  The result has the signature, the shapes and the refusals of the file's ``launch``, and
    ``any_v``: whether V may have any strides.
    """
    plans: dict[Any, Any] = {}

    def launch(
        q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float, window_left: int = -1, window_right: int = -1,
        q_descale: Any = None, k_descale: Any = None, v_descale: Any = None,
    ) -> None:  # fmt: skip
        if not 0.0 < scale <= 2.0e38:  # the row maximum is taken before scaling; times log2(e), 2e38 is still a float32
            raise ValueError(f"scale: expected a number above 0 and at most 2e+38, got {scale:g}")
        if lse is None:
            lse = q.new_empty(q.shape[:3], dtype=torch.float32)
        tensors = (q, k, v, out, lse, q_descale, k_descale, v_descale, *module.workspaces(v))
        key = (
            q.device,
            *[None if t is None else (t.dtype, t.shape, t.stride(), t.data_ptr() % 16) for t in tensors],
            window_left,
            window_right,
        )
        steps = plans.get(key)
        if steps is None:
            if len(plans) >= MOST_PLANS:
                plans.clear()
            steps = plans[key] = _e4m3_steps(module, tensors, window_left, window_right)
        for start, recipe, scaled in steps:
            arguments = [
                value if at is None else tensors[at] if value is None else on_tensor(value, tensors[at])
                for at, value in recipe
            ]
            start(*arguments, *((scale * LOG2E,) if scaled else ()))
        if not steps:
            out.zero_()
            lse.fill_(float("-inf"))

    # The first of two launches reads V by plain loads.
    launch.any_v = hasattr(module, "PREPARE_WARPS")  # type: ignore[attr-defined]
    return launch


def _e4m3_steps(module: Any, tensors: tuple[Any, ...], window_left: int, window_right: int) -> list[Any]:
    """(compiled kernel on its grid, recipe of its arguments, whether the scale follows) of the launches of a shape, of which
    the last is attention; empty for empty tensors."""
    # One tensor may be given twice, and still every argument must tell which one it is of.
    apart = [t[...] if t is not None and any(t is other for other in tensors[:i]) else t for i, t in enumerate(tensors)]
    recipe = _recipes(apart)
    steps = []
    *before, last = module.plan(*apart, window_left, window_right) or (None,)
    for kernel, grid, arguments in before:
        compiled = kernel.warmup(*arguments, grid=grid, num_warps=module.PREPARE_WARPS) or kernel
        steps.append((compiled[grid], [recipe(argument) for argument in arguments], False))
    if last is not None:
        kernel, grid, arguments = last
        # An interpreter compiles nothing.
        compiled = kernel.warmup(*arguments, 1.0, grid=grid, **module.OPTIONS) or kernel
        steps.append((compiled[grid], [recipe(argument) for argument in arguments], True))
    return steps


def _picker(places: list[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """Takes the items at ``places``, at least one, out of a tuple."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    return operator.itemgetter(slice(places[0], places[0] + 1))


def without_tensor(descriptor: Any) -> tuple[type, dict[str, Any]]:
    """The type and the fields of a descriptor, without its tensor."""
    return type(descriptor), {**vars(descriptor), "base": None}


def on_tensor(descriptor: tuple[type, dict[str, Any]], tensor: Any) -> Any:
    """The descriptor of a tensor from `without_tensor` of one with the same shape, strides and alignment, which are all that is
    checked when a descriptor is made."""
    kind, fields = descriptor
    made: Any = object.__new__(kind)
    fields = fields.copy()
    fields["base"] = tensor
    made.__dict__ = fields
    return made
