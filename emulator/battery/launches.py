"""A generated file under a battery of launches of its own kind: loaded once, its statements and operations counted, its results explained."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tilecast.emulator.battery.coverage import Coverage
from tilecast.emulator.errors import EmulationError, UnsupportedError, WrongResultError
from tilecast.emulator.language.arrays import Array
from tilecast.emulator.origins import by_turns
from tilecast.emulator.run import Loaded
from tilecast.emulator.session import Watcher
from tilecast.emulator.source import Source
from tilecast.model.machine.machine import Machine

#: Lines that a message quotes, and characters of each; lines that a value is followed back to.
_QUOTED, _WIDTH, _BEHIND = 16, 100, 20
#: Of a step that departs, lines that its first value comes from.
_FIRST = 12
#: Of tensors that are wrong, places that stored them.
_ASKED = 6
#: Functions of host code that refuse.
_REFUSING = ("plan", "launch", "refusal", "scales", "steps_of", "step_of")


class Labelled(Protocol):
    """A problem of a battery."""

    def label(self) -> str:
        """For messages, and for ``--case``."""


class AnyBench(Protocol):
    """A kernel under a battery, whatever it computes."""

    coverage: Coverage
    #: Programs and operations so far; largest errors, as a share of what rounding allows (lse: 0 where there is none).
    programs: int
    operations: int
    out_error: float
    lse_error: float

    @property
    def kernel(self) -> Loaded:
        """The loaded file."""

    def todo(self) -> Sequence[Any]:
        """The problems, those that find most first."""

    def solve(self, problem: Any) -> None:
        """Run one problem; EmulationError when the kernel is wrong."""

    def refused(self) -> int:
        """How many wrong calls the file refuses; WrongResultError when it takes one."""

    def exponentials(self) -> int:
        """How many pieces of PTX compute 2^x, as they should."""

    def synchronises(self, problem: Any) -> bool:
        """Whether a problem is about more than lengths, windows and scales."""


class LaunchBench:
    """What batteries of launches have in common."""

    def __init__(self, source: Source, machine: str | Machine | None) -> None:
        self.coverage = Coverage(source.text)
        self.loaded = Loaded(source, machine, change=self.coverage.change, names=self.coverage.names)
        self.programs = self.operations = 0
        self.out_error = self.lse_error = 0.0

    @property
    def kernel(self) -> Loaded:
        """The loaded file."""
        return self.loaded

    @property
    def source(self) -> Source:
        """The file."""
        return self.loaded.source

    def number(self, name: str, otherwise: int) -> int:
        """A number at the top of the file."""
        return self.loaded.constant(name, otherwise)

    def exponentials(self) -> int:
        """None of these files has any."""
        return 0

    def launch(
        self, call: Callable[[], Any], mode: str, seed: int, sms: int, watcher: Watcher | None = None, counted: bool = True
    ) -> None:  # fmt: skip
        """Call the file's host code; ``counted``: its programs and operations."""
        self.loaded.begin(mode, seed, sms, watcher)
        run_host(self.loaded, call)
        if counted:
            traces = self.loaded.session.traces
            self.programs += len(traces)
            self.operations += sum(len(role.events) for one in traces for role in one.roles)


def run_host(kernel: Loaded, call: Callable[[], Any]) -> None:
    """Call a file's host code; what Python refuses in it is an UnsupportedError that quotes the line."""
    try:
        call()
    except (TypeError, AttributeError, IndexError) as error:
        raise UnsupportedError(f"{kernel.source.quote_of(error)}: {error}") from error


def always(value: Any, _: Any) -> Any:
    """``value``, whatever was there."""
    return value


def must_refuse(source: Source, cases: Iterable[tuple[str, Callable[[], Any]]]) -> int:
    """How many calls are refused with a ValueError; WrongResultError when one is taken.  ``cases``: what is wrong, the call."""
    count = 0
    for what, call in cases:
        count += 1
        try:
            call()
        except EmulationError:
            pass
        except ValueError:
            continue
        tests = "; ".join(source.quote(line) for line in _checks(source))
        raise WrongResultError(f"launch takes {what}: expected a ValueError from {tests or 'its launch'}")
    return count


def _checks(source: Source) -> list[int]:
    """Lines of the host code up to its last refusal: what they decide, and not what they say."""
    found: list[int] = []
    for function in ast.parse(source.text).body:
        if not isinstance(function, ast.FunctionDef) or function.name not in _REFUSING:
            continue
        raises = [node for node in ast.walk(function) if isinstance(node, ast.Raise)]
        said = {line for node in raises for line in range(node.lineno, (node.end_lineno or 0) + 1)}
        first, last = function.body[bool(ast.get_docstring(function))].lineno, max(said, default=0)
        found += [line for line in range(first, last) if line not in said]
    return [line for line in found if source.text.splitlines()[line - 1].strip(" ()")]


def explain(source: Source, trail: Trail, what: str, names: Sequence[str], step: str = "") -> WrongResultError:
    """The error for a result that is wrong: ``what``; ``step``, the first that departs, and its lines, or the lines that stored
    tensors ``names`` and what they store."""
    lines = trail.step_lines(source) if step else trail.lines(source, names)
    # What is unrolled, and ends of calls, say nothing.
    telling = [
        line
        for line in lines
        if "static_range(" not in source.quote(line) and len(source.quote(line).partition(": ")[2]) > 2
    ]
    quoted = "".join(f"\n               {source.quote(line)[:_WIDTH]}" for line in telling[:_QUOTED])
    first = f"\n             first step that departs: {step}" if step else ""
    return WrongResultError(f"{what}{first}" + (f"; it comes from{quoted}" if quoted else ""))


@dataclass(frozen=True, slots=True)
class Off:
    """The first element of an array that is not what it should be."""

    share: float
    at: tuple[int, ...]
    text: str


def compare(got: Any, want: Any, allowed: Any, names: Sequence[str], what: str) -> Off:
    """Hold ``got`` against ``want``; NaN where there must be one is right.  ``share``: the largest error over what is allowed.

    ``text`` is empty where every element is right; ``names``: of the dimensions.
    """
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    with np.errstate(all="ignore"):
        same = (got == want) | (np.isnan(got) & np.isnan(want))
        share = np.where(same, 0.0, np.abs(got - want) / np.broadcast_to(allowed, want.shape))
    share = np.nan_to_num(share, nan=np.inf, posinf=np.inf)
    largest = float(share.max(initial=0.0))
    if largest <= 1.0:
        return Off(largest, (), "")
    bad = share > 1.0
    at = tuple(int(n) for n in np.argwhere(bad)[0])
    place = ", ".join(f"{name} {n}" for name, n in zip(names, at, strict=True))
    limit = float(np.broadcast_to(allowed, want.shape)[at])
    text = (
        f"{int(bad.sum())} of {bad.size} elements of {what} are wrong, first {place}: {got[at]:.5g}, not {want[at]:.5g} "
        f"(tolerance {limit:.2g})"
    )
    return Off(largest, at, text)


def stored_at(source: Source, array: Array, at: Sequence[int]) -> str:
    """Where an element was stored last, as text to append."""
    strides = array.stride()
    line = int(array.line[sum(n * s for n, s in zip(at, strides, strict=True))])
    return f"; stored at {source.quote(line)}" if line else f"; nothing was stored there, an element of {array.name}"


class Trail:
    """Watches one launch: where tensors were copied from and stored to, and where products were called for."""

    def __init__(self) -> None:
        self.stores: dict[str, dict[tuple[int, ...], None]] = {}
        self.copies: dict[str, dict[tuple[int, ...], None]] = {}
        #: Places that stored elements, one by one, by tensor in global memory.
        self.in_global: dict[str, dict[tuple[int, ...], None]] = {}
        self.products: dict[tuple[int, ...], None] = {}
        #: Places that loaded from memory that programs store to, and those where nothing had been stored.
        self.loads: dict[tuple[int, ...], None] = {}
        self.unwritten: dict[tuple[int, ...], None] = {}
        #: Of each tensor in global memory, the place (a number) that stored an element last, and the places by number.
        self._last: dict[str, Any] = {}
        self._chains: list[tuple[int, ...]] = [()]
        #: Places of the first step that departs: chains of calls, with the argument that is followed (None: only quoted).
        self.step: list[tuple[tuple[int, ...], int | str | None]] = []
        #: Whether all of these are as likely: the first does not say most.
        self.alike = False

    def copied(self, copy: Any) -> None:
        """A copy has written its tile."""
        self.copies.setdefault(copy.desc.memory.name, {})[copy.calls[:3]] = None

    def multiplied(self, product: Any, a: Any, result: Any) -> None:
        """A product has been added up."""
        self.products[product.calls[:3]] = None

    def stored(self, name: str, calls: tuple[int, ...], at: Any = None) -> None:
        """Something was stored to a tensor."""
        self.stores.setdefault(name, {})[calls[:3]] = None
        if at is not None:
            self.in_global.setdefault(name, {})[calls[:3]] = None
        if at is not None and np.size(at):
            last, size = self._last.get(name, np.zeros(0, np.int32)), int(np.max(at)) + 1
            if len(last) < size:
                last = self._last[name] = np.concatenate([last, np.zeros(2 * size - len(last), np.int32)])
            if self._chains[-1] != calls:
                self._chains.append(calls)
            last[at] = len(self._chains) - 1

    def loaded(self, calls: tuple[int, ...], unwritten: bool) -> None:
        """Elements were loaded that programs store to."""
        self.loads[calls[:4]] = None
        if unwritten:
            self.unwritten[calls[:4]] = None

    def stored_last(self, name: str, element: int) -> tuple[int, ...]:
        """Where an element of a tensor was stored last; empty where it is not known."""
        last = self._last.get(name, ())
        return self._chains[int(last[element])] if element < len(last) else ()

    def lines(self, source: Source, names: Sequence[str]) -> list[int]:
        """Where tensors were stored, who asked for it, and what the values and the places come from, by turns."""
        chains = [chain for name in names for chain in self.stores.get(name, {})]
        chains = chains or [chain for found in self.stores.values() for chain in found] or list(self.products)
        asked = [place for chain in chains for place in chain[:2]]
        behind = [source.values(chain, _BEHIND, argument) for chain in chains for argument in (1, 0, 2)]
        # Left operands of products: what scores became.
        behind += [source.values(chain, _BEHIND, 0) for chain in self.products]
        return list(dict.fromkeys([*asked[:_ASKED], *by_turns(behind)]))

    def step_lines(self, source: Source) -> list[int]:
        """The lines of the step that departs, and what they come from."""
        asked = [place for chain, _ in self.step for place in chain[:2]]
        behind = [source.values(chain, _BEHIND, argument) for chain, argument in self.step if argument is not None]
        if self.alike:
            return list(dict.fromkeys([*asked[:1], *by_turns(behind), *asked]))
        # What the first one comes from says most.
        return list(dict.fromkeys([*asked[:4], *(behind[0][:_FIRST] if behind else ()), *by_turns(behind[1:]), *asked]))
