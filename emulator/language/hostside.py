"""Loads and stores of global memory, and the launch itself: a grid of programs, one after the other."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilecast.emulator.errors import BoundsError, EmulationError, IntegerError, RequestError, UnsupportedError
from tilecast.emulator.far import Larger, Overflow
from tilecast.emulator.hardware.program import Program
from tilecast.emulator.language.arrays import Array, array_of
from tilecast.emulator.language.changes import ordered, put
from tilecast.emulator.language.from_triton import from_triton, is_tritons
from tilecast.emulator.language.growth import grown
from tilecast.emulator.language.residents import run_programs
from tilecast.emulator.session import Growth, Planned, Session
from tilecast.emulator.source import Source
from tilecast.emulator.values import dtypes
from tilecast.emulator.values.outside import is_tensor
from tilecast.emulator.values.owners import SEVERAL, warps_of
from tilecast.emulator.values.scalars import Float, Int, Int64, Several
from tilecast.emulator.values.tensors import Pointer, Tensor


def wanted(program: Program, pointer: Pointer, mask: Any, what: str) -> tuple[Any, Any]:
    """(offsets, which of them): broadcast and inside the tensor; BoundsError otherwise."""
    offsets = np.asarray(pointer.offset.a if isinstance(pointer.offset, Tensor) else int(pointer.offset))
    asked = np.asarray(True if mask is None else mask.a if isinstance(mask, Tensor) else mask)
    asked = np.broadcast_to(asked, offsets.shape)
    picked = offsets[asked]
    if picked.size and (picked.min() < 0 or picked.max() >= pointer.memory.flat.size):
        raise BoundsError(
            f"{program.here()}: a {what} outside {pointer.memory.name}: element {int(picked.max() if picked.max() >= pointer.memory.flat.size else picked.min())} "
            f"of {pointer.memory.flat.size}"
        )
    return offsets, asked


def _halves(program: Program, shape: Sequence[int]) -> list[tuple[int, Any]]:
    """Rows of each CTA of a cluster, as masks of ``shape``."""
    if program.ctas == 1 or not shape:
        return [(0, np.ones(shape, bool))]
    owner = np.arange(shape[0]) * program.ctas // shape[0]
    masks = [(owner == cta).reshape([-1] + [1] * (len(shape) - 1)) for cta in range(program.ctas)]
    return [(cta, np.broadcast_to(rows, shape)) for cta, rows in enumerate(masks)]


def _owners(program: Program, pointer: Pointer, offsets: Any, stores: bool) -> Any:
    """The warp of each element of a load or store; None where it does not matter, or is not known."""
    if program.warps() == 1 or program.ctas > 1:
        return None
    if isinstance(pointer.offset, Tensor):
        return warps_of(pointer.offset.layout, offsets.shape)
    # All threads load a scalar, the first one stores it.
    return np.full((), 0 if stores else SEVERAL, np.int8)


def store(session: Session, pointer: Pointer, value: Any, mask: Any = None) -> None:
    """gl.store: checks bounds and that no other unordered store goes to the same element."""
    program = running(session)
    offsets, asked = wanted(program, pointer, mask, "store")
    memory, line = pointer.memory, program.line()
    if session.watcher is not None:
        session.watcher.stored(memory.name, session.calls(), offsets[asked])
    needs = (value.made,) if isinstance(value, Tensor) else ()
    program.charge("global_store", int(asked.sum()) * memory.flat.itemsize, offsets.shape, operands=needs)
    values = np.broadcast_to(value.a if isinstance(value, Tensor) else value, offsets.shape)
    if isinstance(value, Tensor):
        # The compiler converts to the element type of the pointer.
        values = values if value.dtype is dtypes.of(memory.flat) else dtypes.cast(values, dtypes.of(memory.flat))
    else:
        values = values.astype(memory.flat.dtype)
    owners = _owners(program, pointer, offsets, stores=True)
    for cta, half in _halves(program, offsets.shape):
        mine = asked & half
        places, new = offsets[mine], values[mine]
        program.touch_global(memory, places, None if owners is None else owners[mine], stores=True)
        agent = program.role().agents[cta]
        put(program, memory, places, new, agent.code, agent.knowledge, line)


def load(session: Session, pointer: Pointer, mask: Any = None, other: Any = 0) -> Any:
    """gl.load: checks bounds and that stores of this program are ordered before."""
    program = running(session)
    offsets, asked = wanted(program, pointer, mask, "load")
    memory = pointer.memory
    needs = (pointer.offset.made,) if isinstance(pointer.offset, Tensor) else ()
    made = program.charge("global_load", int(asked.sum()) * memory.flat.itemsize, offsets.shape, operands=needs)
    owners = _owners(program, pointer, offsets, stores=False)
    for cta, half in _halves(program, offsets.shape):
        places = offsets[asked & half]
        program.touch_global(memory, places, None if owners is None else owners[asked & half], stores=False)
        known = program.role().agents[cta].knowledge
        ordered(program, memory, places, known, program.line(), "a load", np.ones(places.shape, bool))
    if session.watcher is not None and memory.flat.dtype.kind == "f" and memory.program.any():
        # Of memory that some are stored to: what was never stored, and is no number.
        places = offsets[asked]
        session.watcher.loaded(session.calls(), bool(np.isnan(memory.flat[places[memory.program[places] == 0]]).any()))
    out = np.empty(offsets.shape, memory.flat.dtype)
    out[...] = other.a if isinstance(other, Tensor) else 0 if other is None else other
    out[asked] = memory.flat[offsets[asked]]
    far = session.larger.loaded(memory.name) if session.larger is not None else None
    if not out.ndim and out.dtype.kind in "iu":
        return (Int64(int(out)) if out.dtype.itemsize == 8 else Int(int(out))).sampled(far)
    found = Tensor(session, out, pointer.offset.layout if isinstance(pointer.offset, Tensor) else None).sampled(far)
    found.made = made
    return found


def running(session: Session) -> Program:
    """The running program; UnsupportedError outside a kernel."""
    program = session.program
    if not isinstance(program, Program):
        raise UnsupportedError("a Gluon operation outside a kernel")
    return program


#: What a launch may say beside the kernel's parameters: options of the compiler for NVIDIA, of Triton 3.6 and 3.9 (CUDAOptions).
_OPTIONS = frozenset((
    "num_warps", "num_ctas", "num_stages", "warp_size", "maxnreg", "ptx_version", "ptx_options", "ir_override", "enable_fp_fusion",
    "sched4reg", "enable_reflect_ftz", "launch_cooperative_grid", "launch_pdl", "clc", "supported_fp8_dtypes",
    "deprecated_fp8_dot_operand_dtypes", "default_dot_input_precision", "allowed_dot_input_precisions",
    "max_num_imprecise_acc_default", "extern_libs", "debug", "backend_name", "sanitize_overflow", "arch", "instrumentation_mode",
    "fpsan_homomorphic_casts", "min_shared_mem",
))  # fmt: skip


#: Launches of a kernel that are followed to larger problems.
_FOLLOWED = 4


class Jitted:
    """A function of the kernel: called inside it, or launched on a grid."""

    def __init__(self, fn: Callable[..., Any], session: Session) -> None:
        self.fn, self.session, self.name = fn, session, fn.__name__
        self.__doc__ = fn.__doc__
        #: Parameters that are constants of the compiler.
        self.constants = {
            name for name, one in inspect.signature(fn).parameters.items() if "constexpr" in str(one.annotation)
        }
        #: Arguments that a launch need not give (triton.autotune).
        self.defaults: Mapping[str, Any] = {}
        #: Arguments that are worked out from the others (triton.heuristics).
        self.derived: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.session.program is None:
            raise RequestError(f"{self.name} is compiled for the GPU: launch it as {self.name}[grid](...)")
        return self.fn(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """A function in an aggregate is a method of its values."""
        return self if instance is None else functools.partial(self, instance)

    def warmup(self, *_args: Any, grid: tuple[Any, ...], **options: Any) -> Compiled:
        """The kernel with its options, to be launched on any grid."""
        return Compiled(self, options)

    def __getitem__(self, grid: Any) -> Callable[..., Compiled | None]:
        def launch(*args: Any, num_ctas: int = 1, enable_fp_fusion: bool = True, **options: Any) -> Compiled | None:
            options = {**self.defaults, **options}
            if num_ctas not in (1, 2, 4, 8, 16):
                raise RequestError(f"a cluster has 1, 2, 4, 8 or 16 CTAs, got {num_ctas}")
            bound = self._bound(args, {"num_ctas": num_ctas, "enable_fp_fusion": enable_fp_fusion, **options})
            session = self.session
            if session.planned is not None:
                numbers = {name: n for name, n in bound.items() if type(n) is int and name not in self.constants}
                session.planned.append(Planned(self.name, _extents(grid, bound), numbers))
                return None
            session.fusion = bool(enable_fp_fusion)
            session.launches += 1
            session.overlaps = bool(options.get("launch_pdl", False))
            flags = session.flags.items() if session.overlaps else ()
            session.told_before = {address: told for address, flag in flags if (told := flag.told_after()) is not None}
            session.flags.clear()
            session.apart.clear()
            session.made_layouts.clear()
            session.num_warps = int(options.get("num_warps", bound.get("num_warps", 4)))
            given = {name: _argument(session, value) for name, value in bound.items()}
            extents = _extents(grid, bound)
            far = (session.far_launches or {}).get(self.name) if session.follows_far else None
            if far is None and session.growth is not None:
                far = self._larger(session.growth, given, extents)
            if far is not None:
                far.indices = session.indices
            count = int(np.prod(extents))
            session.pending = pending_programs(session, count, num_ctas)

            def enter(number: int) -> None:
                # One program's expressions stand for all: the intervals are over all programs.
                session.larger = far if number == 0 else None

            def run(number: int) -> Any:
                arguments = given if session.larger is None else _followed(given, session.larger)
                return self._program(number, extents, num_ctas, arguments)

            session.traces += run_programs(session, count, count - len(session.pending), run, enter)
            session.larger = None
            return Compiled(self, options)

        return launch

    def _larger(self, growth: Growth, given: Mapping[str, Any], grid: tuple[int, ...]) -> Larger | None:
        """The larger problems of a launch, of a few that differ."""
        seen = self.session.grown.setdefault(self.name, set())
        numbers = tuple((name, int(value)) for name, value in given.items() if isinstance(value, int))
        if len(seen) >= _FOLLOWED or (numbers, grid) in seen:
            return None
        seen.add((numbers, grid))
        constants = {name: value for name, value in given.items() if name in self.constants}
        return grown(given, constants, grid, growth)

    def _bound(self, args: Sequence[Any], options: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments by name; keywords that the kernel does not take are options of the compiler."""
        signature = inspect.signature(self.fn)
        unknown = options.keys() - signature.parameters.keys() - _OPTIONS
        if unknown:
            raise RequestError(f"{self.name} has no parameter {sorted(unknown)[0]}, and Triton no such option")
        try:
            if self.derived:
                known = signature.bind_partial(*args, **{k: v for k, v in options.items() if k in signature.parameters})
                options = {**options, **{name: derive(known.arguments) for name, derive in self.derived.items()}}
            found = signature.bind(*args, **{k: v for k, v in options.items() if k in signature.parameters})
        except TypeError as error:
            raise RequestError(f"{self.name}: {error}") from None
        found.apply_defaults()
        for name, value in found.arguments.items():
            if isinstance(value, (list, dict)) and name not in self.constants:
                kind = type(value).__name__
                raise RequestError(f"{self.name}: {name}: expected a tensor, an array or a number, got a {kind}")
        return dict(found.arguments)

    def _program(self, number: int, grid: tuple[int, ...], ctas: int, given: Mapping[str, Any]) -> Any:
        session = self.session
        program = session.program = Program(session, number, grid, ctas)
        try:
            return program.run(lambda: self.fn(**given), self.name)
        except IntegerError as error:
            if error.over is not None:
                raise IntegerError(overflow_in_words(session.source, error.over)) from error
            if error.places:
                used = session.source.quote_of(error)
                raise IntegerError(
                    f"{session.source.quote_of_frames(error.places)}: {error}; {used} depends on it"
                ) from error
            # Scalars do not know where they are computed.
            known = str(error).startswith("line ") or " line " in str(error)
            raise error if known else IntegerError(f"{session.source.quote_of(error)}: {error}") from error
        except EmulationError:
            raise
        except (TypeError, AttributeError, IndexError, KeyError, ValueError) as error:
            # What Python refuses here is Gluon that the stand-ins do not take.
            raise UnsupportedError(f"{session.source.quote_of(error)}: {error}") from error
        finally:
            session.program = None


def pending_programs(session: Session, count: int, ctas: int) -> list[int]:
    """Programs of a launch that have not started when the first ones run: all but one to an SM; forgets what was cancelled."""
    session.cancelled.clear()
    return list(range(max(session.sms // ctas, 1), count))


def _followed(given: Mapping[str, Any], far: Larger) -> dict[str, Any]:
    """Arguments of a launch with what they are in larger ones."""
    return {
        name: value.near().sampled(far.argument(name)) if isinstance(value, Int) else value
        for name, value in given.items()
    }


def overflow_in_words(source: Source, found: Overflow) -> str:
    """The line, the expression, its interval and the problem."""
    where, part = source.quote_of_frames(found.places), found.name or source.part_of(found.places[0], found.columns)
    return (
        f"{where}: a 32-bit integer overflows in larger problems: {part or 'it'} is {found.low} to {found.high} with {found.problem}; "
        "convert to int64 before"
    )


def overflows(session: Session) -> list[str]:
    """What of the indices so far overflows in larger problems, each in words."""
    return [overflow_in_words(session.source, one) for one in session.indices.found.values()]


def _extents(grid: Any, arguments: Mapping[str, Any]) -> tuple[int, ...]:
    """One to three extents; a function is asked with the arguments."""
    found = grid(arguments) if callable(grid) else grid
    extents = tuple(int(n) for n in found) if isinstance(found, (tuple, list)) else (int(found),)
    if not 1 <= len(extents) <= 3:
        raise RequestError(f"a grid has one to three extents, got {extents}")
    return extents


class Config:
    """triton.Config: arguments, and options of the compiler."""

    def __init__(self, kwargs: Mapping[str, Any], **options: Any) -> None:
        self.arguments = {**kwargs, **{k: v for k, v in options.items() if k in ("num_warps", "num_ctas")}}


def first_config(configs: Sequence[Config], **_keys: Any) -> Callable[[Jitted], Jitted]:
    """triton.autotune: nothing is timed here, the first configuration stands for all."""

    def choose(kernel: Jitted) -> Jitted:
        # The kernel itself can still be launched with arguments of its own.
        tuned = copy.copy(kernel)
        tuned.defaults = configs[0].arguments
        return tuned

    return choose


def heuristics(values: Mapping[str, Callable[[Mapping[str, Any]], Any]]) -> Callable[[Jitted], Jitted]:
    """triton.heuristics: arguments worked out from the others at each launch."""

    def derive(kernel: Jitted) -> Jitted:
        made = copy.copy(kernel)
        made.derived = {**kernel.derived, **values}
        return made

    return derive


@dataclass(frozen=True)
class Compiled:
    """A kernel and the options that it was compiled with."""

    kernel: Jitted
    options: dict[str, Any]

    def __getitem__(self, grid: tuple[Any, ...]) -> Callable[..., Compiled | None]:
        return functools.partial(self.kernel[grid], **self.options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnsupportedError(f"{self.kernel.name}: nothing is compiled here, so that a kernel has no {name}")


def _argument(session: Session, value: Any) -> Any:
    if is_tritons(value):
        value = from_triton(session, value)
    if isinstance(value, Array) or is_tensor(value):
        return Pointer(array_of(session, value), Int(0))
    if type(value) is tuple:
        return Several(_argument(session, item) for item in value)
    if type(value) is int:
        return Int(value) if -(2**31) <= value < 2**31 else Int64(value)
    return Float(value) if type(value) is float else value
