"""Launches of GEMM kernels that cost little on the host: what a launch works out for a shape is kept."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tilecast.kernels.lasting import capturing, lasting_zeros
from tilecast.kernels.launching import keep
from tilecast.kernels.starting import Start, compiled_starter, on_device, sm_count

#: Numbers that programs count in, as generated files have it: one to a lane of a warp.
COUNTERS = 32
#: How a launch runs: the one after it may begin before it ends, it may begin before the one before has ended.
LEADS, FOLLOWS = 1, 2
#: device index -> what programs of every launch there count in that wait for each other.
_met: dict[int, Any] = {}


def meeting_counters(device: Any) -> Any:
    """int32 of a device, for ``met`` of kernels whose programs wait for each other; all launches there share them.

    A launch adds to them and takes back what it has added, so that they are zero where none runs.  Launches that overlap see each
    other's counts too and then wait less, which costs them time and never a result.
    """
    if device.type != "cuda":
        return torch.zeros(COUNTERS, dtype=torch.int32, device=device)
    found = _met.get(device.index)
    if found is None:
        if capturing():
            # The graph's own, which it zeroes on every replay.
            return torch.zeros(COUNTERS, dtype=torch.int32, device=device)
        found = _met[device.index] = lasting_zeros(COUNTERS, torch.int32, device)
    return found


@functools.cache
def _overlaps(device: Any) -> bool:
    """Whether launches on a device can begin before the one before has ended: on Hopper and newer."""
    return device.type == "cuda" and bool(torch.cuda.get_device_capability(device)[0] >= 9)


def _crowds(programs: int, device: Any) -> bool:
    """Whether so many small programs that begin early crowd on the SMs that are free first, and others stay without: more than two for each, and
    fewer than all SMs hold."""
    sms = sm_count(device)
    return bool(2 * sms < programs < 12 * sms)


def _nothing(device: Any) -> tuple[Any, ...]:
    del device
    return ()


def _counters(device: Any) -> tuple[Any, ...]:
    return (meeting_counters(device),)


def gemm_launcher(module: Any) -> Callable[..., None]:
    """``launch`` of a generated GEMM file, which remembers what it works out for a shape.

    The result has the signature, the shapes and the refusals of the file's ``launch``: launch(a, b, c, d, alpha, beta), and with ``follows``
    begins before the launch before has ended, where that leaves A or B and can lead.  It keeps a bounded number of shapes and no tensor.
    """
    plans: dict[Any, Any] = {}
    more = _counters if hasattr(module, "IN_STEP") else _nothing

    def find(a: Any, b: Any, c: Any, d: Any, alpha: float, beta: float, follows: bool = False) -> Any:
        """The launch of a shape (`_plan`), made where it is not known."""
        adds = c is not None and beta != 0
        tensors = (a, b, c if adds else d, d)
        # All that compiled code, its arguments and the checks depend on, but addresses and the factors' values.
        key = (
            a.device, adds, alpha != 1 or beta not in (0, 1), follows,
            *[(t.dtype, t.shape, t.stride(), t.data_ptr() & 15) for t in tensors],
        )  # fmt: skip
        start = plans.get(key)
        if start is None:
            beside = FOLLOWS if follows and _overlaps(a.device) else 0
            start = keep(plans, key, _plan(module, a, b, c, d, alpha, beta, more(a.device), beside))
        return start

    def launch(a: Any, b: Any, c: Any, d: Any, alpha: float = 1.0, beta: float = 1.0, follows: bool = False) -> None:
        start = find(a, b, c, d, alpha, beta, follows)
        if start:
            start(a, b, d if c is None or beta == 0 else c, d, float(alpha), float(beta), *more(a.device))

    def started(a: Any, b: Any, c: Any, d: Any, alpha: float, beta: float) -> Start:
        """The launch of tensors like these, of which D is not empty, as (a, b, c or None, d) -> None; it keeps none."""
        start, alpha, beta = find(a, b, c, d, alpha, beta), float(alpha), float(beta)

        def again(a: Any, b: Any, c: Any, d: Any) -> None:
            start(a, b, d if c is None else c, d, alpha, beta, *more(a.device))

        return on_device(again, a.get_device())

    launch.started = started  # type: ignore[attr-defined]
    return launch


def parted_launcher(module: Any) -> Callable[..., None]:
    """``launch`` of a generated file that can part k: launch(a, b, c, d, alpha, beta, parts), which remembers what it works out for a shape
    and keeps no tensor; ``follows`` as of `gemm_launcher`.  Every launch has sums of its own, so that any may overlap.
    """
    plans: dict[Any, Any] = {}

    def launch(a: Any, b: Any, c: Any, d: Any, alpha: float, beta: float, parts: int, follows: bool = False) -> None:
        adds = c is not None and beta != 0
        c, alpha, beta = c if adds else d, float(alpha), float(beta)
        key = (
            a.device, adds, alpha != 1 or beta not in (0, 1), parts, follows,
            *[(t.dtype, t.shape, t.stride(), t.data_ptr() & 15) for t in (a, b, c, d)],
        )  # fmt: skip
        sums = d.new_empty(module.sums_shape(*d.shape, parts), dtype=torch.float32)
        starts = plans.get(key)
        if starts is None:
            overlaps, programs = _overlaps(a.device), d.shape[0] * -(-d.shape[1] // module.MERGED.value)
            early = overlaps and not _crowds(programs, a.device)
            grid, arguments = module.merge_plan(sums, c if adds else None, d, alpha, beta, early)
            # Behind them: most parts, whether C is added, whether anything is scaled, whether sums are waited for.
            factors = len(arguments) - 6
            takes = {0: 0, 1: 1, 2: 2, factors: 3, factors + 1: 4}
            beside = LEADS * early + FOLLOWS * (follows and overlaps)
            product = _plan(module, a, b, None, sums, 1.0, 0.0, (), beside)
            merging = compiled_starter(module.merge, {"num_warps": 4}, grid, arguments, takes, 5, early)
            starts = keep(plans, key, (product, merging))
        product, merging = starts
        product(a, b, sums, sums, 1.0, 0.0)
        merging(sums, c, d, alpha, beta)

    return launch


def copier(module: Any) -> Callable[..., None]:
    """``launch`` of the generated file that copies, copy(x, to, other, other_to), which remembers what it works out for shapes and keeps no
    tensor."""
    plans: dict[Any, Any] = {}

    def copy(x: Any, to: Any, other: Any = None, other_to: Any = None) -> None:
        tensors = (x, to, x, to) if other is None else (x, to, other, other_to)
        key = (x.device, other is None, *[(t.dtype, t.shape, t.stride(), t.data_ptr() & 15) for t in tensors])
        start = plans.get(key)
        if start is None:
            grid, arguments = module.plan(x, to, other, other_to, _overlaps(x.device))
            # The other matrix begins where the first one's numbers end.
            second = next(i for i, argument in enumerate(arguments) if i > 1 and isinstance(argument, torch.Tensor))
            takes = {0: 0, 1: 1, second: 2, second + 1: 3}
            start = keep(plans, key, compiled_starter(module.copy, module.OPTIONS, grid, arguments, takes, 4))
        start(*tensors)

    return copy


def _plan(
    module: Any, a: Any, b: Any, c: Any, d: Any, alpha: float, beta: float, more: tuple[Any, ...], beside: int = 0
) -> Any:
    """The launch of a shape, of (a, b, c or d, d, alpha, beta, *more); False for an empty D.  beside: `LEADS` plus `FOLLOWS`."""
    planned = module.plan(a, b, c, d, alpha, beta, *more, **({"beside": beside} if beside else {}))
    if not planned:
        return False
    grid, arguments = planned
    # Of the arguments only the factors are no whole numbers.
    factor, other = (i for i, argument in enumerate(arguments) if isinstance(argument, float))
    takes = {0: 0, 1: 1, 2: 2, 3: 3, factor: 4, other: 5}
    takes.update({4 + i: 6 + i for i in range(len(more))})
    if hasattr(arguments[4], "base"):
        takes[4] = 1  # columns of B beyond those of a tile's first product
    follows = bool(beside & FOLLOWS)
    return compiled_starter(module.multiply, module.OPTIONS, grid, arguments, takes, 6 + len(more), follows)
