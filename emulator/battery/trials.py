"""Which one change of a line makes a problem right: mutation-based fault localisation (Moon et al., "Ask the mutants", 2014).

Of a wrong value the lines that it comes from are many.  Each is changed in turn, in ways that are mistaken often (`edits`), and the
problem is run again.  That a change makes it right says that the line decides about it, not that the line is the mistake.
"""

from __future__ import annotations

import ast
import contextlib
import re
import types
import warnings
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilecast.base.progress import Progress, silent
from tilecast.emulator.battery.edits import Edit, Kind, edits
from tilecast.emulator.battery.launches import AnyBench
from tilecast.emulator.expressions import lines_of, on_chip
from tilecast.emulator.source import Source
from tilecast.emulator.values.tensors import Tensor

#: Trials at most, and events that they may emulate together; of one, how many times as many as the problem itself, which an error
#: may have ended early, or so many.
_TRIALS, _EVENTS, _RUNAWAY, _SOME = 600, 400_000, 3, 30_000
#: Trials after the first that mends all, other problems that a change is put to, trials between two signs of life.
_MORE, _OTHERS, _TOLD = 250, 6, 20
#: Changed lines that are quoted.
_SHOWN = 5
#: Of what is tried first: lines that are quoted (0) or others that run (1), and the rank of the change.
_ORDER = ((0, 0), (1, 0), (0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (1, 3))
#: What functions call with their names, as they return.
_RECORD = "__names__"


@dataclass(frozen=True, slots=True)
class Trial:
    """A change that makes a problem right."""

    line: int
    #: The line with the change.
    new: str
    #: How many of the other problems are right with it.
    others: int


@dataclass(frozen=True, slots=True)
class Trials:
    """What was tried of one problem."""

    right: tuple[Trial, ...]
    tried: int
    #: Other problems that the changes were put to.
    others: int

    def text(self) -> str:
        """For a message: one change of each line; empty where no change mends every problem."""
        shown = list({one.line: one for one in reversed(self.right) if one.others == self.others}.values())[::-1]
        if not shown:
            return ""
        also = f", and {self.others} others stay right or become so" if self.others else ""
        lines = "".join(f"\n               line {one.line}: {one.new.strip()[:100]}" for one in shown[:_SHOWN])
        return f"\n             with one line changed to one of these it is right{also} ({self.tried} changes were tried){lines}"


def try_changes(
    bench: AnyBench, problem: Any, others: Sequence[Any], message: str, progress: Progress = silent
) -> Trials:
    """Changes of single lines that make ``problem``, which is wrong, right; lines that ``message`` quotes first.

    ``others``: problems that a change is put to as well, to tell those that mend the kernel from those that hide what is wrong.
    """
    session, functions = bench.kernel.session, _Functions(bench.kernel.source, bench.kernel.module)

    def right(one: Any, most_events: int = _EVENTS) -> bool:
        session.spent, session.most_events = 0, most_events
        try:
            bench.solve(one)
        except Exception:
            return False
        return True

    found: list[Trial] = []
    mended: list[Trial] = []
    spent, tried, most = 0, 0, _TRIALS
    others = others[:_OTHERS]
    # Of indices in larger problems nothing is asked again.
    bench.coverage.judges_only, followed, session.far_launches = True, session.far_launches, {}
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            executed = bench.coverage.executed(lambda: right(problem))
            own = session.spent
            functions.record_names(lambda: right(problem))
            quoted = [int(line) for line in re.findall(r"line (\d+):", message)]
            for edit in functions.candidates(quoted, executed):
                if tried >= most or spent > _EVENTS or len({one.line for one in mended}) >= _SHOWN:
                    break
                with functions.changed(edit) as compiled:
                    if not compiled:
                        continue
                    tried += 1
                    if right(problem, max(_RUNAWAY * own, _SOME)):
                        one = Trial(edit.line, edit.applied(functions.lines), sum(map(right, others)))
                        found.append(one)
                        mended += [one] if one.others == len(others) else []
                        most = min(most, tried + _MORE) if mended[:1] == [one] else most
                    spent += session.spent
                if not tried % _TOLD:
                    progress("changes of single lines", tried, _TRIALS)
    finally:
        bench.coverage.judges_only, session.most_events, session.far_launches = False, 0, followed
    return Trials(tuple(sorted(found, key=lambda one: -one.others)), tried, len(others))


class _Functions:
    """The functions of a loaded file that run on the chip, which are replaced one at a time."""

    def __init__(self, source: Source, module: types.ModuleType) -> None:
        self.lines = source.text.splitlines()
        self._source, self._module = source, module
        tree = ast.parse(source.text)
        self._functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and on_chip(node)]
        #: What names of each function stand for, the last time that it returned.
        self._names: dict[str, dict[str, Kind]] = {}

    def _at(self, line: int) -> ast.FunctionDef | None:
        return next((one for one in self._functions if line in lines_of(one)), None)

    def record_names(self, attempt: Callable[[], Any]) -> None:
        """Note what names stand for while ``attempt`` runs."""
        constants = {
            name: kind
            for name, value in vars(self._module).items()
            if name.isupper() and not name.startswith("_") and (kind := _kind(value)) is not None
        }
        self._names = {one.name: dict(constants) for one in self._functions}

        def record(function: str, there: Mapping[str, Any]) -> None:
            known = self._names[function]
            for name, value in there.items():
                known |= {part: kind for part, one in _parts(name, value) if (kind := _kind(one)) is not None}

        setattr(self._module, _RECORD, record)
        saved = {one.name: getattr(self._module, one.name) for one in self._functions}
        for one in self._functions:
            self._define(one, self.lines, _Recorded(one.name))
        try:
            attempt()
        finally:
            vars(self._module).update(saved)
            delattr(self._module, _RECORD)

    def _near(self, quoted: Sequence[int]) -> list[ast.FunctionDef]:
        """The functions that lines stand in, then those that these call, then those that call these, and so on."""
        names = {one.name: one for one in self._functions}
        calls = {
            one.name: {
                n.id: None for n in ast.walk(one) if isinstance(n, ast.Name) and n.id in names and n.id != one.name
            }
            for one in self._functions
        }
        found = dict.fromkeys(inside.name for line in quoted if (inside := self._at(line)) is not None)
        while True:
            more = [name for one in found for name in calls[one]]
            more += [name for name, called in calls.items() if called.keys() & found.keys()]
            if found.keys() >= set(more):
                return [names[one] for one in (*found, *(name for name in names if name not in found))]
            found |= dict.fromkeys(more)

    def candidates(self, quoted: Sequence[int], executed: Container[int]) -> Iterator[Edit]:
        """Changes of lines, those that are quoted first; of operators and numbers first, then of names."""
        every = [line for one in self._near(quoted) for line in lines_of(one) if line in executed]
        first = list(dict.fromkeys(line for line in quoted if line in executed))
        groups = first, [line for line in dict.fromkeys(every) if line not in first]
        for number, rank in _ORDER:
            for line in groups[number]:
                function = self._at(line)
                if function is not None:
                    found = edits(function, line, self.lines[line - 1], self._names.get(function.name, {}))
                    yield from dict.fromkeys(one for one in found if one.rank == rank)

    @contextlib.contextmanager
    def changed(self, edit: Edit) -> Iterator[bool]:
        """The module with a change; False where it is no Python."""
        function = self._at(edit.line)
        assert function is not None
        saved = getattr(self._module, function.name)
        lines = [*self.lines]
        lines[edit.line - 1] = edit.applied(lines)
        try:
            self._define(function, lines)
            yield True
        except SyntaxError:
            yield False
        finally:
            setattr(self._module, function.name, saved)

    def _define(
        self, function: ast.FunctionDef, lines: Sequence[str], change: ast.NodeTransformer | None = None
    ) -> None:
        """Execute the definition of a function again, at its own lines."""
        first = min([function.lineno, *(one.lineno for one in function.decorator_list)])
        text = "\n" * (first - 1) + "\n".join(lines[first - 1 : function.end_lineno])
        self._source.define(self._module, text, change)


class _Recorded(ast.NodeTransformer):
    """A function that tells its names as it returns."""

    def __init__(self, function: str) -> None:
        self._function = function

    def _told(self, node: ast.AST) -> ast.stmt:
        call = ast.parse(f"{_RECORD}({self._function!r}, locals())").body[0]
        return ast.fix_missing_locations(ast.copy_location(call, node))

    def visit_Return(self, node: ast.Return) -> list[ast.stmt]:
        return [self._told(node), node]

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        node.body.append(self._told(node.body[-1]))
        return node


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """A name and, of a named tuple, its fields."""
    yield name, value
    for field in getattr(value, "_fields", ()):
        yield f"{name}.{field}", getattr(value, field)


def _kind(value: Any) -> Kind | None:
    """What a value is, as far as another one can take its place; None where none should."""
    if isinstance(value, bool):
        return ("bool",)
    if isinstance(value, (int, np.integer)):
        return ("int",)
    if isinstance(value, float):
        return ("float",)
    if isinstance(value, Tensor):
        return "tensor", tuple(value.shape), str(value.dtype)
    if isinstance(value, (str, tuple, list, dict, types.FunctionType, types.ModuleType, type)) or value is None:
        return ("tuple", type(value).__name__) if hasattr(value, "_fields") else None
    return type(value).__name__, str(getattr(value, "shape", "")), str(getattr(value, "dtype", ""))
