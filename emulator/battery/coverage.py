"""What of a kernel file ran: statements that were never executed, and branches that were never taken."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tilecast.emulator.errors import WrongResultError
from tilecast.emulator.expressions import on_chip, walk

#: What rewritten files call: with the line of a statement; with the number of a test and its value.
RAN, TOOK = "__ran__", "__took__"


@dataclass(frozen=True, slots=True)
class Unreached:
    """Something of the file that never ran."""

    line: int
    #: "never called", "never executed", "never true", "never false".
    what: str
    #: The line, without the spaces around it.
    code: str
    #: Why it cannot run, where that is known; else "".
    reason: str


@dataclass(frozen=True, slots=True)
class _Test:
    """A condition: of an ``if``, a ``while`` or a conditional expression."""

    line: int
    #: Whether compile-time constants alone decide it.
    constant: bool
    #: Lines of the first statement that runs when it holds and, where there is one, when it does not; 0: an expression.
    body: int
    otherwise: int


class Coverage:
    """Counts statements and branches of one file: give `change` and `names` to the kernel that is loaded."""

    def __init__(self, text: str) -> None:
        self._lines = text.splitlines()
        self._ran: set[int] = set()
        self._took: set[tuple[int, bool]] = set()
        self._tests: list[_Test] = []
        self._functions: list[tuple[int, list[int]]] = []
        self._on_chip: frozenset[int] = frozenset()
        #: Whether it only matters that a result is wrong: it is not followed back.
        self.judges_only = False
        self._constants: set[str] = set()

    @property
    def names(self) -> dict[str, Callable[..., Any]]:
        """What the rewritten file calls."""
        return {RAN: self._ran.add, TOOK: self._test}

    def _test(self, number: int, value: Any) -> bool:
        holds = bool(value)
        self._took.add((number, holds))
        return holds

    def change(self, tree: ast.Module) -> ast.Module:
        """The file with a call before every statement of a function, and around every condition."""
        self._constants = {
            target.id
            for node in tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in walk(tree):
            if isinstance(node, ast.FunctionDef):
                self._function(node)
        return ast.fix_missing_locations(tree)

    def _function(self, function: ast.FunctionDef) -> None:
        # Host code decides when it runs.
        compiled = on_chip(function)
        nodes = walk(function)
        constants = self._constants | _declared_constants(function, nodes)
        for node in nodes:
            if isinstance(node, (ast.If, ast.While, ast.IfExp)):
                blocks = node.body, node.orelse
                body, otherwise = (b[0].lineno if isinstance(b, list) and b else 0 for b in blocks)
                self._tests.append(
                    _Test(node.test.lineno, compiled and _decided(node.test, constants), body, otherwise)
                )
                node.test = _call(TOOK, node.test, ast.Constant(len(self._tests) - 1), node.test)
        lines: list[int] = []
        for block in _blocks(function):
            lines += [statement.lineno for statement in block if not _is_text(statement)]
            block[:] = [
                made
                for statement in block
                for made in (
                    (statement,)
                    if _is_text(statement)
                    else (ast.copy_location(ast.Expr(_call(RAN, statement, ast.Constant(statement.lineno))), statement), statement)
                )
            ]  # fmt: skip
        self._functions.append((function.lineno, sorted(lines)))
        if compiled:
            self._on_chip |= frozenset(lines)

    def executed(self, attempt: Callable[[], Any]) -> frozenset[int]:
        """Lines of statements that ``attempt`` executes."""
        before = set(self._ran)
        # What the file calls adds to this very set.
        self._ran.clear()
        try:
            attempt()
            return frozenset(self._ran)
        finally:
            self._ran.update(before)

    def left_out(self, attempt: Callable[[], Any]) -> frozenset[int]:
        """Lines of the kernels' statements that ``attempt`` does not execute; what host code has worked out it remembers."""
        if self.judges_only:
            raise WrongResultError("not explained")
        return self._on_chip - self.executed(attempt)

    def share(self) -> tuple[int, int]:
        """(statements executed, statements there are) of the functions of the file."""
        every = {line for _, lines in self._functions for line in lines}
        return len(every & self._ran), len(every)

    def unreached(self) -> tuple[Unreached, ...]:
        """By line: functions never called, branches never taken, and what else never ran."""
        found: dict[tuple[int, str], Unreached] = {}
        explained: set[int] = set()
        for first, lines in self._functions:
            if lines and not self._ran.intersection(lines):
                self._add(found, first, "never called", "")
                explained.update(lines)
        for number, test in enumerate(self._tests):
            taken = {value for at, value in self._took if at == number}
            if not taken:
                continue
            reason = "decided when the kernel is compiled" if test.constant else ""
            for value, word, start in ((True, "never true", test.body), (False, "never false", test.otherwise)):
                if value not in taken:
                    self._add(found, test.line, word, reason)
                    explained.add(start)
        for _, lines in self._functions:
            before = True
            for line in lines:
                ran = line in self._ran
                # Of statements in a row, the first that did not run stands for all.
                if not ran and before and line not in explained:
                    self._add(found, line, "never executed", "")
                before = ran
        return tuple(sorted(found.values(), key=lambda one: (one.line, one.what)))

    def _add(self, found: dict[tuple[int, str], Unreached], line: int, what: str, reason: str) -> None:
        found[line, what] = Unreached(line, what, self._lines[line - 1].strip(), reason)


def _call(name: str, where: ast.AST, *arguments: Any) -> ast.Call:
    made = ast.Call(ast.Name(name, ast.Load()), list(arguments), [])
    return ast.copy_location(made, where)


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """Lists of statements in a function, but not those of functions inside it."""
    for child in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
        if isinstance(child, list):
            for statement in child:
                if not isinstance(statement, ast.FunctionDef):
                    yield from _blocks(statement)
            yield child


def _declared_constants(function: ast.FunctionDef, nodes: list[ast.AST]) -> set[str]:
    """Parameters and variables annotated as gl.constexpr."""
    arguments = [*function.args.args, *function.args.kwonlyargs]
    found = {one.arg for one in arguments if one.annotation is not None and "constexpr" in ast.unparse(one.annotation)}
    for node in nodes:
        if isinstance(node, ast.AnnAssign) and "constexpr" in ast.unparse(node.annotation):
            found.add(ast.unparse(node.target))
    return found


def _decided(test: ast.expr, constants: set[str]) -> bool:
    """Whether compile-time constants alone decide a condition: those, types, and whether an argument was given."""
    if isinstance(test, ast.Compare) and isinstance(test.ops[0], (ast.Is, ast.IsNot)):
        return True
    if "element_ty" in ast.unparse(test) or "dtype" in ast.unparse(test):
        return True
    names = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
    return bool(names) and names <= constants
