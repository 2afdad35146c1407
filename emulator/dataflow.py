"""Which lines the values of a statement come from: a backward slice through calls, fields of named tuples and memory of the chip.

Nearest first.  A tuple that a function returns is followed element by element, a field of a named tuple by its name, what is
loaded from shared or tensor memory to what is stored in memory of that name, and a parameter to the calls: those of the
run where they are known, else all of the file.
"""

from __future__ import annotations

import ast
import heapq
import itertools
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

from tilecast.emulator.expressions import (
    Function,
    argument_of,
    comprehensions,
    hides_scores,
    is_constant,
    last_name,
    lines_of,
    makes_layout,
    memory_name,
    nearest_assignments,
    of_language,
    says_value,
    targets_of,
)
from tilecast.emulator.uses import NO_VALUES, Uses

#: A function that is called from so many places is a helper: what it computes is less likely to be the cause.
_HELPER_CALLS, _HELPER_COST = 4, 3
#: What is followed first costs so much less.
_PREFERRED = 50
#: Methods that move values.
_MOVES = {"load", "store", "convert_layout", "split", "join", "to", "index", "slice", "permute", "reshape"}
#: Arguments of a call that may be mixed up.
_SEVERAL = 3
#: Of so many lines one may be one that only passes a value on.
_PASSED = 6
#: Steps that are followed at most.
_STEPS = 2000

_Path = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Frame:
    """A function, and the call that it runs for: None where that is not known."""

    function: Function
    call: ast.Call | None = None
    caller: _Frame | None = None


class Dataflow(Uses):
    """The slices of one file."""

    def __init__(self, tree: ast.Module) -> None:
        super().__init__(tree)
        #: What is left to follow, cheapest first: (cost, number, (frame, name or expression, field, statement to quote)).
        self._queue: list[tuple[int, int, Any]] = []
        self._number = itertools.count()
        self._found: dict[int, None] = {}
        self._passed: dict[int, None] = {}
        self._seen: set[Any] = set()
        self._right: Container[str] = ()
        self._products, self._prefer, self._layouts, self._counters, self._deciding = False, "", False, False, False
        self._ifs: dict[str, list[ast.If]] = {}

    def lines(
        self,
        chain: Sequence[int],
        limit: int,
        argument: int | str = 0,
        right: Container[str] = (),
        products: bool = False,
        prefer: str = "",
        layouts: bool = False,
        counters: bool = False,
        only: bool = False,
    ) -> list[int]:
        """At most ``limit`` lines that an argument of the call at ``chain[0]`` gets its value from.

        ``chain[1:]``: lines of the callers; ``argument``: its place or keyword, or "around" for what decides whether the line runs ("conditions": loops aside); ``right``: memories whose values are not followed further; ``products``: whether the
        accumulators of wgmma are, and not only what comes after them; ``prefer``: names with one of these words in them are followed first; ``layouts``: what makes
        layouts is, too; ``counters``: where they start, too; ``only``: nothing where the call has no such argument.
        """
        self._right, self._products, self._prefer, self._layouts = right, products, prefer, layouts
        self._counters = counters
        frame = self._frame(chain)
        if frame is None:
            return []
        self._queue, self._found, self._passed, self._seen = [], {}, {}, set()
        deciding = self._deciding = argument in ("around", "conditions")
        if deciding:
            # What decides whether it runs, the innermost first.
            kinds = (ast.If, ast.For, ast.While) if argument == "around" else (ast.If,)
            heads = [n for n in ast.walk(frame.function) if isinstance(n, kinds) and chain[0] in lines_of(n)]
            for head in sorted(heads, key=lambda one: -one.lineno):
                self._found[head.lineno] = None
                self._push(0, frame, head.iter if isinstance(head, ast.For) else head.test, ())
        for node in ast.walk(frame.function) if not deciding else ():
            if isinstance(node, (ast.Assign, ast.AugAssign, ast.Expr, ast.Return)) and chain[0] in lines_of(node):
                self._found.update(dict.fromkeys([chain[0], *_telling(node)]))
                given = argument_of(node.value, argument) if node.value is not None else None
                if given is not None and not (only and given is node.value):
                    self._push(0, frame, given, ())
                    # Of a tile that the copy engine stores: what was put into it.
                    for function, store in (
                        self._stores.get(self._memory_of(frame.function, given), []) if given is not node.value else ()
                    ):
                        self._push(0, _Frame(function), store.args[0], (), store)
        for _ in range(_STEPS):
            if not self._queue or len(self._found) >= limit:
                break
            cost, _, (frame, what, path, quoted) = heapq.heappop(self._queue)
            if quoted is not None:
                self._quote(quoted)
            if isinstance(what, str):
                self._name(cost, frame, what, path)
            else:
                self._expression(cost, frame, what, path)
        # What only passes values on says less; the nearest of it has a place all the same.
        passed = list(self._passed)[: limit // _PASSED]
        return list(dict.fromkeys([*list(self._found)[: limit - len(passed)], *passed, *self._found, *self._passed]))[
            :limit
        ]

    def _frame(self, chain: Sequence[int]) -> _Frame | None:
        frame, at = None, 0
        for line in reversed(chain):
            inside = self._inside(line)
            if inside is not None:
                calls = [call for f, _, call in self._calls.get(inside.name, []) if frame and f is frame.function]
                call = next((call for call in calls if call is not None and at in lines_of(call)), None)
                frame, at = _Frame(inside, call, frame if call else None), line
        return frame

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _quote(self, node: Any, near: bool = False) -> None:
        """Note a statement; ``near``: it says something even where it only passes a value on."""
        telling = (
            near
            or self._computes(node)
            or (isinstance(node, ast.Assign) and any(map(self._preferred, targets_of(node))))
        )
        (self._found if telling else self._passed).update(dict.fromkeys(_telling(node)))

    def _preferred(self, name: ast.Name | str) -> bool:
        """Whether a name is one of those that are followed first."""
        return any(one in (name.id if isinstance(name, ast.Name) else name) for one in self._prefer.split())

    def _computes(self, node: ast.AST) -> bool:
        """Whether a statement computes something, and does not only pass a value on: of several, it may be the wrong one."""
        for one in ast.walk(node):
            if isinstance(one, (ast.BinOp, ast.Compare, ast.BoolOp, ast.AugAssign)):
                return True
            if isinstance(one, ast.Constant) and isinstance(one.value, (float, str)):
                return True
            # Which part of memory it is decides about shapes and layouts.
            moves = _MOVES - {"slice", "reshape", "permute"} if self._layouts else _MOVES
            if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute) and one.func.attr not in moves:
                return True
            if isinstance(one, ast.Call) and len(one.args) >= _SEVERAL and self._is_own(last_name(one.func)):
                return True
        return False

    def _push(self, cost: int, frame: _Frame, what: str | ast.expr, path: _Path, quoted: ast.AST | None = None) -> None:
        """Follow a name or an expression when its turn comes, and quote the statement that it stands in."""
        key = (frame.function.name, what if isinstance(what, str) else id(what), path)
        if quoted is not None and getattr(quoted, "lineno", 0) in self.left_out:
            return
        if key not in self._seen:
            self._seen.add(key)
            name = what if isinstance(what, str) else getattr(what, "attr", "")
            if cost >= 0 and self._preferred(name):
                cost -= _PREFERRED
            heapq.heappush(self._queue, (cost, next(self._number), (frame, what, path, quoted)))

    def _expression(self, cost: int, frame: _Frame, node: ast.expr, path: _Path) -> None:
        """What an expression reads; of its value, the field ``path``."""
        if isinstance(node, ast.Name):
            self._push(cost, frame, node.id, path)
        elif isinstance(node, ast.Attribute):
            if node.attr not in NO_VALUES:
                self._push(cost, frame, node.value, (node.attr, *path)[:2])
        elif isinstance(node, ast.Call):
            self._call(cost, frame, node, path)
        elif isinstance(node, ast.Tuple) and path and path[0].isdigit() and int(path[0]) < len(node.elts):
            self._push(cost, frame, node.elts[int(path[0])], path[1:])
        else:
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.expr):
                    self._push(cost, frame, child, ())

    def _call(self, cost: int, frame: _Frame, node: ast.Call, path: _Path) -> None:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name == "warpgroup_mma":
            for one in node.args[2:3] if self._products else ():
                self._push(cost, frame, one, ())
            return
        if name in self._functions:
            callee = self._functions[name]
            if hides_scores(callee) or (makes_layout(callee) and not self._layouts):
                return
            # A field of what it returns comes from one place, for all callers.
            helper = len(self._calls.get(name, ())) >= _HELPER_CALLS and not (path and not path[0].isdigit())
            inner = _Frame(callee, node, frame)
            for back in (n for n in ast.walk(callee) if isinstance(n, ast.Return) and n.value is not None):
                self._push(cost + 1 + helper * _HELPER_COST, inner, back.value, path, back)  # type: ignore[arg-type]
            if helper:
                # It is followed for one of its calls only: what the others are given, here.
                for one in node.args:
                    self._push(cost + 1, frame, one, ())
            return
        if name in self._fields and path and path[0] in self._fields[name]:
            place = self._fields[name].index(path[0])
            named = [keyword.value for keyword in node.keywords if keyword.arg == path[0]]
            starred = next((i for i, one in enumerate(node.args) if isinstance(one, ast.Starred)), None)
            if starred is not None and place >= starred:
                # Of what stands behind a starred argument, the places from the end.
                place += len(node.args) - len(self._fields[name])
                place = place if place > starred else starred
            for one in named or node.args[place : place + 1]:
                self._push(
                    cost,
                    frame,
                    one.value if isinstance(one, ast.Starred) else one,
                    path[1:] if not isinstance(one, ast.Starred) else path,
                )
            return
        if of_language(node, "load") and node.args:
            # What another kernel of the launch, or another program, has left there.
            for name in self._tensors(frame.function, node.args[0]):
                for function, store in self._global_stores.get(name, []):
                    self._push(cost + 2, _Frame(function), store.args[1], (), store)
        if isinstance(node.func, ast.Attribute):
            name = memory_name(node.func.value) or self._memory_of(frame.function, node.func.value)
            if node.func.attr in ("load", "load_max") and name:
                # Which memory it is was right.
                for function, store in self._stores.get(name, []) if name not in self._right else ():
                    self._push(cost + 1, _Frame(function), store.args[0], (), store)
                return
            self._push(cost, frame, node.func.value, ())
        for one in (*node.args, *(keyword.value for keyword in node.keywords)):
            self._push(cost, frame, one, ())

    def _name(self, cost: int, frame: _Frame, name: str, path: _Path) -> None:
        """Where a name gets its value; of memory, what is put into it."""
        function = frame.function
        for store in self._own_stores.get((function.name, name), ()):
            self._push(cost, frame, store.args[0], (), store)
        assigned = False
        bound = [one for one in comprehensions(function) if name in _names(one.target)]
        for one in bound:
            self._push(cost + 1, frame, one.iter, ())
        for node in nearest_assignments(function):
            targets = targets_of(node)
            place = next((i for i, target in enumerate(targets) if target.id == name), None)
            if place is None or node.lineno in self.left_out or (bound and isinstance(node, ast.For)):
                continue
            assigned = True
            helper = len(self._calls.get(function.name, ())) >= _HELPER_CALLS
            if self._says_nothing(node, path) or (helper and isinstance(node, ast.AnnAssign)):
                continue
            # Of what a condition compares, a limit that is only passed on may be the wrong one.
            near = (
                self._deciding
                and cost <= 1
                and not isinstance(node, ast.For)
                and isinstance(node.value, (ast.Name, ast.Attribute))
            )
            self._quote(node if not isinstance(node, ast.For) else node.iter, near)
            # What decides whether it is this one.
            for test in self._tests(function, node):
                self._push(cost + 3, frame, test.test, (), test.test)
            value = node.iter if isinstance(node, ast.For) else node.value
            if value is not None:
                self._push(cost + 1, frame, value, (str(place), *path)[:2] if len(targets) > 1 else path)
        if name in [argument.arg for argument in function.args.args]:
            # Where it is assigned to as well, that says more.
            self._parameter(cost + 3 * assigned, frame, name, path)
        elif (
            not assigned and name in self._constants and name not in self._fields and says_value(self._constants[name])
        ):
            self._quote(self._constants[name])

    def _tests(self, function: Function, node: ast.AST) -> list[ast.If]:
        """Conditions of a function that a statement stands under, but for those of constants, which the compiler decides."""
        if function.name not in self._ifs:
            self._ifs[function.name] = [one for one in ast.walk(function) if isinstance(one, ast.If)]
        held = [one for one in self._ifs[function.name] if one.lineno < node.lineno <= (one.end_lineno or 0)]  # type: ignore[attr-defined]
        return [one for one in held if not is_constant(one.test)]

    def _says_nothing(self, node: Any, path: _Path) -> bool:
        """Whether a statement counts, makes an object whose fields are followed where they are read, or sets up the compiler."""
        if isinstance(node, ast.For):
            return False
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, int):
            return not self._counters
        if isinstance(node, ast.AnnAssign) and "constexpr" in ast.unparse(node.annotation):
            # Layouts are constants.
            return not says_value(node) and not self._layouts
        made = node.value
        if (
            not path
            and isinstance(made, ast.Call)
            and isinstance(made.func, ast.Name)
            and made.func.id in self._functions
        ):
            last = self._functions[made.func.id].body[-1]
            made = last.value if isinstance(last, ast.Return) else None
        return (
            not path and isinstance(made, ast.Call) and isinstance(made.func, ast.Name) and made.func.id in self._fields
        )

    def _parameter(self, cost: int, frame: _Frame, name: str, path: _Path) -> None:
        place = [argument.arg for argument in frame.function.args.args].index(name)
        if frame.call is not None and frame.caller is not None:
            calls = [(frame.caller, frame.call.args, frame.call)]
        else:
            calls = [(_Frame(f), args, call) for f, args, call in self._calls.get(frame.function.name, [])]  # type: ignore[misc]
        for caller, args, call in calls:
            named = [k.value for k in call.keywords if k.arg == name] if call is not None else []
            for one in named or args[place : place + 1]:
                # A field of a tuple passes through whole chains of calls untouched, until the place that makes the tuple.  What every
                # partition is given is less likely to be the cause than what one call passes on.
                self._push(cost + (0 if path else 1 if call is not None else 4), caller, one, path, call)


def _telling(node: Any) -> list[int]:
    """Lines of a statement: of several the first, and those that do more than to name an argument."""
    there = {one.lineno for one in ast.walk(node) if isinstance(one, (ast.BinOp, ast.Call, ast.Compare, ast.IfExp))}
    return [line for line in lines_of(node) if line == node.lineno or line in there]


def _names(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
