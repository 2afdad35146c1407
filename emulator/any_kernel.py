"""Any author's Gluon kernels on a CPU: a file's functions and kernels, with launches that run here."""

from __future__ import annotations

import inspect
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tilecast.emulator.decorated import replaced
from tilecast.emulator.errors import RequestError
from tilecast.emulator.modules import modules
from tilecast.emulator.session import ANY_RELEASE, RELEASES, Growth, Session
from tilecast.emulator.source import Source
from tilecast.model.machine.machine import Machine, load_machine

MODES = ("late", "random")


def emulated(
    target: Any, *, machine: str | Machine | None = None, mode: str = "late", seed: int = 0, sms: int | None = None,
    triton: str = "", largest: Mapping[str, int] | None = None,
) -> Any:  # fmt: skip
    """``target`` with launches that run on the CPU: a kernel, a function that launches some, a module, or a file's path.

        tilecast.emulated(kernel, machine="h200")[grid](a, b, out, BLOCK=64)

    The file is executed again with stand-ins for Triton, and what ``target`` names there is returned (of a module or a
    path: the module).  Launches take numpy arrays and torch tensors on the CPU and change them in place.
    ``machine``: whose memories and tensor cores (default: b200 where the file imports Gluon's Blackwell names, else h200);
    ``mode``: "late" or "random" (with ``seed``); ``sms``: how many SMs the file is told that there are; ``triton``: "3.6" or "3.9", to rely on the fences that this compiler
    adds within a partition (default: a fence that is not in the source is missing); ``largest``: how large numbers that the kernel
    is given may become, by its names for them: a 32-bit integer that overflows before is an error.
    Raises RequestError for a target without a file; launches raise a subclass of EmulationError that quotes the lines.
    """
    path, name = _place(target)
    found: Any = load_any(path, machine=machine, mode=mode, seed=seed, sms=sms, triton=triton, largest=largest)[1]
    for part in name.split(".") if name else ():
        found = getattr(found, part)
    return found


def load_any(
    path: str, *, machine: str | Machine | None = None, mode: str = "late", seed: int = 0, sms: int | None = None,
    name: str = "emulated_kernel", triton: str = "", largest: Mapping[str, int] | None = None,
) -> tuple[Session, types.ModuleType]:  # fmt: skip
    """A file as a module that sees stand-ins for Triton, and the state of its launches; ``name``: its ``__name__``."""
    if mode not in MODES:
        raise RequestError(f"mode: expected {' or '.join(MODES)}, got '{mode}'")
    if triton not in ("", *RELEASES):
        raise RequestError(f"triton: expected {' or '.join(RELEASES)}, got '{triton}'")
    source = Source(path)
    chip = chip_for(source, machine)
    session = Session(
        source, mode, seed, sms or int(chip["chip.sm_count"]), int(chip["smem.per_cta_bytes"]),
        int(chip.get("tmem.columns", 0.0)), ANY_RELEASE, chip.get("tmem.load_reduce", 0.0) > 0,
        tensor_kind=chip.tensor_kind, adds_fences=triton, growth=Growth(1e9 * chip["hbm.capacity_gb"], largest or {}),
    )  # fmt: skip
    return session, source.load(modules(session), replaced(session), name)


def chip_for(source: Source, machine: str | Machine | None) -> Machine:
    """The machine asked for; by default b200 where the file imports Gluon's Blackwell names, else h200."""
    default = "b200" if "nvidia.blackwell import" in source.text else "h200"
    chip = machine if isinstance(machine, Machine) else load_machine(machine or default)
    if chip.tensor_kind not in ("wgmma", "tcgen05"):
        raise RequestError(
            f"{chip.name}: the emulator has Hopper's and Blackwell's tensor cores, not {chip.tensor_kind}"
        )
    return chip


def _place(target: Any) -> tuple[str, str]:
    """(file, name in it) of what is to be emulated; the name of a whole file is empty."""
    if isinstance(target, (str, Path)):
        return str(target), ""
    if isinstance(target, types.ModuleType):
        if not getattr(target, "__file__", None):
            raise RequestError(f"{target.__name__}: expected a module that has a file")
        return str(target.__file__), ""
    # A jitted function keeps the Python one; an autotuner keeps the jitted one.
    function = target
    while not inspect.isfunction(function) and hasattr(function, "fn"):
        function = function.fn
    if not inspect.isfunction(function):
        raise RequestError(f"expected a Gluon kernel, a function, a module or a file, got {target!r}")
    path, name = function.__code__.co_filename, function.__qualname__
    if "<locals>" in name or not Path(path).is_file():
        raise RequestError(f"{name}: expected a function at the top of a file: the emulator executes its file again")
    return path, name
