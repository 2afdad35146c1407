"""What a line of a kernel could say instead: small changes of an expression, those that are mistaken most often first.

The operators are those of mutation analysis (Offutt et al., "An experimental determination of sufficient mutant operators", 1996),
and of Gluon two more: which of two values a mask takes, and a maximum for a minimum.
"""

from __future__ import annotations

import ast
import functools
import itertools
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tilecast.emulator.battery.operands import Missing, Siblings, pairs, places
from tilecast.emulator.expressions import last_name

#: What a name stands for, as far as it can take another one's place: e.g. ("Int",), ("Tensor", shape, type).
Kind = tuple[object, ...]
#: Of a function, the names that it has and what they stand for; a name with a dot is a field.
Names = Mapping[str, Kind]

_STRICT = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}
_OPPOSITE = {ast.Lt: ">=", ast.LtE: ">", ast.Gt: "<=", ast.GtE: "<"}
#: Of a limit, the other one.
_LIMITS = {ast.Lt: (">=", ">"), ast.LtE: (">=", ">"), ast.Gt: ("<=", "<"), ast.GtE: ("<=", "<")}
_OTHER = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "//", ast.FloorDiv: "*", ast.BitAnd: "|", ast.BitOr: "&", ast.Div: "*",
    ast.LShift: ">>", ast.RShift: "<<",
}  # fmt: skip
_OTHER_CALL = {"maximum": "minimum", "minimum": "maximum", "max": "min", "min": "max", "exp2": "log2", "log2": "exp2"}
#: Operators of which one operand may be one too many.
_DROPPED = (ast.Add, ast.Sub, ast.Mult, ast.BitAnd, ast.BitOr, ast.Mod, ast.FloorDiv)
#: Names that are tried for one.
_NAMES = 12
#: Calls that give a number for numbers, and do nothing else.
_PURE = ("maximum", "minimum", "cdiv")
#: Kinds of scalars.
_NUMBERS = (("int",), ("float",))


@dataclass(frozen=True, slots=True)
class Edit:
    """One change within a line."""

    line: int
    #: Columns (bytes) that are replaced, and what stands there then.
    first: int
    last: int
    new: str
    #: Which are tried first: 0: comparisons, what a mask or a maximum chooses, an operand that lines beside it have, a name that nothing reads;
    #: 1: other operators, arguments; 2: numbers; 3: names; 4: operands that stand elsewhere only.
    rank: int
    #: Whether it takes the place of a whole expression, whose values can be asked for.
    whole: bool = False
    #: What is added to it.
    missing: Missing | None = None
    #: The largest expression around it that only computes, as columns, and what it is then.
    around: tuple[int, int, str] | None = None

    def applied(self, lines: Collection[str]) -> str:
        """The line afterwards."""
        text = list(lines)[self.line - 1].encode()
        return (text[: self.first] + self.new.encode() + text[self.last :]).decode()


def edits(
    function: ast.FunctionDef, line: int, text: str, names: Names, siblings: Siblings | None = None,
    executed: frozenset[int] = frozenset(),
) -> Iterator[Edit]:  # fmt: skip
    """Changes of what begins in a ``line`` of a function, ``text``; those of names take one that stands for the same kind, and of ``siblings``
    operands that it may lack; ``executed``: lines that ran, where that is known."""
    raw = text.encode()
    unread = _unread(function)
    idle = _unread(function, executed)

    def part(node: ast.expr) -> str:
        return raw[node.col_offset : node.end_col_offset].decode()

    for statement in ast.walk(function):
        if not isinstance(statement, ast.stmt) or isinstance(statement, (ast.FunctionDef, ast.With)):
            continue
        if not statement.lineno <= line <= _head_end(statement):
            continue
        for node, computed in _expressions(statement):
            if node.lineno == node.end_lineno == line:
                within = computed if computed.lineno == computed.end_lineno else node
                for edit in (*_of_node(node, line, part), *_of_names(node, line, part, names)):
                    yield _placed(edit, within, raw)
                if isinstance(node, ast.Call) and siblings is not None:
                    yield from _of_arguments(node, line, part, names, siblings)
                yield from _of_unread(node, line, part, names, unread, siblings.language if siblings else "")
                if isinstance(node, ast.Compare):
                    yield from _other_limits(node, line, part, names, idle)
        for root in _roots(statement) if siblings is not None else ():
            for node in places(root, siblings.language):  # type: ignore[union-attr]
                if node.lineno == node.end_lineno == line:
                    yield from _lacking(node, root, function, line, part, names, siblings)  # type: ignore[arg-type]
        if isinstance(statement, ast.AugAssign) and statement.lineno == statement.end_lineno == line:
            other = _OTHER.get(type(statement.op))
            at = raw.find(b"=", statement.target.end_col_offset)
            if other is not None and at > 0:
                yield Edit(line, statement.target.end_col_offset or 0, at, f" {other}", 1)
            yield Edit(line, statement.col_offset, statement.end_col_offset or 0, "pass", 1)


def _head_end(statement: ast.stmt) -> int:
    """The last line of a statement, without its body."""
    body = getattr(statement, "body", None)
    return body[0].lineno - 1 if body else statement.end_lineno or statement.lineno


def _expressions(statement: ast.stmt) -> Iterator[tuple[ast.expr, ast.expr]]:
    """All expressions of a statement that are evaluated, but for those of its body and its annotations; each with the largest around it that
    only computes (itself, where it does not)."""
    todo: list[tuple[ast.AST, ast.expr | None]] = [(root, None) for root in _roots(statement)]
    while todo:
        node, around = todo.pop(0)
        if isinstance(node, ast.expr):
            around = around or (node if computes(node) else None)
            yield node, around or node
        todo += [(child, around) for child in ast.iter_child_nodes(node)]


def computes(node: ast.AST) -> bool:
    """Whether an expression gives a value of values, and does nothing else."""
    for part in ast.walk(node):
        if isinstance(part, (ast.Subscript, ast.Lambda, ast.Starred)):
            return False
        if isinstance(part, ast.Call) and not (isinstance(part.func, ast.Attribute) and part.func.attr in _PURE):
            return False
    return True


def _placed(edit: Edit, around: ast.expr, raw: bytes) -> Edit:
    """A change of a whole expression, with what is ``around`` it."""
    first, last = around.col_offset, around.end_col_offset or 0
    if not edit.whole or (first, last) == (edit.first, edit.last):
        return edit
    text = raw[first : edit.first] + edit.new.encode() + raw[edit.last : last]
    return replace(edit, around=(first, last, text.decode()))


def _roots(statement: ast.stmt) -> list[ast.expr]:
    """The outermost expressions of a statement, without its body."""
    if isinstance(statement, (ast.If, ast.While)):
        return [statement.test]
    value = statement.iter if isinstance(statement, ast.For) else getattr(statement, "value", None)
    return [value] if value is not None else []


def _lacking(
    node: ast.expr, root: ast.expr, function: ast.FunctionDef, line: int, part: Callable[[ast.expr], str], names: Names,
    siblings: Siblings,
) -> Iterator[Edit]:  # fmt: skip
    """An expression of ``root`` with one operand more."""
    own = part(node)
    kind = names.get(own)
    if kind is None and isinstance(node, (ast.Name, ast.Attribute)):
        return
    numbers = [name for name, one in names.items() if one in _NUMBERS]
    alike = [name for name, one in names.items() if one[0] == "tensor" and kind in (None, one)]
    text = ast.unparse(node)
    beside = {pair[::2] for part_of in ast.walk(root) for pair in pairs(part_of)}
    for one in siblings.missing(function.name, text, numbers, alike, _unread(function), _there(function)):
        if not _known(one.operand, _own(function), names, siblings.language):
            continue
        held = _held(node, part)
        if one.operator in ("*", "+"):
            # Of two constants it is most often a shape.
            likely = one.operator == "*" and not (text.isupper() and one.operand.isupper())
            # What the line multiplies by elsewhere is as near as what lines beside it do.
            near = not one.distance or (one.operator, one.operand) in beside
            rank = 4 if not near else 0 if likely else 1
            new = f"({held} {one.operator} ({one.operand}))"
        elif siblings.language:
            rank, new = (0, 0, 3, 4)[one.distance], f"{siblings.language}.{one.operator}({own}, {one.operand})"
        else:
            continue
        yield Edit(line, node.col_offset, node.end_col_offset or 0, new, rank, True, one)


def _known(operand: str, own: Container[str], names: Names, language: str) -> bool:
    """Whether a function has what an operand is made of."""
    plain, read = _read(operand)
    return operand in names if plain else all(one in own or one.isupper() or one == language for one in read)


@functools.lru_cache(maxsize=4096)
def _read(operand: str) -> tuple[bool, frozenset[str]]:
    """Whether an expression is a name or a field, and the names that it reads, but for those that it calls."""
    tree = ast.parse(operand, mode="eval")
    called = {one.func.id for one in ast.walk(tree) if isinstance(one, ast.Call) and isinstance(one.func, ast.Name)}
    read = frozenset(one.id for one in ast.walk(tree) if isinstance(one, ast.Name)) - called
    return isinstance(tree.body, (ast.Name, ast.Attribute)), read


@functools.lru_cache(maxsize=256)
def _unread(function: ast.FunctionDef, executed: frozenset[int] = frozenset()) -> tuple[str, ...]:
    """Parameters and names of a function that it does not read (in lines that were ``executed``, where that is known), but for those whose names say so."""
    found = [one for one in ast.walk(function) if isinstance(one, ast.Name)]
    read = {one.id for one in found if isinstance(one.ctx, ast.Load) and (not executed or one.lineno in executed)}
    stored = [one.id for one in found if isinstance(one.ctx, ast.Store)]
    own = dict.fromkeys([*(one.arg for one in function.args.args), *stored])
    return tuple(one for one in own if one not in read and not one.startswith("_"))


@functools.lru_cache(maxsize=256)
def _own(function: ast.FunctionDef) -> frozenset[str]:
    """Parameters and names of a function's own."""
    stored = {one.id for one in ast.walk(function) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
    return frozenset(stored | {one.arg for one in function.args.args})


@functools.lru_cache(maxsize=256)
def _there(function: ast.FunctionDef) -> frozenset[str]:
    """Parameters and all names that stand in a function."""
    return _own(function) | {one.id for one in ast.walk(function) if isinstance(one, ast.Name)}


def _of_node(node: ast.expr, line: int, part: Callable[[ast.expr], str]) -> Iterator[Edit]:
    """Changes of operators, numbers and arguments."""
    first, last = node.col_offset, node.end_col_offset or 0

    def made(new: str, rank: int = 1) -> Edit:
        return Edit(line, first, last, new, rank, whole=True)

    match node:
        case ast.Compare(left, [operator], [right]):
            for table in (_STRICT, _OPPOSITE):
                if type(operator) in table:
                    yield made(f"{_held(left, part)} {table[type(operator)]} {_held(right, part)}", 0)
        case ast.BinOp(left, operator, right):
            if type(operator) in _OTHER:
                yield made(f"({_held(left, part)} {_OTHER[type(operator)]} {_held(right, part)})")
            if isinstance(operator, _DROPPED):
                yield made(_held(left, part))
            if isinstance(operator, (*_DROPPED[2:5], ast.Add)):
                yield made(_held(right, part))
            if isinstance(operator, ast.Sub):
                yield made(f"({_held(right, part)} - {_held(left, part)})")
        case ast.UnaryOp(ast.Not() | ast.USub(), operand):
            yield made(_held(operand, part))
        case ast.Constant(bool() as value):
            yield made(str(not value), 0)
        case ast.Constant(int() as value):
            yield made(f"{value + 1}", 2)
            yield made(f"{value - 1}" if value else "(-1)", 2)
        case ast.Constant(float() as value):
            yield made(repr(2 * value), 2)
            yield made(repr(value / 2), 2)
            yield made(f"(-{value!r})", 2)
        case ast.Call(function, arguments):
            name = last_name(function)
            if name in _OTHER_CALL and isinstance(function, ast.Attribute):
                yield Edit(
                    line,
                    (function.end_col_offset or 0) - len(name),
                    function.end_col_offset or 0,
                    _OTHER_CALL[name],
                    0 if "m" in name else 1,
                )
            if name in ("maximum", "minimum"):
                yield from (made(part(one), 0) for one in arguments[:2])
            if name == "cdiv" and len(arguments) == 2:
                yield made(f"({_held(arguments[0], part)} // {_held(arguments[1], part)})")
            if name == "where" and len(arguments) == 3:
                yield from (made(part(one), 0) for one in arguments[1:])
            for one, other in itertools.pairwise(arguments):
                if (
                    not isinstance(one, ast.Starred)
                    and not isinstance(other, ast.Starred)
                    and one.lineno == other.lineno
                ):
                    yield Edit(
                        line,
                        one.col_offset,
                        other.end_col_offset or 0,
                        f"{part(other)}, {part(one)}",
                        0 if name == "where" else 1,
                    )
    if isinstance(node, (ast.BinOp,)) and isinstance(node.op, ast.FloorDiv):
        yield made(f"(-(-{_held(node.left, part)} // {_held(node.right, part)}))")


def _held(node: ast.expr, part: Callable[[ast.expr], str]) -> str:
    """An expression as an operand."""
    plain = isinstance(node, (ast.Name, ast.Constant, ast.Attribute, ast.Call, ast.Subscript))
    return part(node) if plain else f"({part(node)})"


def _of_arguments(
    node: ast.Call, line: int, part: Callable[[ast.expr], str], names: Names, siblings: Siblings
) -> Iterator[Edit]:
    """Names for arguments, of those that other calls of the same function have there."""
    called = ast.unparse(node.func)
    for number, one in enumerate(node.args):
        own = part(one)
        for other in siblings.arguments.get((called, number), ()) if own in names else ():
            if other != own and names.get(other) == names[own]:
                yield Edit(line, one.col_offset, one.end_col_offset or 0, other, 1, whole=True)


def _of_unread(
    node: ast.expr, line: int, part: Callable[[ast.expr], str], names: Names, unread: Sequence[str], language: str
) -> Iterator[Edit]:
    """Names that nothing reads: in place of a name, and as its factor; in place of a number, and the larger or smaller of both."""
    first, last = node.col_offset, node.end_col_offset or 0
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        for one in unread:
            if names.get(one) in _NUMBERS:
                yield Edit(line, first, last, one, 0, True)
                for extreme in ("maximum", "minimum") if language else ():
                    yield Edit(line, first, last, f"{language}.{extreme}({one}, {part(node)})", 0, True)
    if isinstance(node, (ast.Name, ast.Attribute)) and (kind := names.get(part(node))) is not None:
        for one in unread:
            if one != part(node) and names.get(one) == kind:
                yield Edit(line, first, last, one, 0, True)
                if kind != ("bool",):
                    yield Edit(line, first, last, f"({part(node)} * {one})", 0, True)


def _other_limits(
    node: ast.Compare, line: int, part: Callable[[ast.expr], str], names: Names, idle: Sequence[str]
) -> Iterator[Edit]:
    """A condition and the other limit, by a name that nothing reads that ran."""
    if len(node.ops) != 1 or type(node.ops[0]) not in _LIMITS:
        return
    left, right = node.left, node.comparators[0]
    for side in (left, right):
        own = [n for n in ast.walk(side) if isinstance(n, ast.Name) and n.id in names]
        for one in idle if len(own) == 1 else ():
            if names.get(one) != names[own[0].id]:
                continue
            start, end = own[0].col_offset - side.col_offset, (own[0].end_col_offset or 0) - side.col_offset
            raw = part(side).encode()
            other = (raw[:start] + one.encode() + raw[end:]).decode()
            for operator in _LIMITS[type(node.ops[0])]:
                added = f"({other} {operator} {part(right)})" if side is left else f"({part(left)} {operator} {other})"
                yield Edit(line, node.col_offset, node.end_col_offset or 0, f"(({part(node)}) & {added})", 0)


def _of_names(node: ast.expr, line: int, part: Callable[[ast.expr], str], names: Names) -> Iterator[Edit]:
    """Other names of the same kind, the next ones first; of a field those of the same tuple."""
    if not isinstance(node, (ast.Name, ast.Attribute)):
        return
    own = part(node)
    kind = names.get(own)
    if kind is None:
        return
    owner = own.rpartition(".")[0]
    # Constants of the file are mistaken for each other.
    alike = [one for one, other in names.items() if other == kind and one != own and one.isupper() == own.isupper()]
    # Fields of the same tuple, then names, then fields of others.
    alike.sort(key=lambda one: (one.rpartition(".")[0] != owner, "." in one))
    for one in alike[:_NAMES]:
        yield Edit(line, node.col_offset, node.end_col_offset or 0, one, 3, whole=True)
