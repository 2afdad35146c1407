"""Lines of a kernel's host code that hand on what a problem is about."""

from __future__ import annotations

import ast

from tilecast.emulator.battery.problems import Problem
from tilecast.emulator.expressions import on_chip
from tilecast.emulator.origins import by_turns
from tilecast.emulator.source import Source

#: Lines that are quoted, and characters of each.
_QUOTED, _WIDTH = 6, 100
#: Why the host may be wrong about a problem without keys, and words of its lines.
WITHOUT_KEYS = "with keys it is another path", ("numel", "zero_", "fill_", "planned")
#: The same of one in which no product is about any tensor that it knows.
NO_STEP = "no product is about Q and K: which tensor is which", ("plan(", "_desc", "TensorDescriptor", "[grid]")
#: Loops and conditions that were never entered, and lines about each.
_HEADS, _AROUND = 4, 6
#: Words of lines about grids and tiles.
_PROGRAMS = ("query_blocks", "programs", "turns", "tiles", "[grid]")
#: Lines of what the functions return that those call.
_ENDS = 6
#: Lines about tensor maps, and about which program takes what.
_MAPS, _TAKES = 6, 6


def handed_on(source: Source, why: str, words: tuple[str, ...]) -> str:
    """Text to append to a message: ``why``, then the lines of ``launch`` and ``plan`` that name one of ``words``, and the
    constants with a fraction that these read.
    """
    tree = ast.parse(source.text)
    functions = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name in ("launch", "plan")]
    functions.sort(key=lambda function: function.name)
    lines: dict[int, None] = {}
    for function in functions:
        for node in ast.walk(function):
            if isinstance(node, ast.stmt) and not isinstance(node, (ast.FunctionDef, ast.Raise)) and not _is_text(node):
                # Of a compound statement its head.
                body = getattr(node, "body", None)
                last = body[0].lineno - 1 if body else node.end_lineno or node.lineno
                text = source.text.splitlines()[node.lineno - 1 : max(last, node.lineno)]
                numbers = [
                    node.lineno + i for i, line in enumerate(text) if any(w in line.partition("#")[0] for w in words)
                ]
                lines.update(dict.fromkeys(numbers))
    kept = sorted(lines)[:_QUOTED]
    kept += _returned(tree, kept)
    read = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and n.lineno in kept}
    kept += [
        node.lineno
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, float)
        and any(isinstance(target, ast.Name) and target.id in read for target in node.targets)
    ]
    quoted = "".join(f"\n               {source.quote(line)[:_WIDTH]}" for line in kept)
    return f"\n             {why}; the host's lines about it{quoted}" if kept else ""


def unstored(source: Source, said: str) -> str:
    """Of a result that was never stored, the host's lines about how many programs there are; nothing of others."""
    if "nothing was stored there" not in said:
        return ""
    unused = "".join(f"\n             no use of {name}" for name in source.dataflow.unused())
    heads = by_turns([source.values([line], _AROUND, "around") for line in source.dataflow.not_entered()[:_HEADS]])
    if heads:
        quoted = "".join(
            f"\n               {source.quote(line)[:_WIDTH]}" for line in list(dict.fromkeys(heads))[:_QUOTED]
        )
        unused += f"\n             loops and conditions that were never entered{quoted}"
    return unused + handed_on(source, "how many programs there are, and what for", _PROGRAMS) + taken(source)


def taken(source: Source) -> str:
    """Where kernels ask which program runs, and what the host's number of programs is computed from, as text to append."""
    tree = ast.parse(source.text)
    plans = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "plan"]
    ends = [n.lineno for plan in plans for n in ast.walk(plan) if isinstance(n, ast.Return)]
    # What the host works out for that has functions of its own.
    ends += _returned(tree, [line for end in ends for line in source.values([end], _TAKES, 0)])
    host = by_turns([source.values([end], _TAKES, 0)[1:] for end in reversed(ends)])
    lines = list(dict.fromkeys([*source.dataflow.numbered()[:_TAKES], *host[: 2 * _TAKES]]))
    quoted = "".join(f"\n               {source.quote(line)[:_WIDTH]}" for line in lines)
    return f"\n             which program takes what{quoted}" if quoted else ""


def tensor_maps(source: Source) -> str:
    """What the host makes tensor maps of, as text to append."""
    lines = by_turns([source.values([line], _MAPS, 0) for line in source.dataflow.tensor_maps()])
    quoted = "".join(f"\n               {source.quote(line)[:_WIDTH]}" for line in list(dict.fromkeys(lines))[:_MAPS])
    return f"\n             what the host makes tensor maps of{quoted}" if quoted else ""


def _returned(tree: ast.Module, lines: list[int]) -> list[int]:
    """What functions of the host return that lines of it call: those that are no kernels."""
    functions = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef) and not on_chip(n)}
    calls = [
        n for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.lineno in lines
    ]
    called = dict.fromkeys(
        n.func.id for n in calls if isinstance(n.func, ast.Name) and n.func.id not in ("launch", "plan")
    )
    ends = [n for name in called if name in functions for n in ast.walk(functions[name]) if isinstance(n, ast.Return)]
    return [
        line for end in ends for line in range(end.lineno, (end.end_lineno or end.lineno) + 1) if line not in lines
    ][:_ENDS]


def about(
    problem: Problem, again: bool, planned: bool, masked: bool, only_sums: bool
) -> tuple[str, tuple[str, ...]] | None:
    """Why the host may be wrong, and the words of its lines; None where nothing says so.

    ``again``: of a second launch (``planned``: from what the first worked out); ``masked``: keys are weighed that a row does not
    see, or the other way round; ``only_sums``: the output is right.
    """
    if again and not planned:
        return "the first launch of the shape was right", ("scale", "attention[")
    if not problem.keys:
        return WITHOUT_KEYS
    if problem.scale is not None:
        return "an ordinary scale was right", ("scale",)
    if masked and min(problem.window) >= 0:
        return f"with a window of {problem.window}", ("window",)
    return ("the logarithm of sums depends on the scale", ("scale",)) if only_sums else None


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
