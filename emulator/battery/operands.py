"""What a line of a kernel may have forgotten: a factor, a term, an operand of a maximum or minimum, as lines beside it have them."""

from __future__ import annotations

import ast
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tilecast.emulator.expressions import last_name, on_chip

#: Operators by what stands between their operands; calls by their names.
_SIGNS = {ast.Mult: "*", ast.Add: "+"}
_EXTREMES = ("maximum", "minimum")
#: Characters of an operand that is taken from elsewhere; operands that are called alike, at most.
_LONG, _FAMILY = 40, 8


@dataclass(frozen=True, slots=True)
class Missing:
    """An operand that an expression may lack."""

    #: "*", "+", "maximum" or "minimum".
    operator: str
    operand: str
    #: 0: a line combines such an expression with it, or nothing reads it; 1: a line of the same function has it there; 2: the function has
    #: it; 3: others.
    distance: int


@dataclass(frozen=True, slots=True)
class Siblings:
    """What operators of a file's functions for the chip combine."""

    #: What the file calls the language; empty where it does not import it.
    language: str = ""
    #: By operator: of an expression's form its other operands; of a function all operands; those of all functions.
    beside: Mapping[tuple[str, str], Sequence[str]] = field(default_factory=dict)
    inside: Mapping[tuple[str, str], Sequence[str]] = field(default_factory=dict)
    everywhere: Mapping[str, Sequence[str]] = field(default_factory=dict)
    #: Of what is called, and the number of an argument, what it is.
    arguments: Mapping[tuple[str, int], Sequence[str]] = field(default_factory=dict)
    #: Calls of functions that nothing calls, with the names that their parameters have, and those.
    uncalled: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def missing(
        self, function: str, own: str, numbers: Sequence[str], alike: Sequence[str], unread: Sequence[str] = (),
        names: Container[str] = (),
    ) -> Iterator[Missing]:  # fmt: skip
        """What ``own``, an expression of a ``function``, may lack, the likeliest first.

        ``numbers``: names of scalars that the function has; ``alike``: those of what ``own`` is itself, where that is known; ``unread``:
        those that nothing in it reads; ``names``: all that it has or reads.
        """
        uncalled = [one for one, read in self.uncalled.items() if all(name in names for name in read)]
        for operator in (*_EXTREMES, *_SIGNS.values()):
            here = self.inside.get((operator, function), ())
            beside = self.beside.get((operator, _form(own)), ())
            if operator in _EXTREMES:
                own_names = [one for one in numbers if not one.isupper() or one in names]
                known = dict.fromkeys(self.everywhere.get(operator, ()), 3)
                known |= dict.fromkeys(["1", *own_names, *alike], 2)
                # A number of so many at most, of a sum that has it: what is left of them.
                inside = [one for one in own_names if one.isupper() and re.search(rf"\b{one}\b", own)]
                known |= dict.fromkeys([*here, *inside, *(["0"] if operator == "maximum" else [])], 1)
            else:
                known = dict.fromkeys(here, 1)
            # Of a family also those that are called alike: the line that is wrong may have been the only one with it.
            known |= dict.fromkeys([one for other in beside for one in _family(other, numbers)][:_FAMILY], 0)
            unread_here = [one for one in unread if one in numbers or one in alike]
            known |= dict.fromkeys([*beside, *unread_here, *uncalled], 0)
            ordered = sorted(known.items(), key=lambda item: item[1])
            yield from (Missing(operator, one, distance) for one, distance in ordered if one != own)


def _form(text: str) -> str:
    """What lines that say the same of other names have in common: of a field what its name begins with, of a call all but names."""
    if text.isidentifier():
        return text
    return re.sub(r"([a-z_]\w*)\.([a-z]+_)\w+", r"\1.\2", text) if "(" not in text else re.sub(r"\(\w+\)", "()", text)


def _family(operand: str, numbers: Sequence[str]) -> Iterator[str]:
    """An operand with the other fields whose names begin alike; of a field the same one of what else the function has."""
    last = operand.rpartition(".")[2]
    if operand not in numbers and last.isidentifier() and not last.isupper():
        yield from (one for one in numbers if one.rpartition(".")[2] == last)
    found = re.search(r"([a-z_]\w*\.[a-z]+_)\w+", operand)
    if found:
        for one in numbers:
            if one.startswith(found[1]):
                yield operand.replace(found[0], one)


def siblings(tree: ast.Module) -> Siblings:
    """What the functions for the chip of a file combine."""
    beside: dict[tuple[str, str], dict[str, None]] = {}
    inside: dict[tuple[str, str], dict[str, None]] = {}
    everywhere: dict[str, dict[str, None]] = {}
    arguments: dict[tuple[str, int], dict[str, None]] = {}
    language = ""
    named = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    uncalled: dict[str, frozenset[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for name in node.names:
                if name.name.rpartition(".")[2] == "language":
                    language = name.asname or name.name
    for function in tree.body:
        if not isinstance(function, ast.FunctionDef) or not on_chip(function):
            continue
        if function.name not in named:
            parameters = [one.arg for one in function.args.args]
            uncalled[f"{function.name}({', '.join(parameters)})"] = frozenset(parameters)
        for node in ast.walk(function):
            for number, given in enumerate(node.args if isinstance(node, ast.Call) else ()):
                arguments.setdefault((ast.unparse(node.func), number), {})[ast.unparse(given)] = None  # type: ignore[attr-defined]
            for operator, one, other in pairs(node):
                if len(other) <= _LONG:
                    beside.setdefault((operator, _form(one)), {})[other] = None
                    inside.setdefault((operator, function.name), {})[other] = None
                    everywhere.setdefault(operator, {})[other] = None
    return Siblings(
        language,
        {key: list(value) for key, value in beside.items()},
        {key: list(value) for key, value in inside.items()},
        {key: list(value) for key, value in everywhere.items()},
        {key: list(value) for key, value in arguments.items()},
        uncalled,
    )


def pairs(node: ast.AST) -> Iterator[tuple[str, str, str]]:
    """(operator, operand, the other one), both ways round."""
    if isinstance(node, ast.BinOp) and type(node.op) in _SIGNS:
        operator, pair = _SIGNS[type(node.op)], [node.left, node.right]
    elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
        operator, pair = "+", [node.target, node.value]
    elif isinstance(node, ast.Call) and last_name(node.func) in _EXTREMES and len(node.args) == 2:
        operator, pair = last_name(node.func), list(node.args)
    else:
        return
    one, other = (ast.unparse(part) for part in pair)
    yield operator, one, other
    yield operator, other, one


def places(root: ast.expr, language: str) -> Iterator[ast.expr]:
    """Expressions that may lack an operand: what is assigned or returned, operands, what is compared, arguments of the language and of
    the file's own functions, what is stored."""
    todo: list[ast.AST] = [root]
    while todo:
        node = todo.pop()
        parts: list[ast.expr] = []
        match node:
            case ast.Tuple(elements):
                parts = elements
            case ast.BinOp(left, _, right):
                parts = [left, right]
            case ast.Compare(left, _, others):
                parts = [left, *others]
            case ast.IfExp(_, body, other):
                parts = [body, other]
            case ast.UnaryOp(_, operand):
                parts = [operand]
            case ast.Call(function, arguments):
                of_file = isinstance(function, ast.Name)
                of_language = (
                    isinstance(function, ast.Attribute)
                    and isinstance(function.value, ast.Name)
                    and function.value.id == language
                )
                if of_file or of_language:
                    parts = arguments
                elif isinstance(function, ast.Attribute) and function.attr == "store":
                    # What goes into memory of the chip.
                    parts = arguments
                elif isinstance(function, ast.Attribute) and not isinstance(function.value, ast.Name):
                    parts = [function.value]
            case ast.Subscript(value, _):
                parts = [value]
        todo += parts
        if isinstance(node, (ast.Name, ast.Attribute, ast.BinOp, ast.Call, ast.Subscript)):
            yield node
