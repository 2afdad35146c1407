"""What statements and expressions of a kernel name: memory, arguments, targets, and whether a function hides scores or makes a layout."""

from __future__ import annotations

import ast
from collections.abc import Container, Iterator
from functools import lru_cache
from typing import Any

#: Calls that only say where memory is.
ADDRESSES = {"index", "slice", "permute", "reshape"}
#: Calls that wait for others, and calls that tell them.
WAITS = {"wait", "warpgroup_mma_wait", "store_wait", "wait_group"}
SIGNALS = {"arrive", "expect", "tcgen05_commit", "mbarrier_arrive", "commit_group"}
#: Calls that do not signal a barrier that they are given.
SILENT = {"wait", "init", "invalidate"}

#: Where functions of the language take a layout without its name.
_LAYOUT_PLACES = {"arange": 2, "zeros": 2, "full": 3, "convert_layout": 1, "load": 0}

#: Names that the language's modules have, as a rule.
_LANGUAGE = {"gl", "tl", "ttgl"}

Function = ast.FunctionDef


def walk(node: ast.AST) -> list[ast.AST]:
    """The nodes of ``ast.walk`` in its order, in half the time: files are gone through again and again."""
    found = [node]
    for one in found:
        for name in one._fields:
            value = getattr(one, name, None)
            if isinstance(value, list):
                found += [part for part in value if isinstance(part, ast.AST)]
            elif isinstance(value, ast.AST):
                found.append(value)
    return found


def arguments(function: Function, silent: Container[str]) -> Iterator[tuple[ast.Call, int, ast.expr]]:
    """(call, place, argument) of all calls in a function but those that only say where memory is."""
    for node in walk(function):
        if isinstance(node, ast.Call) and last_name(node.func) not in ADDRESSES and last_name(node.func) not in silent:
            for place, one in enumerate(node.args):
                yield node, place, one


def last_name(function: ast.expr) -> str:
    """The last part of a function's name."""
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


def of_language(call: ast.Call, name: str) -> bool:
    """Whether a call is ``gl.name(..)``: of global memory, where it loads or stores."""
    return (
        isinstance(call.func, ast.Attribute)
        and call.func.attr == name
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id in _LANGUAGE
    )


def argument_of(value: ast.expr, number: int | str) -> ast.expr:
    """An argument of a call, by its place or keyword; the whole expression where there is none."""
    if isinstance(number, str):
        # Of the call itself, or of one inside: the layout of gl.arange in row + gl.arange(0, ROWS, layout=rows).
        calls = [one for one in ast.walk(value) if isinstance(one, ast.Call)]
        named = [one.value for call in calls for one in call.keywords if one.arg == number]
        places = {"layout": _LAYOUT_PLACES}.get(number, {})
        named += [call.args[at] for call in calls if 0 <= (at := places.get(last_name(call.func), -1)) < len(call.args)]
        return named[0] if named else value
    if isinstance(value, ast.Call):
        return value.args[number] if len(value.args) > number else value
    # A product among others: made + (warpgroup_mma(p, v, o),).
    inner = (one for one in ast.walk(value) if isinstance(one, ast.Call) and "mma" in ast.unparse(one.func))
    product = next(inner, None)
    return product.args[number] if product is not None and len(product.args) > number else value


def hides_scores(function: Function) -> bool:
    """Whether a function hides scores, gl.where(seen, s, -inf): which ones is another question than what they weigh."""
    last = function.body[-1]
    value = last.value if isinstance(last, ast.Return) else None
    return isinstance(value, ast.Call) and len(value.args) == 3 and "-inf" in ast.unparse(value.args[2])


def makes_layout(function: Function) -> bool:
    """Whether a function makes a layout, which says nothing of values."""
    last = function.body[-1]
    value = last.value if isinstance(last, ast.Return) else None
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr.endswith("Layout")


def says_value(node: ast.Assign | ast.AnnAssign) -> bool:
    """Whether a constant is a number with a fraction, or text (inline PTX): extents and layouts are checked elsewhere."""
    found = [one.value for one in ast.walk(node) if isinstance(one, ast.Constant)]
    return any(isinstance(one, (float, str)) for one in found)


def memory_name(node: ast.expr) -> str:
    """Last attribute of ``softmax.rows.index(0)`` and the like that names memory: rows; empty where there is none."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        node = node.func.value
    return node.attr if isinstance(node, ast.Attribute) else ""


def base_name(node: ast.expr) -> str:
    """The name that ``rows.reshape(..)`` and the like begin with: rows; empty where it is an attribute."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        node = node.func.value
    return node.id if isinstance(node, ast.Name) else ""


def fields_of(value: ast.expr | None) -> list[str]:
    """Fields of ``namedtuple("Name", "a b c")``; none of anything else."""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "namedtuple":
        names = ast.literal_eval(value.args[1])
        return names.split() if isinstance(names, str) else list(names)
    return []


def targets_of(node: ast.Assign | ast.AugAssign | ast.AnnAssign | ast.For) -> list[ast.Name]:
    """Names that a statement assigns to, in their order."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    flat = [one for t in targets for one in (t.elts if isinstance(t, ast.Tuple) else [t])]
    return [one for one in flat if isinstance(one, ast.Name)]


# Who explains a launch that stands still asks for those of the same functions by the ten thousand.
@lru_cache(maxsize=1 << 10)
def nearest_assignments(function: Function) -> tuple[ast.Assign | ast.AugAssign | ast.AnnAssign | ast.For, ...]:
    """Assignments, the last first."""
    kinds = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.For)
    return tuple(sorted((n for n in walk(function) if isinstance(n, kinds)), key=lambda node: -node.lineno))


@lru_cache(maxsize=1 << 10)
def comprehensions(function: Function) -> tuple[ast.comprehension, ...]:
    """The ``for`` parts of all comprehensions."""
    return tuple(one for one in walk(function) if isinstance(one, ast.comprehension))


def on_chip(function: Function) -> bool:
    """Whether a function is no host code."""
    return any("jit" in ast.unparse(one) for one in function.decorator_list)


def lines_of(node: Any) -> range:
    """Lines of the file that a node of its syntax tree stands on."""
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def is_constant(test: ast.expr) -> bool:
    """Whether a condition is about constants, which the compiler decides."""
    return not any(n.id.upper() != n.id for n in ast.walk(test) if isinstance(n, ast.Name))
