"""How plans start compiled kernels: what stays from call to call is put in its place once, and a call brings tensors and numbers.

Where a C compiler is at hand launches are `native`'s, otherwise Triton's own: the same parameters, the same errors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tilecast.kernels.assembling import Change, assembled_again
from tilecast.kernels.native.prepare import prepared

Start = Callable[..., None]


def told_apart(tensors: Sequence[Any]) -> list[Any]:
    """The tensors, and another view of one that comes again: of every argument made from them one can tell which it is of."""
    return [t[...] if t is not None and any(t is other for other in tensors[:i]) else t for i, t in enumerate(tensors)]


def takes_of(arguments: Sequence[Any], tensors: Sequence[Any]) -> dict[int, int]:
    """place of an argument -> which of ``tensors`` (`told_apart`) it is, or is a descriptor of."""
    place = {id(tensor): i for i, tensor in enumerate(tensors) if tensor is not None}
    found = {}
    for at, argument in enumerate(arguments):
        base = getattr(argument, "base", None)
        for tensor in (argument, base):
            if tensor is not None and id(tensor) in place:
                found[at] = place[id(tensor)]
                break
    return found


def starter(
    kernel: Any, grid: tuple[int, ...], arguments: Sequence[Any], takes: Mapping[int, int], given: int
) -> Start:
    """The launch of a kernel, called with ``given`` values; it keeps no tensor.

    kernel: compiled, or an interpreter's; arguments: all that it takes; ``takes``: place of an argument -> which value of a
    call stands there instead, a tensor where the argument is one or a descriptor of one.
    """
    slow = _by_triton(kernel[grid], arguments, takes)
    return prepared(kernel, grid, arguments, takes, given, slow) or slow  # type: ignore[arg-type]


def compiled_starter(
    kernel: Any, options: Mapping[str, Any], grid: tuple[int, ...], arguments: Sequence[Any], takes: Mapping[int, int], given: int,
    follows: bool = False, change: Change | None = None,
) -> Start:  # fmt: skip
    """`starter` of a kernel that is compiled for its arguments first; where it ``follows`` it may begin before the launch before has ended.
    ``change``: of its PTX."""
    if follows:
        options = {**options, "launch_pdl": True}
    compiled = kernel.warmup(*arguments, grid=grid, **options)
    if compiled is None:  # an interpreter compiles nothing
        return starter(kernel, grid, arguments, takes, given)
    if change is not None:
        compiled = assembled_again(compiled, change, functools.partial(kernel.warmup, *arguments, grid=grid, **options))
    return starter(compiled, grid, arguments, takes, given)


def _by_triton(run: Any, arguments: Sequence[Any], takes: Mapping[int, int]) -> Start:
    kept = [None if at in takes else argument for at, argument in enumerate(arguments)]
    described = [
        (at, index, without_tensor(arguments[at]) if hasattr(arguments[at], "base") else None)
        for at, index in takes.items()
    ]

    def start(*given: Any) -> None:
        full = kept.copy()
        for at, index, descriptor in described:
            full[at] = given[index] if descriptor is None else on_tensor(descriptor, given[index])
        run(*full)

    return start


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


def sm_count(device: Any, otherwise: int = 1) -> int:
    """SMs of a device; ``otherwise`` of one that has none."""
    cuda = device.type == "cuda"
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if cuda else otherwise


def on_device(launch: Callable[..., Any], device: int) -> Callable[..., Any]:
    """Triton launches on the current device; on a machine with several, make that the tensors' own."""
    if device < 0 or torch.cuda.device_count() < 2:
        return launch

    @functools.wraps(launch)
    def launch_there(*arguments: Any) -> Any:
        if torch.cuda.current_device() == device:
            return launch(*arguments)
        with torch.cuda.device(device):
            return launch(*arguments)

    return launch_there
