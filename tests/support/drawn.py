"""Bugs that no person chose: changes drawn by a rule from the kernels' own text, a seed says which.

Each changes one line of a function: a statement left out, an integer one more or less, a comparison that is strict or not, plus for minus,
a factor left out, two arguments the other way round, one parameter for another.  Some change nothing that counts: those no battery finds.
`drawn_values` draws wrong values only, from every file of a family; `drawn_harmless` what leaves values and order as they are.
"""

from __future__ import annotations

import ast
import itertools
import random
import re
from collections.abc import Callable, Iterator, Sequence

from support.planted import Planted
from tilecast.emulator.expressions import on_chip
from tilecast.emulator.run import kernel_path

_KINDS = ("left out", "by one", "strictness", "sign", "factor", "order", "name")
#: Of wrong values: a number one more or a floating-point one twice as large, a maximum or minimum that forgets an operand, a mask that forgets
#: a condition or chooses the other way round, a name for another one of the function.
_VALUES = ("number", "strictness", "sign", "factor", "order", "other name", "forgotten", "mask")
_HARMLESS = ("turned", "compared", "nothing added", "twice fenced")
#: Families, drawn from by turns; of each any file.
FAMILIES = (
    r"hopper_ws_\w+_full", r"hopper_ws_\w+_causal\w*", r"hopper_ws_\w+_window", r"hopper_fp8_\w+", r"hopper_bwd_\w+", r"hopper_serve_\w+", r"hopper_prefill_\w+",
    r"hopper_mla_\w+", r"gemm_hopper_\w+", r"gemm_blackwell\w*", r"blackwell_ws_\w+?_(full|causal)(_b300)?", r"blackwell_ws_\w+_window", r"blackwell_\w+_pair",
    r"blackwell_fp8_\w+?(?<!_pair)", r"blackwell_serve_\w+",
)  # fmt: skip
_COMPARED = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
#: Attributes that name no barrier or buffer.
_NO_MEMORY = {"type", "layout", "shape", "dtype", "block_type", "nbytes"}
#: What calls of the language begin with.
_MODULES = {"gl", "tl", "tma", "mbarrier", "triton", "gluon"}


def drawn(kernels: Sequence[str], count: int, seed: int) -> list[Planted]:
    """``count`` changes, kernels and kinds by turns."""
    rng, found = random.Random(seed), []
    tried = 0
    while len(found) < count:
        kernel, kind = kernels[tried % len(kernels)], _KINDS[rng.randrange(len(_KINDS))]
        tried += 1
        text = kernel_path(kernel).read_text(encoding="utf-8")
        choices = list(_changes(text, kind))
        if choices:
            old, new, names, line = rng.choice(choices)
            before = "".join(text.splitlines(keepends=True)[: line - 1])
            found.append(Planted(f"{kind}, line {line}", kernel, kind, old, new, before.count(old), names))
    return found


def _files(family: str) -> list[str]:
    """Shipped kernels of a family."""
    folder = kernel_path("gemm_hopper_short").parent
    return sorted(path.stem for path in folder.glob("*.py") if re.fullmatch(family, path.stem))


def drawn_values(count: int, seed: int, kinds: Sequence[str] = _VALUES) -> list[Planted]:
    """``count`` changes of values in functions for the chip, families by turns, files and kinds at random."""
    rng, found, tried = random.Random(seed), [], 0
    while len(found) < count:
        kernel = rng.choice(_files(FAMILIES[tried % len(FAMILIES)]))
        kind = kinds[rng.randrange(len(kinds))]
        tried += 1
        text = kernel_path(kernel).read_text(encoding="utf-8")
        choices = list(_changes(text, kind, on_chip))
        if choices:
            old, new, names, line = rng.choice(choices)
            before = "".join(text.splitlines(keepends=True)[: line - 1])
            found.append(Planted(f"{kind}, line {line}", kernel, kind, old, new, before.count(old), names))
    return found


def drawn_harmless(count: int, seed: int) -> list[Planted]:
    """``count`` changes that leave values and order as they are: operands and comparisons turned round, 0 added, a fence more."""
    return drawn_values(count, seed, _HARMLESS)


def _changes(
    text: str, kind: str, among: Callable[[ast.FunctionDef], bool] = lambda _: True
) -> Iterator[tuple[str, str, tuple[str, ...], int]]:
    """(line as it is, as it becomes, what a message may name instead, its number) of every change of a kind in functions."""
    lines = text.splitlines(keepends=True)
    tree = ast.parse(text)
    for function in tree.body:
        if not isinstance(function, ast.FunctionDef) or not among(function):
            continue
        parameters = [one.arg for one in function.args.args]
        if kind == "other name":
            # Any of the function's own.
            stored = [n for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
            parameters = list(dict.fromkeys([*parameters, *(one.id for one in stored)]))
        for statement in ast.walk(function):
            if (
                not isinstance(statement, (ast.Assign, ast.AugAssign, ast.Expr, ast.Return))
                or statement.lineno != statement.end_lineno
            ):
                continue
            line = lines[statement.lineno - 1]
            # Of what is left out nothing can be quoted: the barrier or buffer that it was about.
            names = tuple(sorted(_about(statement, function, tree))) if kind == "left out" else ()
            for start, end, new in _edits(statement, kind, parameters, line):
                yield line, line[:start] + new + line[end:], names, statement.lineno


def _about(statement: ast.stmt, function: ast.FunctionDef, tree: ast.Module) -> set[str]:
    """Barriers and buffers that a call is about: those that its arguments name, or whose method it is; of a parameter or of a name
    of the function's own, what callers pass on and what the name is made of."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call):
        return set()
    # A function of the file that is not called any more.
    function_called = call.func.value if isinstance(call.func, ast.Subscript) else call.func
    known = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    named = {function_called.id} & known if isinstance(function_called, ast.Name) else set()
    called = {id(node.func) for node in ast.walk(call) if isinstance(node, ast.Call)}
    base = call.func.value if isinstance(call.func, ast.Attribute) else None
    given = [*call.args, *([base] if base is not None else [])]
    held = {
        node.attr
        for one in given
        for node in ast.walk(one)
        if isinstance(node, ast.Attribute) and id(node) not in called and node.attr not in _NO_MEMORY
    }
    # What memory is a view of, and what is in registers, comes first.
    own = {name for one in (*call.args[:1], base) if one is not None and (name := _base(one))}
    return named | held | {name for one in own for name in _known_as(one, function, tree)} - _MODULES


def _known_as(name: str, function: ast.FunctionDef, tree: ast.Module, depth: int = 3) -> set[str]:
    """A name, and what else a message may call the same memory."""
    found, wanted = {name}, []
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == name:
            wanted.append((node.value, function))
    parameters = [one.arg for one in function.args.args]
    for other in tree.body if name in parameters else ():
        for node in ast.walk(other) if isinstance(other, ast.FunctionDef) else ():
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == function.name:
                wanted += [(one, other) for one in node.args[parameters.index(name) :][:1]]
    for value, inside in wanted:
        while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
            value = value.func.value
        if isinstance(value, ast.Attribute):
            found.add(value.attr)
        elif isinstance(value, ast.Name) and depth and value.id != name:
            found |= _known_as(value.id, inside, tree, depth - 1)
    return found


def _base(node: ast.expr) -> str:
    """The name that ``rows.index(0)`` and the like begin with; empty where it is an attribute."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        node = node.func.value
    return node.id if isinstance(node, ast.Name) else ""


def _edits(statement: ast.stmt, kind: str, parameters: Sequence[str], line: str) -> Iterator[tuple[int, int, str]]:
    """(from, to, what stands there instead) in the statement's line."""
    if kind == "left out":
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            yield statement.col_offset, statement.end_col_offset or 0, "pass"
        return
    for node in ast.walk(statement):
        start, end = getattr(node, "col_offset", 0), getattr(node, "end_col_offset", 0) or 0
        if kind == "by one" and isinstance(node, ast.Constant) and type(node.value) is int:
            yield start, end, str(node.value + 1)
        elif kind == "strictness" and isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARED:
            left, right = node.left.end_col_offset or 0, node.comparators[0].col_offset
            if not set("()") & set(line[left:right]):
                yield left, right, f" {_COMPARED[type(node.ops[0])]} "
        elif kind in ("sign", "factor") and isinstance(node, ast.BinOp):
            left, right = node.left.end_col_offset or 0, node.right.col_offset
            plain = not set("()[]") & set(line[left:right])
            if kind == "sign" and plain and isinstance(node.op, (ast.Add, ast.Sub)):
                yield left, right, " - " if isinstance(node.op, ast.Add) else " + "
            elif kind == "factor" and plain and isinstance(node.op, ast.Mult):
                yield left, node.right.end_col_offset or 0, ""
        elif kind == "order" and isinstance(node, ast.Call):
            for one, other in itertools.pairwise(node.args):
                if isinstance(one, ast.Name) and isinstance(other, ast.Name) and one.id != other.id:
                    yield one.col_offset, other.end_col_offset or 0, f"{other.id}, {one.id}"
        elif kind == "number" and isinstance(node, ast.Constant) and type(node.value) in (int, float):
            yield start, end, str(node.value + 1 if isinstance(node.value, int) else 2 * node.value)
        elif kind == "forgotten" and isinstance(node, ast.Call) and _last(node.func) in ("maximum", "minimum"):
            for one in node.args[:2] if node.lineno == node.end_lineno else ():
                yield start, end, line[one.col_offset : one.end_col_offset]
        elif kind == "mask" and isinstance(node, ast.BinOp) and isinstance(node.op, (ast.BitAnd, ast.BitOr)):
            for one in (node.left, node.right) if isinstance(node.left, ast.Compare) else ():
                yield start, end, line[one.col_offset : one.end_col_offset]
        elif kind == "mask" and isinstance(node, ast.Call) and _last(node.func) == "where" and len(node.args) == 3:
            first, second = (line[one.col_offset : one.end_col_offset] for one in node.args[1:])
            yield node.args[1].col_offset, node.args[2].end_col_offset or 0, f"{second}, {first}"
        elif kind in ("turned", "compared", "nothing added"):
            yield from _harmless(node, kind, line)
        elif kind == "twice fenced" and isinstance(node, ast.Call) and _last(node.func) == "fence_async_shared":
            yield start, end, f"{line[start:end]}; {line[start:end]}"
        elif (
            kind in ("name", "other name")
            and isinstance(node, ast.Name)
            and isinstance(node.ctx, ast.Load)
            and node.id in parameters
        ):
            other = parameters[(parameters.index(node.id) + 1) % len(parameters)]
            if other != node.id:
                yield start, end, other


def _harmless(node: ast.AST, kind: str, line: str) -> Iterator[tuple[int, int, str]]:
    """The same value, written otherwise: of sums and products of names and numbers, and of what compares them."""
    plain = (ast.Name, ast.Constant, ast.Attribute)
    if isinstance(node, ast.BinOp) and isinstance(node.left, plain) and isinstance(node.right, plain):
        left, right = (line[one.col_offset : one.end_col_offset] for one in (node.left, node.right))
        if kind == "turned" and isinstance(node.op, (ast.Add, ast.Mult)):
            between = line[node.left.end_col_offset : node.right.col_offset]
            yield node.col_offset, node.end_col_offset or 0, f"{right}{between}{left}"
        elif kind == "nothing added" and isinstance(node.op, (ast.FloorDiv, ast.Mod)):
            yield (
                node.col_offset,
                node.end_col_offset or 0,
                f"({left} + 0) {'%' if isinstance(node.op, ast.Mod) else '//'} {right}",
            )
    elif (
        kind == "compared"
        and isinstance(node, ast.Compare)
        and type(node.ops[0]) in _COMPARED
        and isinstance(node.left, plain)
    ):
        other = node.comparators[0]
        if isinstance(other, plain):
            turned = {ast.Lt: ">", ast.LtE: ">=", ast.Gt: "<", ast.GtE: "<="}[type(node.ops[0])]
            left, right = (line[one.col_offset : one.end_col_offset] for one in (node.left, other))
            yield node.col_offset, node.end_col_offset or 0, f"{right} {turned} {left}"


def _last(node: ast.expr) -> str:
    """The last name of what is called."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
