"""Launches of whole test suites: while it lasts, imports of Triton get stand-ins and a GPU asked of torch is the CPU."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tilecast.emulator.cuda_on_cpu import cuda_on_cpu
from tilecast.emulator.decorated import counted
from tilecast.emulator.errors import RequestError, UnsupportedError
from tilecast.emulator.language.hostside import Jitted
from tilecast.emulator.modules import Module, Placeholder, Questions, modules
from tilecast.emulator.session import ANY_RELEASE, RELEASES, Growth, Session
from tilecast.emulator.source import Source
from tilecast.model.machine.machine import load_machine

MODES = ("late", "random")


def read_mode(text: str) -> tuple[str, int]:
    """(mode, seed) of "late", "random" or "random:SEED"; RequestError otherwise."""
    name, _, seed = text.strip().partition(":")
    if name not in MODES or (seed and (name == "late" or not seed.isdigit())):
        raise RequestError(f"modes: expected late, random or random:SEED, got '{text.strip()}'")
    return name, int(seed or 0)


class Unknown:
    """A name of Triton that the emulator does not have: importing it is no mistake, using it is."""

    def __instancecheck__(self, _value: Any) -> bool:
        """Nothing is of a class that is not known."""
        return False

    def __or__(self, other: Any) -> Any:
        """In an annotation: this, or another class."""
        return self

    __ror__ = __or__

    def __init__(self, session: Session, name: str) -> None:
        self._session, self._name = session, name

    def __getattr__(self, name: str) -> Unknown:
        if name.startswith("__"):
            raise AttributeError(name)
        return Unknown(self._session, f"{self._name}.{name}")

    def __call__(self, *_args: Any, **_options: Any) -> Any:
        raise UnsupportedError(
            f"{self._session.here()}: the emulator does not know {self._name}: docs/emulator.md lists what it knows"
        )


class _Lenient(types.ModuleType):
    """A stand-in whose missing names are Unknown."""

    def __init__(self, session: Session, name: str, known: dict[str, Any]) -> None:
        super().__init__(name)
        self.__dict__.update({key: value for key, value in known.items() if not key.startswith("__")})
        self.__dict__["_session"] = session
        # Whatever else of Triton is imported below it goes through the finder.
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Unknown(self.__dict__["_session"], f"{self.__name__}.{name}")


#: Modules of Triton that compute on the host only: the installed ones run as they are.
_ON_THE_HOST = ("triton.tools.mxfp",)


def _installed(name: str) -> str:
    """File of a module of the Triton that is installed, found without importing it; empty without one."""
    package, *rest = name.split(".")
    spec = importlib.machinery.PathFinder.find_spec(package)
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    files = [Path(place, *rest).with_suffix(".py") for place in places]
    return next((str(file) for file in files if file.is_file()), "")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules of Triton that have no stand-in: those of the host, where Triton is installed; otherwise empty ones."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Every module of the package triton, and no other."""
        if not fullname.startswith("triton."):
            return None
        file = _installed(fullname) if fullname in _ON_THE_HOST else ""
        if file:
            return importlib.util.spec_from_file_location(fullname, file)
        return importlib.machinery.ModuleSpec(fullname, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Without names."""
        return _Lenient(self.session, spec.name, {})

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to execute."""


class SuiteLaunches:
    """The one emulation that all launches of a suite go through; each test starts it afresh.

    Kernels may stand anywhere, also inside functions: they are the suite's own functions, decorated by a stand-in.
    """

    def __init__(
        self, machine: str, sms: int | None = None, triton: str = RELEASES[-1], largest: Mapping[str, int] | None = None
    ) -> None:
        chip = load_machine(machine)
        if chip.tensor_kind not in ("wgmma", "tcgen05"):
            raise RequestError(
                f"{chip.name}: the emulator has Hopper's and Blackwell's tensor cores, not {chip.tensor_kind}"
            )
        self.title = chip.title
        self.capability = (9, 0) if chip.tensor_kind == "wgmma" else (10, 0)
        self.source = Source("the suite", "")
        self.session = Session(
            self.source, "late", 0, sms or int(chip["chip.sm_count"]), int(chip["smem.per_cta_bytes"]),
            int(chip.get("tmem.columns", 0.0)), ANY_RELEASE, chip.get("tmem.load_reduce", 0.0) > 0,
            tensor_kind=chip.tensor_kind, adds_fences=triton, growth=Growth(1e9 * chip["hbm.capacity_gb"], largest or {}),
        )  # fmt: skip
        self._files: set[str] = set()
        #: Over all tests.
        self.launches, self.programs = 0, 0

    def begin(self, mode: str, seed: int) -> None:
        """A test starts: nothing of an earlier one is known, and launches take effect by ``mode`` and ``seed``."""
        session = self.session
        session.mode, session.seed, session.program, session.unrolled = mode, seed, None, []
        for kept in (session.arrays, session.names, session.traces):
            kept.clear()
        session.launches = 0

    def end(self) -> None:
        """A test is over: count what it launched."""
        self.launches += self.session.launches
        self.programs += len(self.session.traces)
        self.session.launches = 0
        self.session.traces.clear()

    def _jit(self, function: Any = None, **_options: Any) -> Any:
        """gluon.jit: the function's file joins those that are quoted, and its ranges count in 32 bits."""
        if function is None:
            return self._jit
        path = function.__code__.co_filename
        if path not in self._files:
            self._files.add(path)
            with contextlib.suppress(RequestError):  # no file: a kernel typed into an interpreter has no lines to quote
                self.source.add(path)
        function.__globals__.setdefault("range", counted(self.session))
        return Jitted(function, self.session)

    def _stand_ins(self) -> dict[str, types.ModuleType]:
        found: dict[str, types.ModuleType] = {}
        for name, module in modules(self.session).items():
            lenient = isinstance(module, Module) and not isinstance(module, Questions)
            found[name] = _Lenient(self.session, name, vars(module)) if lenient else module
        found["triton.language"] = _Lenient(
            self.session, "triton.language", vars(found["triton.experimental.gluon.language"])
        )
        found["triton"].__dict__["__version__"] = f"{RELEASES[-1]}.0"
        # What files build at import for benchmarks that no test runs.
        told = {"Benchmark": Placeholder(), "perf_report": Placeholder()}
        found["triton.testing"] = _Lenient(self.session, "triton.testing", told)
        for name in ("triton", "triton.experimental.gluon"):
            found[name].__dict__["jit"] = self._jit
        for name, module in found.items():
            parent, _, last = name.rpartition(".")
            if parent in found:
                setattr(found[parent], last, module)
        return found

    @contextlib.contextmanager
    def rerouted(self) -> Iterator[None]:
        """While it lasts, every import of Triton gets the stand-ins; modules imported before keep the real one."""
        before = {name: sys.modules.pop(name) for name in _of_triton(list(sys.modules))}
        finder = _Finder(self.session)
        # torch looks for Triton while it is imported, and must not find the stand-ins half built.
        with cuda_on_cpu(self.capability, self.session.sms):
            for name in _of_triton(list(sys.modules)):
                before.setdefault(name, sys.modules.pop(name))
            sys.modules.update(self._stand_ins())
            sys.meta_path.insert(0, finder)
            try:
                yield
            finally:
                sys.meta_path.remove(finder)
                for name in _of_triton(list(sys.modules)):
                    del sys.modules[name]
                sys.modules.update(before)


def _of_triton(names: Sequence[str]) -> list[str]:
    return [name for name in names if name == "triton" or name.startswith("triton.")]
