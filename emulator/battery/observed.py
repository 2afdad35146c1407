"""Which changes of an expression change its value while a problem runs: of the others no trial can tell anything.

Asking for the values before anything is run again is weak mutation (Howden, "Weak mutation testing and completeness of test sets", 1982).
"""

from __future__ import annotations

import ast
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tilecast.emulator.battery.edits import Edit, computes
from tilecast.emulator.battery.kinds import kind_of
from tilecast.emulator.values.tensors import Tensor, raw

#: What functions call with an expression's value.
SEEN = "__seen__"
#: Times that an expression is asked.
_VISITS = 60
#: The rank of a maximum or minimum that would choose the other one every time.
_ALWAYS = 2

Place = tuple[int, int, int]


@dataclass(slots=True)
class _Asked:
    """An edit, and how often the value would be another one or the same."""

    edit: Edit
    #: The operand that is added, or what stands there then; None where it cannot be asked for.
    code: types.CodeType | None
    changed: int = 0
    same: int = 0
    #: Whether it cannot be what is missing, or nothing can be said.
    other_kind: bool = False
    unknown: bool = False


class Observed:
    """The values that changed expressions have and would have."""

    def __init__(self, module: types.ModuleType, found: Iterable[Edit]) -> None:
        self._module, self._visits = module, dict[Place, int]()
        self._asked: dict[Place, list[_Asked]] = {}
        self._of: dict[Edit, _Asked] = {}
        codes: dict[str, types.CodeType | None] = {}
        for edit in found:
            if edit.whole and edit not in self._of:
                first, last, text = edit.around or (edit.first, edit.last, edit.new)
                text = edit.missing.operand if edit.missing else text
                if text not in codes:
                    codes[text] = _code(text)
                one = self._of[edit] = _Asked(edit, codes[text])
                self._asked.setdefault((edit.line, first, last), []).append(one)

    @property
    def places(self) -> frozenset[Place]:
        """Lines and columns of the expressions."""
        return frozenset(self._asked)

    def seen(self, place: Place, value: Any, names: Mapping[str, Any]) -> Any:
        """Take note of an expression's value where a function has these names; gives the value."""
        self._visits[place] = visits = self._visits.get(place, 0) + 1
        if visits <= _VISITS:
            known: dict[types.CodeType, Any] = {}
            for one in self._asked[place]:
                if one.code is None or one.unknown or one.other_kind or (one.changed and not one.edit.missing):
                    continue
                if one.code not in known:
                    try:
                        known[one.code] = eval(one.code, vars(self._module), dict(names))
                    except Exception:
                        known[one.code] = None
                _compare(one, value, known[one.code])
        return value

    def judged(self, edit: Edit) -> Edit | None:
        """The edit with the rank that its values give it; None where it cannot make a difference."""
        one = self._of.get(edit)
        if one is None:
            return edit
        missing = edit.missing
        if one.other_kind or (one.same and not one.changed):
            return None
        if missing is None or missing.operator in ("*", "+"):
            return edit if missing is None or (edit.line, edit.first, edit.last) in self._visits else None
        if one.code is None:
            return replace(edit, rank=max(edit.rank, _ALWAYS))
        if not one.changed:
            return None
        return edit if one.same else replace(edit, rank=_ALWAYS) if missing.distance < 2 else None


def _code(text: str) -> types.CodeType | None:
    """An expression that only computes; None for another one."""
    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError:
        return None
    return compile(tree, "<edit>", "eval") if computes(tree) else None


def _compare(one: _Asked, value: Any, other: Any) -> None:
    """Whether the value would be another one."""
    missing = one.edit.missing
    try:
        if missing is None:
            if not isinstance(value, (int, float)) or not isinstance(other, (int, float)):
                one.unknown = True
            else:
                one.changed += float(value) != float(other)
                one.same += float(value) == float(other)
            return
        if not _fits(value, other, missing.operator in ("*", "+") or missing.distance == 0):
            one.other_kind = True
            return
        mine, added = (value, other) if not isinstance(value, Tensor) else (raw(value), raw(other))
        if missing.operator in ("*", "+"):
            would = mine * added if missing.operator == "*" else mine + added
            differs = np.asarray(would != mine)
        else:
            differs = np.asarray(added > mine if missing.operator == "maximum" else added < mine)
        one.changed += bool(differs.any())
        one.same += not differs.all()
    except Exception:
        one.unknown = True


def _fits(value: Any, other: Any, scales: bool) -> bool:
    """Whether an operator takes both and gives what the value is; ``scales``: it takes a number beside a tensor."""
    if isinstance(value, bool) or isinstance(other, bool):
        return False
    if isinstance(value, int):
        return isinstance(other, int)
    if isinstance(value, float):
        return isinstance(other, (int, float))
    if not isinstance(value, Tensor):
        return False
    if isinstance(other, Tensor):
        return kind_of(value) == kind_of(other)
    return scales and isinstance(other, (int, float))


class Asking(ast.NodeTransformer):
    """Functions that hand the values of expressions to `SEEN`."""

    def __init__(self, places: frozenset[Place]) -> None:
        self._places = places

    def visit(self, node: ast.AST) -> Any:
        """The node with its expressions of values asked; functions keep their signatures."""
        if isinstance(node, ast.FunctionDef):
            node.body = [self.visit(one) for one in node.body]
            return node
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            # A function is no value; that of a rewritten ``x.to(type)`` stands where x does.
            node.args = [self.visit(one) for one in node.args]
            node.keywords = [self.visit(one) for one in node.keywords]
            return self._asked(node)
        return self._asked(super().visit(node))

    def _asked(self, node: Any) -> Any:
        if not isinstance(node, ast.expr) or not isinstance(getattr(node, "ctx", ast.Load()), ast.Load):
            return node
        place = (node.lineno, node.col_offset, node.end_col_offset or 0)
        if place not in self._places or node.end_lineno != node.lineno:
            return node
        return self._handed(node, place)

    @staticmethod
    def _handed(node: ast.expr, place: Place) -> ast.expr:
        names = ast.Call(ast.Name("locals", ast.Load()), [], [])
        call = ast.Call(
            ast.Name(SEEN, ast.Load()), [ast.Tuple([ast.Constant(one) for one in place], ast.Load()), node, names], []
        )
        return ast.fix_missing_locations(ast.copy_location(call, node))


def ask(module: types.ModuleType, observed: Observed, attempt: Callable[[], Any]) -> None:
    """Run ``attempt`` while functions of the module that were defined with `Asking` can call."""
    setattr(module, SEEN, observed.seen)
    try:
        attempt()
    finally:
        delattr(module, SEEN)
