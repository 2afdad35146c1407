"""Launches as they stand in host code: one of them, or all inside a ``with`` statement, on the CPU."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tilecast.emulator.any_kernel import emulated
from tilecast.emulator.errors import RequestError
from tilecast.emulator.language.hostside import overflows
from tilecast.emulator.suites.launches import MODES, SuiteLaunches
from tilecast.model.machine.machine import Machine


def emulate(
    launch: Any, *args: Any, machine: str | Machine | None = None, mode: str = "late", seed: int = 0, sms: int | None = None,
    triton: str = "", largest: Mapping[str, int] | None = None, **meta: Any,
) -> Any:  # fmt: skip
    """Do ``launch(*args, **meta)`` on the CPU: ``kernel[grid]``, or a function at the top of a file that launches kernels.

        tilecast.emulate(kernel[grid], a, b, out, BLOCK=64, machine="h200")

    The options are those of `emulated`, which is the way for a kernel that has a parameter of the same name.  Arrays are changed in
    place; raises RequestError where ``launch`` is neither, a subclass of EmulationError where the kernel is wrong.
    """
    kernel, grid = _launch_of(launch)
    found = emulated(kernel, machine=machine, mode=mode, seed=seed, sms=sms, triton=triton, largest=largest)
    return (found if grid is None else found[grid])(*args, **meta)


def _launch_of(launch: Any) -> tuple[Any, Any]:
    """(kernel, grid) of ``kernel[grid]``, as Triton makes it; (function, None) of a function."""
    if isinstance(launch, functools.partial):
        return getattr(launch.func, "__self__", launch.func), launch.keywords.get("grid")
    held = inspect.getclosurevars(launch).nonlocals if inspect.isfunction(launch) else {}
    if {"self", "grid"} <= held.keys():
        return held["self"], held["grid"]
    return launch, None


@dataclass(slots=True)
class Emulated:
    """What ran inside a ``with`` statement."""

    #: Where it ran, and how many launches and programs that were; counted at the end.
    machine: str
    launches: int = 0
    programs: int = 0
    #: 32-bit integers that overflow in larger problems, each in words.
    overflows: list[str] = field(default_factory=list)


@contextlib.contextmanager
def emulation(
    machine: str = "b200", *, mode: str = "late", seed: int = 0, sms: int | None = None, triton: str = "",
    largest: Mapping[str, int] | None = None,
) -> Iterator[Emulated]:  # fmt: skip
    """While it lasts, launches run on the CPU: of kernels in files that are imported inside, and of those imported before.

        with tilecast.emulation("h200"):
            import my_kernels
            my_kernels.scale[grid](x, out, BLOCK=64)

    Inside, imports of Triton get stand-ins (it need not be installed), ``device="cuda"`` is the CPU; outside nothing is changed.
    The options are those of `emulated`.
    """
    if mode not in MODES:
        raise RequestError(f"mode: expected {' or '.join(MODES)}, got '{mode}'")
    suite = SuiteLaunches(machine, sms, triton, largest)
    suite.begin(mode, seed)
    found = Emulated(suite.title)
    options = {"machine": machine, "mode": mode, "seed": seed, "sms": sms, "triton": triton, "largest": largest}
    try:
        with _launches_of_real_triton(options, found), suite.rerouted():
            yield found
    finally:
        suite.end()
        found.launches += suite.launches
        found.programs += suite.programs
        found.overflows += overflows(suite.session)


@contextlib.contextmanager
def _launches_of_real_triton(options: dict[str, Any], counted: Emulated) -> Iterator[None]:
    """Where Triton itself was imported before, kernels that it has decorated are emulated when they are launched.

    What it has for grids and layouts in host code, as `triton.cdiv`, is called as the plain function that it is: Triton would
    import the compiler's own names for that, which have stand-ins meanwhile.
    """
    real = sys.modules.get("triton.runtime.jit")
    interface = getattr(real, "KernelInterface", None)
    if interface is None:
        yield
        return
    on_host = getattr(real, "ConstexprFunction", None)
    known: dict[int, Any] = {}

    def on_cpu(kernel: Any, grid: Any) -> Callable[..., Any]:
        if id(kernel) not in known:
            known[id(kernel)] = emulated(kernel, **options)
        made = known[id(kernel)]

        def launch(*args: Any, **meta: Any) -> Any:
            traces = made.session.traces
            first = len(traces)
            try:
                return made[grid](*args, **meta)
            finally:
                counted.launches += 1
                counted.programs += len(traces) - first
                counted.overflows += [one for one in overflows(made.session) if one not in counted.overflows]

        return launch

    def plain(function: Any, *args: Any, **named: Any) -> Any:
        return function.fn(*args, **named)

    changed: dict[Any, dict[str, Any]] = {interface: {"__getitem__": on_cpu}}
    if on_host is not None:
        changed[on_host] = {"__call__": plain}
    before = {cls: {name: getattr(cls, name) for name in names} for cls, names in changed.items()}
    try:
        _set(changed)
        yield
    finally:
        _set(before)


def _set(methods: dict[Any, dict[str, Any]]) -> None:
    for cls, named in methods.items():
        for name, method in named.items():
            setattr(cls, name, method)
