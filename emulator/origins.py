"""Which lines of a file decide whether a line runs, or what it computes: a backward slice, a few assignments deep."""

from __future__ import annotations

import ast
from collections.abc import Container, Iterator, Sequence
from typing import Any, TypeVar

_T = TypeVar("_T")

#: How often an assignment is followed to those that it reads; statements of a function that is called for a value, at most.
_DEPTH, _STATEMENTS = 2, 14
#: Lines before the constants that all of them read.
_FIRST = 5


def origins(tree: ast.Module, line: int, what: str = "around") -> list[int]:
    """Lines, the nearest first: headers of conditions and loops around ``line``, then the assignments that these read.

    ``what``: "around"; "values": the statement at ``line`` and the assignments that it reads; "function": all conditions and
    loops of the function that ``line`` stands in; "stores": all statements of it that store something.
    """
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    inside = next((f for f in functions.values() if f.lineno <= line <= (f.end_lineno or 0)), None)
    if inside is None:
        return []
    if what == "values":
        heads: list[Any] = [node for node in ast.walk(inside) if _is_simple(node) and line in _lines(node)]
    else:
        heads = [n for n in ast.walk(inside) if isinstance(n, (ast.If, ast.For, ast.While))]
        heads = [n for n in heads if what == "function" or _holds(n, line)]
        heads.sort(key=lambda node: -node.lineno)
    found: dict[int, None] = {}
    # One after the other, each with all that it reads: the nearest says most.
    for node in heads:
        whole = what == "values"
        found.update(dict.fromkeys(_lines(node) if whole else [node.lineno]))
        read = node if whole else node.iter if isinstance(node, ast.For) else node.test
        _follow(read, inside, functions, found)
    numbers = [number for number in _numbers(tree, found) if number not in found]
    return [*list(found)[:_FIRST], *numbers, *list(found)[_FIRST:]]


def _numbers(tree: ast.Module, lines: Container[int]) -> list[int]:
    """Lines at the top of the file that define floating-point constants which ``lines`` read."""
    read = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and n.lineno in lines}
    return [
        node.lineno
        for node in tree.body
        if isinstance(node, ast.Assign)
        and any(isinstance(one, ast.Constant) and isinstance(one.value, float) for one in ast.walk(node.value))
        and any(isinstance(target, ast.Name) and target.id in read for target in node.targets)
    ]


def _follow(
    read: ast.AST, inside: ast.FunctionDef, functions: dict[str, ast.FunctionDef], found: dict[int, None]
) -> None:
    """Add the lines of short functions that ``read`` calls, and of the assignments that it reads."""
    for called in _called(read):
        found.update(dict.fromkeys(_body(functions.get(called))))
    wanted = set(_read(read))
    for _ in range(_DEPTH):
        more: set[str] = set()
        for node in _assignments(inside):
            if wanted & {one.id for target in _targets(node) for one in ast.walk(target) if isinstance(one, ast.Name)}:
                found.update(dict.fromkeys(_lines(node)))
                more |= set(_read(node.value))
                for called in _called(node):
                    found.update(dict.fromkeys(_body(functions.get(called))))
        wanted = more


def _is_simple(node: ast.AST) -> bool:
    return isinstance(node, (ast.Assign, ast.AugAssign, ast.Expr, ast.Return))


def _lines(node: Any) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _holds(node: ast.If | ast.For | ast.While, line: int) -> bool:
    return node.body[0].lineno <= line <= (node.body[-1].end_lineno or 0)


def _assignments(function: ast.FunctionDef) -> Iterator[ast.Assign | ast.AugAssign]:
    """The last first: they are nearest to what is asked about, as a rule."""
    found = [node for node in ast.walk(function) if isinstance(node, (ast.Assign, ast.AugAssign))]
    return iter(sorted(found, key=lambda node: -node.lineno))


def _targets(node: ast.Assign | ast.AugAssign) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target]


def _read(node: ast.AST) -> list[str]:
    return [one.id for one in ast.walk(node) if isinstance(one, ast.Name)]


def _called(node: ast.AST) -> list[str]:
    return [one.func.id for one in ast.walk(node) if isinstance(one, ast.Call) and isinstance(one.func, ast.Name)]


def _body(function: ast.FunctionDef | None) -> list[int]:
    """Lines of a short function that computes a value, and neither waits nor is one expression."""
    if function is None or not isinstance(function.body[-1], ast.Return):
        return []
    statements = [s for s in function.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
    if not 1 < len(statements) <= _STATEMENTS or any(isinstance(s, ast.Expr) for s in statements):
        return []
    return [number for s in statements for number in _lines(s)]


def by_turns(lists: Sequence[Sequence[_T]]) -> list[_T]:
    """The first of each list, then the second of each, and so on."""
    longest = max(map(len, lists), default=0)
    return [one[i] for i in range(longest) for one in lists if i < len(one)]
