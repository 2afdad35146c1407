"""Launches of generated kernels that cost little on the host: what a launch works out for a shape is kept.

A generated file's own ``launch`` checks its tensors, makes their descriptors and asks Triton for compiled code in every
call.  `launcher` of the file, imported as a module, is the same function with a memory:

    launch = launcher(kernel)
    launch(q, k, v, out, lse, scale)

The second launch of a shape only looks it up, gives the descriptors their tensors and starts the compiled kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from tilecast.kernels.assembling import Change
from tilecast.kernels.narrowing import change_for
from tilecast.kernels.scratch import counters_of
from tilecast.kernels.starting import Start, compiled_starter, on_device, sm_count, takes_of, told_apart

#: Shapes that a launcher remembers; when there are more, it forgets them all.
MOST_PLANS = 256
Plan = TypeVar("Plan")
LOG2E = 1.4426950408889634


def launcher(module: Any, taller: tuple[Any, float] | None = None) -> Callable[..., None]:
    """``launch`` of a generated file, which remembers what it works out for a shape.

    ``module`` is the file as a module: its ``plan``, its kernel ``attention`` and its ``OPTIONS``.  The result has the
    signature, the shapes and the refusals of the file's ``launch``: launch(q, k, v, out, lse, scale, window_left=-1,
    window_right=-1).  It keeps up to `MOST_PLANS` shapes and no tensor.  ``taller``: another such file of taller tiles that gives the same
    bits, and the time of a tile of ``module`` over one of it: it runs where its tiles, as they are dealt, take less.
    """
    find = _remembered(module, _plan) if taller is None else _remembered((module, *taller), _plan_of_sooner)

    def launch(
        q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float, window_left: int = -1, window_right: int = -1
    ) -> None:
        scale_log2 = _in_base_2(scale)
        if lse is None:
            lse = q.new_empty(q.shape[:3], dtype=torch.float32)
        start = find((q, k, v, out, lse), window_left, window_right)
        if start:
            start(q, k, v, out, lse, scale_log2)
        else:
            out.zero_()
            lse.fill_(float("-inf"))

    def started(
        q: Any, k: Any, v: Any, out: Any, lse: Any, scale: float, window_left: int = -1, window_right: int = -1
    ) -> Start | None:
        """The launch of tensors like these, as (q, k, v, out, lse) -> None; it keeps none.  None where nothing is launched."""
        scale_log2 = _in_base_2(scale)
        if lse is None:
            lse = q.new_empty(q.shape[:3], dtype=torch.float32)
        start = find((q, k, v, out, lse), window_left, window_right)
        if not start:
            return None
        rows, strides, device = tuple(lse.shape), lse.stride(), lse.device

        def again(q: Any, k: Any, v: Any, out: Any, lse: Any) -> None:
            if lse is None:
                lse = torch.empty_strided(rows, strides, dtype=torch.float32, device=device)
            start(q, k, v, out, lse, scale_log2)

        return on_device(again, q.get_device())

    launch.started = started  # type: ignore[attr-defined]
    return launch


def _remembered(module: Any, plan: Callable[..., Any]) -> Callable[..., Any]:
    """``plan(module, tensors, *settings)`` as (tensors, *settings) -> what it gave for a shape, made where that is not known."""
    plans: dict[Any, Any] = {}

    def find(tensors: tuple[Any, ...], *settings: Any) -> Any:
        # All that compiled code, its arguments and the checks depend on, but addresses and scale.
        facts = [None if t is None else (t.dtype, t.shape, t.stride(), t.data_ptr() % 16) for t in tensors]
        key = (tensors[0].device, *facts, *settings)
        found = plans.get(key)
        if found is None:
            found = keep(plans, key, plan(module, tensors, *settings))
        return found

    return find


def keep(plans: dict[Any, Plan], key: Any, plan: Plan) -> Plan:
    """``plan``, kept in ``plans`` under ``key``; all others are forgotten first where there are `MOST_PLANS`.

    ``plans`` is a plain dict and looking up in it stays with the caller: that is all that a launch of a known shape does.
    """
    if len(plans) >= MOST_PLANS:
        plans.clear()
    plans[key] = plan
    return plan


def _in_base_2(scale: float) -> float:
    """The scale of scores whose powers are of 2; ValueError for one that kernels do not take."""
    if not 0.0 < scale <= 2.0e38:  # the row maximum is taken before scaling; times log2(e), 2e38 is still a float32
        raise ValueError(f"scale: expected a number above 0 and at most 2e+38, got {scale:g}")
    return max(scale * LOG2E, 1e-37)  # a hidden score is -inf, which times 0 would be NaN


def _plan(module: Any, tensors: tuple[Any, ...], window_left: int, window_right: int) -> Any:
    """The launch of one shape, of (q, k, v, out, lse) and the scale; False for empty tensors, ValueError for what is not taken."""
    apart, change = told_apart(tensors), _of_fewer_columns(module, tensors)
    floats = module.scratch(*apart, window_left, window_right) if hasattr(module, "scratch") else 0
    if floats:
        return _plan_of_parts(module, tensors[0].device, apart, (window_left, window_right), floats, change)
    planned = module.plan(*apart, window_left, window_right)
    return _step((module.attention, *planned), apart, 1, module.OPTIONS, 1, change) if planned else False


def _plan_of_parts(
    module: Any, device: Any, apart: list[Any], window: tuple[int, int], floats: int, change: Change | None
) -> Start:
    """The launch of one shape whose programs leave ``floats`` numbers, and that which joins them, and may begin before the first has ended."""
    get, follows = counters_of(device).get, device.type == "cuda"
    given = [*apart, get(floats, 0)[0]]
    grid, arguments, joined = module.plan(*apart, *window, given[-1], 1 if follows else None)
    start = _step((module.attention, grid, arguments), given, 1, module.OPTIONS, 1, change)
    places, joins = joined
    takes = takes_of(joins, given)
    join = compiled_starter(module.attention_join, module.JOIN_OPTIONS, places, joins, takes, len(given) + 1, follows)

    def both(q: Any, k: Any, v: Any, out: Any, lse: Any, scale_log2: float) -> None:
        partials = get(floats, 0)[0]
        start(q, k, v, out, lse, partials, scale_log2)
        join(q, k, v, out, lse, partials, scale_log2)

    return both


def _of_fewer_columns(module: Any, tensors: tuple[Any, ...]) -> Change | None:
    """What changes in a kernel's PTX for heads of fewer columns than its own."""
    return change_for(module, max(tensors[0].shape[-1], tensors[2].shape[-1]))


def _plan_of_sooner(kernels: tuple[Any, Any, float], tensors: tuple[Any, ...], *window: int) -> Any:
    """`_plan` of that of two kernels whose tiles take less time on all SMs."""
    module, taller, time = kernels
    q, k, *_ = tensors
    if not (q.numel() and k.numel()):
        return _plan(module, tensors, *window)
    batch, heads, seqlen, _ = q.shape
    sizes = int(batch), int(heads), int(k.shape[1]), int(seqlen), int(k.shape[2]), sm_count(q.device)
    work, less = (kernel.launch_of(*sizes)[0] for kernel in (module, taller))
    return _plan(module if work * time <= less else taller, tensors, *window)


def backward_launcher(module: Any) -> Callable[..., None]:
    """``launch`` of a generated backward pass, which remembers what it works out for a shape.

    ``module`` is the file as a module: its ``plan``, its ``OPTIONS``, what it rounds lengths up to, its ``workspaces`` beside
    terms, and ``PIECES`` where terms are pieces that products add.  The result has the signature, the
    shapes and the refusals of the file's ``launch``; ``deterministic`` does nothing where every run has the same bits anyway.
    """
    workspaces = module.workspaces
    any_order = hasattr(module, "ANY_ORDER_ABREAST")
    find = _remembered(module, _backward_steps)

    def launch(
        q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, dq: Any, dk: Any, dv: Any, scale: float,
        window_left: int = -1, window_right: int = -1, dlse: Any = None, terms: Any = None, deterministic: bool = True,
    ) -> None:  # fmt: skip
        scales = _in_base_2(scale), scale
        if terms is None:
            terms = lse.new_empty(terms_shape(module, q))
        more = workspaces(q, k, v, terms, window_left, window_right)
        tensors = (q, k, v, out, lse, dout, dlse, dq, dk, dv, terms, *more)
        steps = find(tensors, window_left, window_right, *([deterministic] if any_order else ()))
        for start in steps:
            start(*tensors, *scales)
        if not steps:
            for gradient in (dq, dk, dv):
                gradient.zero_()

    def started(
        q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any, dq: Any, dk: Any, dv: Any, scale: float,
        window_left: int = -1, window_right: int = -1, dlse: Any = None, deterministic: bool = True,
    ) -> Start:  # fmt: skip
        """The launches of tensors like these, which are not empty, as (q, k, v, out, lse, dout, dlse, dq, dk, dv) -> None; none is
        kept."""
        scales = _in_base_2(scale), scale
        shape = terms_shape(module, q)
        terms = lse.new_empty(shape)
        more = workspaces(q, k, v, terms, window_left, window_right)
        tensors = (q, k, v, out, lse, dout, dlse, dq, dk, dv, terms, *more)
        steps = find(tensors, window_left, window_right, *([deterministic] if any_order else ()))

        def again(*tensors: Any) -> None:
            terms = tensors[4].new_empty(shape)
            more = workspaces(*tensors[:3], terms, window_left, window_right)
            for start in steps:
                start(*tensors, terms, *more, *scales)

        return on_device(again, q.get_device())

    launch.started = started  # type: ignore[attr-defined]
    return launch


def terms_shape(module: Any, q: Any) -> tuple[int, ...]:
    """Extents of the float32 terms of a generated backward pass: two numbers for each row of q, ``PIECES`` bf16 of them, or none."""
    if not hasattr(module, "PADDED"):
        return (0,)
    batch, heads, rows, _ = q.shape
    rows = -(-rows // module.PADDED.value) * module.PADDED.value
    pieces = _pieces(module)
    return (batch, heads, rows, pieces // 2) if pieces else (batch, heads, 2, rows)


def _pieces(module: Any) -> int:
    """bf16 numbers of a row's terms in a generated backward pass whose products add them; 0 where terms are float32."""
    return module.PIECES.value if hasattr(module, "PIECES") else 0


def _backward_steps(module: Any, tensors: tuple[Any, ...], *asked: Any) -> list[Any]:
    """The launches of a shape, each of the tensors and the two scales; ``asked`` as the module's ``plan`` takes them."""
    apart = told_apart(tensors)
    change = _of_fewer_columns(module, tensors)
    steps = []
    launches = zip(module.plan(*apart, *asked), module.OPTIONS, strict=False)
    for number, (one, options) in enumerate(launches):
        # A first launch of terms takes no scale, unless what it writes is in scores.
        scales = 0 if number == 0 and hasattr(module, "PADDED") and not _pieces(module) else 2
        steps.append(_step(one, apart, scales, options, 2, change))
    return steps


def _step(
    one: tuple[Any, ...],
    apart: list[Any],
    scales: int,
    options: dict[str, Any],
    given: int,
    change: Change | None = None,
) -> Start:
    """The launch ``one`` (kernel, grid, arguments) of the tensors ``apart`` and ``given`` numbers, the first ``scales`` of which
    follow the kernel's arguments; ``change`` of its PTX."""
    kernel, grid, arguments = one
    takes = takes_of(arguments, apart)
    takes.update({len(arguments) + i: len(apart) + i for i in range(scales)})
    arguments = (*arguments, *[1.0] * scales)
    return compiled_starter(kernel, options, grid, arguments, takes, len(apart) + given, change=change)


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
        scale_log2 = _in_base_2(scale)
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
            steps = keep(plans, key, _e4m3_steps(module, tensors, window_left, window_right))
        for start in steps:
            start(*tensors, scale_log2)
        if not steps:
            out.zero_()
            lse.fill_(float("-inf"))

    # The first of two launches reads V by plain loads.
    launch.any_v = hasattr(module, "PREPARE_WARPS")  # type: ignore[attr-defined]
    return launch


def _e4m3_steps(module: Any, tensors: tuple[Any, ...], window_left: int, window_right: int) -> list[Any]:
    """The launches of a shape, each of the tensors and the scale, of which the last is attention; empty for empty tensors."""
    apart = told_apart(tensors)
    *before, last = module.plan(*apart, window_left, window_right) or (None,)
    steps = [_step(one, apart, 0, {"num_warps": module.PREPARE_WARPS}, 1) for one in before]
    if last is not None:
        steps.append(_step(last, apart, 1, module.OPTIONS, 1))
    return steps
