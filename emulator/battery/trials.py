"""Which one change of a line makes a problem right: mutation-based fault localisation (Moon et al., "Ask the mutants", 2014).

Of a wrong value the lines that it comes from are many.  Each is changed in turn, in ways that are mistaken often (`edits`), and the
problem is run again.  That a change makes it right says that the line decides about it, not that the line is the mistake.
"""

from __future__ import annotations

import ast
import contextlib
import re
import time
import types
import warnings
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tilecast.base.progress import Progress, silent
from tilecast.emulator.battery.edits import Edit, Kind, edits
from tilecast.emulator.battery.kinds import kind_of
from tilecast.emulator.battery.launches import AnyBench
from tilecast.emulator.battery.observed import Asking, Observed, ask
from tilecast.emulator.battery.operands import siblings
from tilecast.emulator.expressions import lines_of, on_chip
from tilecast.emulator.origins import by_turns
from tilecast.emulator.source import Source

#: Trials at most, and events that they may emulate together; of one, how many times as many as the problem itself, which an error
#: may have ended early, or so many.
_TRIALS, _EVENTS, _RUNAWAY, _SOME = 1500, 500_000, 3, 30_000
#: Seconds of CPU time that they may take together, where a machine is slow at them.
_SECONDS = 40.0
#: Bytes that trials may take beside what the process has: a change may ask for any.
_MEMORY = 2 << 30
#: Trials after the first that mends all; trials between two signs of life.
_MORE, _TOLD = 150, 20
#: Problems among which the smallest is looked for that is wrong too, and other problems that a change is put to: before and after.
_SMALLER, _BEFORE, _AFTER = 16, 3, 2
#: Changed lines that are quoted, and characters of each.
_SHOWN, _WIDTH = 5, 100
#: Of what is tried first: lines that are quoted (0), that those come from (1) or others that run (2), and the rank of the change.
_ORDER = (
    (0, 0), (1, 0), (0, 1), (2, 0), (0, 2), (1, 1), (1, 2), (2, 1), (0, 3), (2, 2), (1, 3), (0, 4), (1, 4), (2, 3), (2, 4),
)  # fmt: skip
#: Lines that one that is quoted is followed back to.
_SLICE = 30
#: What functions call with their names, as they return.
_RECORD = "__names__"


def mending_changes(
    bench: AnyBench, todo: Sequence[Any], number: int, message: str, progress: Progress = silent
) -> str:
    """Changes of single lines that make problem ``number`` of ``todo``, which is wrong, right, as text to append to its ``message``; those that this
    quotes are tried first.

    Only changes with which problems before it stay right, and some after it are: the others hide what is wrong.
    """
    session, functions = bench.kernel.session, _Functions(bench.kernel.source, bench.kernel.module)
    total = 0.0
    kind: type[Exception] | None = None

    def right(one: Any, most_events: float = _EVENTS) -> bool:
        nonlocal total, kind
        session.spent, session.most_events = 0, most_events
        try:
            bench.solve(one)
        except Exception as error:
            kind = type(error)
            return False
        finally:
            total += session.spent
        return True

    mending: dict[int, str] = {}
    # Of indices in larger problems nothing is asked again.
    bench.coverage.judges_only, followed, session.far_launches = True, session.far_launches, {}
    session.explains = False
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"), limited(_MEMORY):
            warnings.simplefilter("ignore")
            sizes: dict[float, Any] = {}
            wrong = None
            parts: tuple[Any, ...] = getattr(todo[number], "parts", tuple)()
            for one in (todo[number], *parts, *todo[number + 1 : number + _SMALLER]):
                if total < _EVENTS / 4 and not right(one, min(sizes, default=_EVENTS)):
                    wrong = wrong or kind
                    # Of a part, which nobody made a problem, only what is wrong as the whole is.
                    if kind is wrong or one not in parts:
                        sizes.setdefault(session.spent, one)
            smallest = sizes[min(sizes)]
            others = [todo[number], *todo[:number][:_BEFORE], *todo[number + 1 :][:_AFTER]]
            executed = bench.coverage.executed(lambda: right(smallest))
            own = session.spent
            functions.executed = frozenset(executed)
            functions.record_names(lambda: right(smallest))
            functions.leave_out_equal(executed, lambda: right(smallest))
            quoted = [int(line) for line in re.findall(r"line (\d+):", message)]
            tried, most, total = 0, _TRIALS, 0.0
            until = time.process_time() + _SECONDS
            for edit in functions.candidates(quoted, executed):
                if tried >= most or total > _EVENTS or len(mending) >= _SHOWN or time.process_time() > until:
                    break
                with functions.changed(edit) as compiled:
                    tried += compiled
                    if compiled and right(smallest, max(_RUNAWAY * own, _SOME)) and all(map(right, others)):
                        most = min(most, tried + _MORE) if not mending else most
                        mending.setdefault(edit.line, edit.applied(functions.lines).strip())
                if not tried % _TOLD:
                    progress("changes of single lines", tried, _TRIALS)
    finally:
        bench.coverage.judges_only, session.most_events, session.far_launches = False, 0, followed
        session.explains = True
    if not mending:
        return ""
    it = f"it and {len(others) - 1} other problems are" if len(others) > 1 else "it is"
    lines = "".join(f"\n               line {line}: {new[:_WIDTH]}" for line, new in mending.items())
    return f"\n             with one line changed to one of these {it} right ({tried} changes were tried){lines}"


@contextlib.contextmanager
def limited(more: int) -> Iterator[None]:
    """So many bytes of memory beside what the process has, beyond which there is a MemoryError; where the system can limit them."""
    try:
        # Not on Windows.
        import resource

        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        most = pages * resource.getpagesize() + more
        resource.setrlimit(resource.RLIMIT_AS, (most if soft < 0 else min(soft, most), hard))
    except (ImportError, OSError, ValueError):
        yield
        return
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


class _Functions:
    """The functions of a loaded file that run on the chip, which are replaced one at a time."""

    def __init__(self, source: Source, module: types.ModuleType) -> None:
        self.lines = source.text.splitlines()
        self._source, self._module = source, module
        tree = ast.parse(source.text)
        self._functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and on_chip(node)]
        #: What names of each function stand for, the last time that it returned.
        self._names: dict[str, dict[str, Kind]] = {}
        self._known: dict[int, list[Edit]] = {}
        self._siblings = siblings(tree)
        self.executed: frozenset[int] = frozenset()

    def _at(self, line: int) -> ast.FunctionDef | None:
        return next((one for one in self._functions if line in lines_of(one)), None)

    def record_names(self, attempt: Callable[[], Any]) -> None:
        """Note what names stand for while ``attempt`` runs."""
        constants = {
            name: kind
            for name, value in vars(self._module).items()
            if name.isupper() and not name.startswith("_") and (kind := kind_of(value)) is not None
        }
        self._names = {one.name: dict(constants) for one in self._functions}

        def record(function: str, there: Mapping[str, Any]) -> None:
            known = self._names[function]
            for name, value in there.items():
                known |= {part: kind for part, one in _parts(name, value) if (kind := kind_of(one)) is not None}

        setattr(self._module, _RECORD, record)
        try:
            self._with(lambda one: _Recorded(one.name), attempt)
        finally:
            delattr(self._module, _RECORD)

    def leave_out_equal(self, executed: Container[int], attempt: Callable[[], Any]) -> None:
        """Forget the changes of ``executed`` lines that change no value while ``attempt`` runs."""
        lines = [line for one in self._functions for line in lines_of(one) if line in executed]
        observed = Observed(self._module, (edit for line in lines for edit in self._edits(line)))
        ask(self._module, observed, lambda: self._with(lambda _: Asking(observed.places), attempt))
        for line in lines:
            judged = [one for edit in self._edits(line) if (one := observed.judged(edit)) is not None]
            self._known[line] = judged

    def _with(self, change: Callable[[ast.FunctionDef], ast.NodeTransformer], attempt: Callable[[], Any]) -> None:
        """Run ``attempt`` with every function changed."""
        saved = {one.name: getattr(self._module, one.name) for one in self._functions}
        try:
            for one in self._functions:
                self._define(one, self.lines, change(one))
            attempt()
        finally:
            vars(self._module).update(saved)

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
        behind = by_turns(
            [
                [*self._source.values([line], _SLICE)[1:], *self._source.values([line], _SLICE, "around")]
                for line in first
            ]
        )
        second = [line for line in dict.fromkeys(behind) if line in executed and line not in first]
        groups = first, second, [line for line in dict.fromkeys(every) if line not in first and line not in second]
        for number, rank in _ORDER:
            found = [[one for one in self._edits(line) if one.rank == rank] for line in groups[number]]
            # Of each line one: there may be too many for one line after the other.
            yield from by_turns(found)

    def _edits(self, line: int) -> list[Edit]:
        """The changes of a line."""
        function = self._at(line)
        if line not in self._known and function is not None:
            found = edits(
                function, line, self.lines[line - 1], self._names.get(function.name, {}), self._siblings, self.executed
            )
            self._known[line] = list(dict.fromkeys(found))
        return self._known.get(line, [])

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
    # Of the type: of a value, an attribute that it does not have may be an error of the emulator's.
    for field in getattr(type(value), "_fields", ()):
        yield f"{name}.{field}", getattr(value, field)
