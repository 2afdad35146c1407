"""The inline PTX of our templates, run on numpy arrays: a 32-bit register is an array over threads, a 64-bit one two rows of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from tilecast.emulator.errors import UnsupportedError
from tilecast.emulator.values.dtypes import FP8E4, FP8E5, cast


class UnknownError(UnsupportedError):
    """PTX that is not known, or reads what nothing has written."""


#: Twice the bits of the smallest normal float32, without its sign.
_SMALLEST = 1 << 24


def _floats(bits: Any) -> Any:
    return bits.view(np.float32)


def _bits(floats: Any) -> Any:
    return np.asarray(floats, np.float32).view(np.uint32)


def _flush(x: Any) -> Any:
    """Subnormals become zero of the same sign (.ftz)."""
    magnitude = x.view(np.uint32) << 1
    # Zeros wrap around: they are what they should be.
    if np.minimum.reduce(magnitude - 1, axis=None, initial=_SMALLEST) >= _SMALLEST - 1:
        return x
    return np.where(magnitude < _SMALLEST, np.copysign(np.float32(0), x), x)


def _down(exact: Any) -> Any:
    near = exact.astype(np.float32)
    return np.where(near > exact, np.nextafter(near, np.float32(-np.inf)), near).astype(np.float32)


class Arithmetic:
    """add, sub, mul or fma of float32, exact in float64 and rounded once (.rn, .rm), flushed with .ftz."""

    _STEPS: ClassVar = {"fma": (np.multiply, np.add), "mul": (np.multiply,), "add": (np.add,), "sub": (np.subtract,)}

    def __init__(self, name: str, normal: tuple[bool, ...] = ()) -> None:
        parts = name.split(".")
        self._name, self._steps, self._down = name, self._STEPS[parts[0]], "rm" in parts
        #: Whether neither operands nor results are subnormal.
        self.flushes = "ftz" in parts
        #: Of each operand, whether it has to be flushed.
        self._flushed = [self.flushes and not (normal and normal[place]) for place in range(len(self._steps) + 1)]

    def of_normal(self, normal: tuple[bool, ...]) -> Arithmetic:
        """The same where some operands are known not to be subnormal."""
        return _arithmetic(self._name, normal) if self.flushes and any(normal) else self

    def __call__(self, *registers: Any) -> Any:
        values = [
            _flush(_floats(r)) if flushed else _floats(r) for r, flushed in zip(registers, self._flushed, strict=True)
        ]
        if len(self._steps) == 1 and not self._down:
            # One operation in float64, rounded, is the same in float32: twice the digits and two more.
            out = self._steps[0](*values)
        else:
            exact = values[0].astype(np.float64)
            for compute, value in zip(self._steps, values[1:], strict=True):
                exact = compute(exact, value)
            out = _down(exact) if self._down else exact.astype(np.float32)
        return _bits(_flush(out) if self.flushes else out)


#: Equal instructions are one object: `ptx_elementwise` looks for those that do the same.
_arithmetic = lru_cache(maxsize=256)(Arithmetic)


def is_normal(bits: int) -> bool:
    """Whether a float32 is not subnormal."""
    return not 0 < bits << 1 & 0xFFFFFFFF < _SMALLEST


@lru_cache(maxsize=64)
def _maximum(name: str) -> Callable[..., Any]:
    pick: Callable[..., Any] = np.maximum if ".NaN" in name else np.fmax
    if name.startswith("min"):
        pick = np.minimum if ".NaN" in name else np.fmin

    def run(first: Any, *more: Any) -> Any:
        out = _floats(first)
        for register in more:
            out = pick(out, _floats(register))
        return _bits(out)

    return run


def _exp2(register: Any) -> Any:
    return _bits(_flush(np.exp2(_flush(_floats(register)))))


def _tanh(register: Any) -> Any:
    """tanh.approx: cut to 11 bits after the first, which is as far off as PTX allows (a relative error of 2^-11)."""
    return _bits(np.tanh(_floats(register))) & np.uint32(0xFFFFF000)


def _above(a: Any, b: Any, *or_else: Any) -> Any:
    """setp.gt, or what a predicate says already; NaN is above nothing."""
    out = _floats(a) > _floats(b)
    for predicate in or_else:
        out = out | (predicate != 0)
    return out.astype(np.uint32)


def _above_and(a: Any, b: Any, predicate: Any) -> Any:
    """setp.gt, where a predicate holds as well."""
    return _above(a, b) & (predicate != 0)


@lru_cache(maxsize=64)
def _eight_bits(name: str) -> Callable[..., Any]:
    """cvt of two float32 to e4m3 or e5m2, the second of them in the low byte (.satfinite, .rn)."""
    kind = FP8E4 if ".e4m3x2." in name else FP8E5

    def run(high: Any, low: Any) -> Any:
        upper, lower = (cast(_floats(x), kind).view(np.uint8).astype(np.uint32) for x in (high, low))
        return upper << 8 | lower

    return run


def _any(predicate: Any, _: Any) -> Any:
    """vote.any.  A partition votes as one here, warps apart on the GPU: kernels may not depend on more than the OR."""
    return np.full_like(predicate, (predicate != 0).any())


def _halves(low: Any, high: Any) -> Any:
    return low & 0xFFFF | high << 16


#: Integer operations of one 32-bit result.
_PLAIN: dict[str, Callable[..., Any]] = {
    "shl.b32": lambda a, n: a << n,
    "shr.u32": lambda a, n: a >> n,
    "add.s32": lambda a, b: a + b,
    "add.u32": lambda a, b: a + b,
    "sub.s32": lambda a, b: a - b,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "setp.gt.f32": _above,
    "setp.gt.or.f32": _above,
    "setp.gt.and.f32": _above_and,
    "selp.b32": lambda a, b, predicate: np.where(predicate != 0, a, b),
    "vote.sync.any.pred": _any,
}
_FLOAT = re.compile(r"(fma|mul|add|sub)(\.(rn|rm))?(\.ftz)?\.f32(x2)?$")
_EXTREME = re.compile(r"(max|min)(\.NaN)?(\.ftz)?(\.NaN)?\.f32$")
_EIGHT_BITS = re.compile(r"cvt\.rn\.satfinite\.e(4m3|5m2)x2\.f32$")
#: Registers that hold a program's number: each program has an SM of its own.
_SPECIAL = ("%ctaid.x", "%clusterid.x", "%smid")


@dataclass(frozen=True)
class Statement:
    """One instruction: ``run`` maps source registers to the destination; packed ones work on register pairs."""

    text: str
    run: Callable[..., Any] | None
    packed: bool
    targets: tuple[str, ...]
    sources: tuple[tuple[str, ...], ...]
    pipe: str

    @property
    def by_itself(self) -> bool:
        """Whether each thread's result depends on its own registers only."""
        return self.run is not _any


def _operands(text: str) -> list[tuple[str, ...]]:
    groups = re.findall(r"\{[^}]*\}|[^,\s]+", text)
    return [tuple(part.strip() for part in group.strip("{}").split(",")) for group in groups]


#: What does nothing here: names of registers, and orders between launches, which run one after the other.
_IDLE = (".reg", "griddepcontrol.", "nanosleep.")


def _statement(text: str) -> Statement:
    op, _, rest = text.partition(" ")
    groups = _operands(rest)
    run: Callable[..., Any] | None
    pipe = "alu"
    if op == "mov.b32" and len(groups[-1]) == 2:
        # Two registers of 16 bits.
        run, pipe, groups = _halves, "", [groups[0], *((name,) for name in groups[-1])]
    elif op.startswith("mov."):
        run, pipe = None, ""
    elif _EIGHT_BITS.match(op):
        run, pipe = _eight_bits(op), "cvt"
    elif _FLOAT.match(op):
        run, pipe = _arithmetic(op.removesuffix("x2")), "fma"
    elif _EXTREME.match(op):
        run = _maximum(op)
    elif re.match(r"ex2\.approx(\.ftz)?\.f32$", op):
        run, pipe = _exp2, "mufu"
    elif op == "tanh.approx.f32":
        run, pipe = _tanh, "mufu"
    elif op in _PLAIN:
        run = _PLAIN[op]
    else:
        raise UnknownError(f"the emulator does not know the PTX instruction '{text}'")
    return Statement(text, run, op.endswith("x2"), groups[0], tuple(groups[1:]), pipe)


@lru_cache(maxsize=512)
def parsed(text: str) -> tuple[Statement, ...]:
    """The statements of a block; UnsupportedError names one that is not known."""
    body = text.strip()
    body = re.sub(r"//[^\n]*", "", body).replace("{\n", "\n", 1) if body.startswith("{\n") else body
    # Blocks in braces only open scopes: our templates reuse names across them, never read them outside.
    flat = re.sub(r"(^|;|\n)\s*\{(?=\s*\.reg)", r"\1", body)
    flat = re.sub(r";\s*\}", ";", flat)
    pieces = (" ".join(piece.split()) for piece in flat.split(";"))
    return tuple(_statement(piece) for piece in pieces if piece and piece != "}" and not piece.startswith(_IDLE))


@lru_cache(maxsize=512)
def own_names(text: str) -> frozenset[str]:
    """Registers that a block declares, ``c<4>`` meaning c0 to c3; others outlive it."""
    found: set[str] = set()
    for names in re.findall(r"\.reg\s+\.\w+\s+([^;]*);", text):
        for name in (name.strip() for name in names.split(",")):
            stem, _, count = name.rstrip(">").partition("<")
            found |= {f"{stem}{i}" for i in range(int(count))} if count else {name}
    return frozenset(found)


def reads_lasting(text: str, lasting: Mapping[str, Any]) -> bool:
    """Whether a block reads a register that an earlier one left: what a warp found out for itself."""
    read = {name for statement in parsed(text) for group in statement.sources for name in group}
    return not read.isdisjoint(lasting.keys() - own_names(text))


@lru_cache(maxsize=512)
def instructions(text: str) -> dict[str, float]:
    """Instructions per pipe of one execution of the block; those that make two results at once go to fma2."""
    out: dict[str, float] = {}
    for statement in parsed(text):
        # A shift in front of an addition becomes part of it (LEA, IMAD).
        if statement.pipe and not statement.text.startswith("shl."):
            pipe = f"{statement.pipe}2" if statement.packed else statement.pipe
            out[pipe] = out.get(pipe, 0.0) + 1.0
    return out


class _Registers:
    """Names of a running block; ``lasting`` holds those that outlive it."""

    def __init__(self, inputs: Sequence[Any], outputs: int, program_id: int, lasting: dict[str, Any]) -> None:
        self.values: dict[str, Any] = {}
        #: Neighbouring registers that were given as rows: those, one by one and together.
        self._given: dict[tuple[str, ...], tuple[list[Any], Any]] = {}
        for given in inputs:
            bits = np.ascontiguousarray(given).view(np.uint32)
            rows = bits if bits.ndim == 2 else bits[None]
            names = tuple(f"${outputs + len(self.values) + i}" for i in range(len(rows)))
            apart = list(rows)
            self._given[names] = apart, rows
            self.values.update(zip(names, apart, strict=True))
        self.like = next(iter(self.values.values()))
        self.program_id, self.lasting = program_id, lasting

    def read(self, name: str) -> Any:
        """A register, or a constant spread over the threads; a pair for 64-bit constants."""
        if name in self.values:
            return self.values[name]
        if name in _SPECIAL:
            return np.full_like(self.like, self.program_id)
        if name in self.lasting:
            # Of all threads alike: the role that reads it may have another number of threads.
            return np.full_like(self.like, self.lasting[name])
        try:
            if name.startswith("0f"):
                return np.full_like(self.like, int(name[2:], 16))
            number = int(name, 0)
        except ValueError:
            raise UnknownError(f"PTX reads '{name}', which nothing has written") from None
        if number >= 1 << 32:
            return self._pair(np.uint32(number & 0xFFFFFFFF), np.uint32(number >> 32))
        return np.full_like(self.like, number & 0xFFFFFFFF)

    def _pair(self, low: Any, high: Any) -> Any:
        made = np.empty((2, *self.like.shape), np.uint32)
        made[0], made[1] = low, high
        return made

    def move(self, statement: Statement) -> None:
        """mov, also between a pair of 32-bit registers and a 64-bit one."""
        targets, (sources,) = statement.targets, statement.sources
        if len(sources) == 2:
            low, high = map(self.read, sources)
            apart, together = self._given.get(sources, ([], None))
            # Unless the block has written to them.
            as_given = len(apart) == 2 and low is apart[0] and high is apart[1]
            self.values[targets[0]] = together if as_given else self._pair(low, high)
            return
        value = self.read(sources[0])
        if len(targets) == 2:
            self.values[targets[0]], self.values[targets[1]] = value
        else:
            self.values[targets[0]] = value


def run(
    text: str, inputs: Sequence[Any], outputs: int, program_id: int = 0, lasting: dict[str, Any] | None = None
) -> list[Any]:
    """Execute a block on arrays of 32-bit registers, each over threads or some neighbours as rows; returns ``outputs`` arrays of uint32.

    Registers that the block does not declare are written to ``lasting``, for later blocks of the same threads;
    UnsupportedError where threads differ in one.
    """
    kept = {} if lasting is None else lasting
    registers = _Registers(inputs, outputs, program_id, kept)
    with np.errstate(all="ignore"):
        for statement in parsed(text):
            if statement.run is None:
                registers.move(statement)
                continue
            sources = [registers.read(group[0]) for group in statement.sources]
            registers.values[statement.targets[0]] = statement.run(*sources)
    for name in registers.values.keys() - own_names(text):
        if name[0] not in "$%":
            value = registers.values[name]
            if value.ndim > 1 or (value != value.flat[0]).any():
                raise UnsupportedError(f"the PTX register '{name}' outlives its block and differs between threads")
            kept[name] = value.flat[0]
    return [registers.values[f"${i}"] for i in range(outputs)]
