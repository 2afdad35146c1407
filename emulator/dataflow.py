"""Which lines the values of a statement come from: a backward slice through calls, fields of named tuples and memory of the chip.

Nearest first.  A tuple that a function returns is followed element by element, a field of a named tuple by its name, what is
loaded from shared or tensor memory to what is stored in memory of that name, and a parameter to the calls: those of the
run where they are known, else all of the file.
"""

from __future__ import annotations

import ast
import heapq
import itertools
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tilecast.emulator.expressions import (
    SIGNALS,
    WAITS,
    Function,
    argument_of,
    arguments,
    base_name,
    fields_of,
    hides_scores,
    last_name,
    lines_of,
    makes_layout,
    memory_name,
    nearest_assignments,
    of_language,
    on_chip,
    says_value,
    targets_of,
)
from tilecast.emulator.origins import by_turns

#: A function that is called from so many places is a helper: what it computes is less likely to be the cause.
_HELPER_CALLS, _HELPER_COST = 4, 3
#: What is followed first costs so much less.
_PREFERRED = 50
#: Attributes of a tensor that say nothing of its values.
_NO_VALUES = {"layout", "type", "shape", "dtype", "element_ty"}
#: Methods that move values.
_MOVES = {"load", "store", "convert_layout", "split", "join", "to", "index", "slice", "permute", "reshape"}
#: Arguments of a call that may be mixed up.
_SEVERAL = 3
#: Of so many lines one may be one that only passes a value on.
_PASSED = 6
#: Calls that say which program runs, and how many there are.
_NUMBERS = {"program_id", "num_programs"}
#: Statements of a function that is short.
_SHORT = 3
#: Steps that are followed at most.
_STEPS = 2000

_Path = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Frame:
    """A function, and the call that it runs for: None where that is not known."""

    function: Function
    call: ast.Call | None = None
    caller: _Frame | None = None


class Dataflow:
    """The slices of one file."""

    def __init__(self, tree: ast.Module) -> None:
        self._functions = {node.name: node for node in tree.body if isinstance(node, Function)}
        self._constants: dict[str, ast.Assign | ast.AnnAssign] = {}
        #: Fields of named tuples and classes, by name.
        self._fields: dict[str, list[str]] = {}
        for node in tree.body:
            if isinstance(node, (ast.Assign, ast.AnnAssign)):
                for target in targets_of(node):
                    self._constants[target.id] = node
                    fields = fields_of(node.value)
                    if fields:
                        self._fields[target.id] = fields
            elif isinstance(node, ast.ClassDef):
                self._fields[node.name] = [
                    n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
                ]
        #: Names that statements at the top read.
        self._outside = {
            n.id
            for node in tree.body
            if not isinstance(node, Function)
            for n in ast.walk(node)
            if isinstance(n, ast.Name)
        }
        #: Calls of each function, and stores to memory by the last attribute before them; each with where it stands.
        self._calls: dict[str, list[tuple[Function, list[ast.expr], ast.Call | None]]] = {}
        self._stores: dict[str, list[tuple[Function, ast.Call]]] = {}
        #: Stores to global memory, by the name of the tensor.
        self._global_stores: dict[str, list[tuple[Function, ast.Call]]] = {}
        #: Stores to memory that a function knows by a name of its own, by function and name.
        self._own_stores: dict[tuple[str, str], list[ast.Call]] = {}
        for function in self._functions.values():
            for part in ast.walk(function):
                self._note(function, part)
        #: What is left to follow, cheapest first: (cost, number, (frame, name or expression, field, statement to quote)).
        self._queue: list[tuple[int, int, Any]] = []
        self._number = itertools.count()
        self._found: dict[int, None] = {}
        self._passed: dict[int, None] = {}
        self._seen: set[Any] = set()
        self._right: Container[str] = ()
        self._products, self._prefer, self._layouts, self._counters = False, "", False, False
        #: Lines of statements that the run in question did not execute: nothing came from them.
        self.left_out: frozenset[int] = frozenset()
        self._ifs: dict[str, list[ast.If]] = {}

    def _note(self, function: Function, node: ast.AST) -> None:
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name):
                self._calls.setdefault(node.func.id, []).append((function, node.args, node))
            elif of_language(node, "store") and len(node.args) > 1:
                for name in self._tensors(function, node.args[0]):
                    self._global_stores.setdefault(name, []).append((function, node))
            elif isinstance(node.func, ast.Attribute) and node.func.attr == "store" and len(node.args) == 1:
                own = base_name(node.func.value)
                if own:
                    self._own_stores.setdefault((function.name, own), []).append(node)
                name = self._memory_of(function, node.func.value)
                if name:
                    self._stores.setdefault(name, []).append((function, node))
        if isinstance(node, ast.Tuple) and len(node.elts) == 2 and isinstance(node.elts[0], ast.Name):
            # A partition and its arguments.
            role, given = node.elts
            if isinstance(role, ast.Name) and role.id in self._functions and isinstance(given, ast.Tuple):
                self._calls.setdefault(role.id, []).append((function, given.elts, None))

    def _tensors(self, function: Function, pointer: ast.expr, depth: int = 3) -> set[str]:
        """Names of the tensor in global memory that a pointer begins with, as fields and parameters have them."""
        while isinstance(pointer, (ast.BinOp, ast.Call)):
            if isinstance(pointer, ast.Call) and not isinstance(pointer.func, ast.Attribute):
                return set()
            pointer = pointer.left if isinstance(pointer, ast.BinOp) else pointer.func.value  # type: ignore[attr-defined]
        if isinstance(pointer, ast.Attribute):
            return {pointer.attr.removesuffix("_ptr")}
        if not isinstance(pointer, ast.Name):
            return set()
        values = [
            n.value
            for n in nearest_assignments(function)
            if isinstance(n, ast.Assign) and pointer.id in [t.id for t in targets_of(n)] and depth
        ]
        inner = {name for value in values for name in self._tensors(function, value, depth - 1)}
        return inner or {pointer.id.removesuffix("_ptr")}

    def _memory_of(self, function: Function, node: ast.expr) -> str:
        """The memory that an expression is a view of, also by a name of its own or by a function that makes one."""
        own = base_name(node)
        if not own:
            return memory_name(node)
        single = (
            n
            for n in nearest_assignments(function)
            if not isinstance(n, ast.For) and [t.id for t in targets_of(n)] == [own]
        )
        made = next((n.value for n in single if n.value is not None), None)
        if isinstance(made, ast.Call) and isinstance(made.func, ast.Name) and made.func.id in self._functions:
            last = self._functions[made.func.id].body[-1]
            made = last.value if isinstance(last, ast.Return) else None
        return memory_name(made) if made is not None else ""

    def stores(self, name: str) -> list[int]:
        """Lines that store to memory of this name."""
        return [call.lineno for _, call in self._stores.get(name, [])]

    def given(self, name: str, silent: Container[str] = ()) -> list[tuple[int, int]]:
        """(line, place of the argument) of the calls that are given memory ``ring.full``, also under a name of their own or by a
        parameter's; those of the functions that these call come first.  Where nobody calls it that: memory ``full`` of whatever.
        ``silent``: functions that do not count."""
        owner, _, last = name.rpartition(".")
        found: dict[tuple[int, int], bool] = {}
        for function in self._on_chip():
            for node, place, one in arguments(function, silent):
                called = node.func.id if isinstance(node.func, ast.Name) else ""
                if called not in self._fields and self._memory_of(function, one) == last:
                    named = f".{self._made_of(function, one)}" == f".{owner}"
                    inner = list(self._handed(called, place, silent))
                    if inner or called not in self._functions:
                        for at in (*inner, (node.lineno, place)):
                            found[at] = named or found.get(at, False)
        return [at for at, named in found.items() if named] or list(found)

    def waiting(self, name: str) -> list[int]:
        """Lines that wait for memory ``ring.full``; of a helper that waits for its own ring's, the calls that are given ``ring``."""
        owner, _, last = name.rpartition(".")
        found: dict[int, None] = {}
        for function in self._on_chip():
            for node, place, one in arguments(function, ()):
                if last_name(node.func) in WAITS and not place and self._memory_of(function, one) == last:
                    if self._made_of(function, one) in ("", owner):
                        found[node.lineno] = None
                    for _, given, call in self._calls.get(function.name, ()):
                        if call is not None and owner in [last_name(argument) for argument in given]:
                            found[call.lineno] = None
        return list(found)

    def beside(self, name: str, silent: Container[str] = ()) -> list[tuple[int, int]]:
        """As `given`, of the barriers that belong to what ``ring.full`` belongs to and have other names."""
        owner, _, last = name.rpartition(".")
        held = {
            (self._made_of(function, one), self._memory_of(function, one)): None
            for function in self._on_chip()
            for _, _, one in arguments(function, ())
        }
        # A function may know it by a parameter's name.
        known = owner and any(one == owner for one, _ in held)
        owners = {owner} if known else {one for one, other in held if other == last}
        names = [
            f"{one}.{other}" for one, other in held if one in owners and one and other not in ("", last, *_NO_VALUES)
        ]
        return [at for other in names for at in self.given(other, silent)]

    def _on_chip(self) -> list[Function]:
        """Functions that are no host code."""
        return [function for function in self._functions.values() if on_chip(function)]

    def unused(self) -> list[str]:
        """Functions for the chip whose names stand nowhere else in the file: what was to call them does not."""
        read = {n.id for f in self._functions.values() for n in ast.walk(f) if isinstance(n, ast.Name)}
        return [
            function.name
            for function in self._on_chip()
            if function.name not in read and function.name not in self._outside
        ]

    def unread(self) -> list[tuple[str, str, list[int]]]:
        """Parameters and names of the chip's functions that nothing reads: (name, function, where it might be: its assignment, or the
        statements of a short function)."""
        found = []
        for function in self._on_chip():
            read = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
            body = [
                one for one in function.body if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))
            ]
            short = [line for one in body for line in lines_of(one)] if len(body) <= _SHORT else [function.lineno]
            names = [one.arg for one in function.args.args if one.arg != one.arg.upper()]
            found += [(name, function.name, short) for name in names if name not in read]
            for node in nearest_assignments(function):
                single = (
                    targets_of(node) if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) else []
                )
                found += [(one.id, function.name, [node.lineno]) for one in single if one.id not in read]
        return [one for one in found if not self.left_out.issuperset(one[2])]

    def not_entered(self) -> list[int]:
        """Lines of loops and conditions of the chip's functions that ran and let nobody in, those of loops first."""
        heads = [
            node
            for function in self._on_chip()
            for node in ast.walk(function)
            if isinstance(node, (ast.For, ast.While, ast.If))
            and node.lineno not in self.left_out
            and node.body[0].lineno in self.left_out
            and not (isinstance(node, ast.If) and _is_constant(node.test))
        ]
        return [node.body[0].lineno for node in sorted(heads, key=lambda node: isinstance(node, ast.If))]

    def assigned(self, name: str) -> list[int]:
        """Lines of kernels that assign to a name."""
        nodes = (n for f in self._on_chip() for n in nearest_assignments(f) if not isinstance(n, ast.For))
        return [line for n in nodes if name in [t.id for t in targets_of(n)] for line in lines_of(n)]

    def not_initialised(self) -> list[tuple[str, int]]:
        """Memory for barriers that no ``init`` is about: its name where it is made, and that line."""
        initialised = {
            name
            for function in self._on_chip()
            for node in ast.walk(function)
            if isinstance(node, ast.Call) and last_name(node.func) == "init" and node.args
            for name in self._known_as(function, node.args[0])
        }
        made = (
            (function, node)
            for function in self._on_chip()
            for node in nearest_assignments(function)
            if not isinstance(node, ast.For) and node.value is not None and "MBarrierLayout" in ast.unparse(node.value)
        )
        return [
            (target.id, node.lineno)
            for function, node in made
            for target in targets_of(node)
            if not self._known_as(function, target) & initialised
        ]

    def numbered(self) -> list[int]:
        """Lines of kernels that ask which program runs, or how many there are: who does what begins there."""
        return [
            statement.lineno
            for function in self._on_chip()
            for statement in ast.walk(function)
            if isinstance(statement, (ast.Assign, ast.AugAssign, ast.Return))
            and any(last_name(n.func) in _NUMBERS for n in ast.walk(statement) if isinstance(n, ast.Call))
            and statement.lineno not in self.left_out
        ]

    def tensor_maps(self) -> list[int]:
        """Lines of functions that make tensor maps."""
        names = (n for f in self._functions.values() for n in ast.walk(f) if isinstance(n, ast.Name))
        return list(dict.fromkeys(name.lineno for name in names if name.id == "TensorDescriptor"))

    def one_sided(self) -> list[tuple[str, list[int], str]]:
        """Barriers that somebody signals and nobody waits for, or the other way round: (name, lines of the side there is, what is missing)."""
        waits: list[tuple[str, set[str], int]] = []
        signals: list[tuple[str, set[str], int]] = []
        others: set[str] = set()
        for function in self._on_chip():
            for node, place, one in arguments(function, {"init", "invalidate"}):
                if isinstance(node.func, ast.Name) and self._is_own(node.func.id):
                    continue
                called, names = last_name(node.func), self._known_as(function, one)
                side = None if place else waits if called == "wait" else signals if called in SIGNALS else None
                if side is None:
                    others |= names
                elif names:
                    side.append((memory_name(one) or base_name(one), names, node.lineno))
        waited = {name for _, names, _ in waits for name in names}
        signalled = others | {name for _, names, _ in signals for name in names}
        found: dict[tuple[str, str], list[int]] = {}
        for sites, there, what in (
            (signals, waited, "nobody waits for it"),
            (waits, signalled, "nobody signals it"),
        ):
            for name, names, line in sites:
                if not names & there:
                    found.setdefault((name, what), []).append(line)
        return [(name, lines, what) for (name, what), lines in found.items()]

    def _known_as(self, function: Function, node: ast.expr, depth: int = 4) -> set[str]:
        """Last names of memory, also under other names: what a name of the function's own, a parameter or a field stands for."""
        while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            node = node.func.value
        if isinstance(node, ast.Attribute):
            given = [one for fields in self._makers(node.attr) for one in fields] if depth else []
            return {node.attr}.union(*(self._known_as(f, one, depth - 1) for f, one in given))
        if not isinstance(node, ast.Name):
            return set()
        own, names = node.id, [argument.arg for argument in function.args.args]
        values = [
            n.value
            for n in nearest_assignments(function)
            if not isinstance(n, ast.For) and [t.id for t in targets_of(n)] == [own] and n.value is not None
        ]
        given = [(function, value) for value in values]
        if own in names:
            place = names.index(own)
            given += [
                (caller, args[place]) for caller, args, _ in self._calls.get(function.name, ()) if place < len(args)
            ]
        found = {name for f, one in given if depth for name in self._known_as(f, one, depth - 1)}
        return found or {own}

    def makers(self, name: str) -> list[int]:
        """Lines that make the tuple of memory ``ring.full``; where none is called that, those of all with such a field."""
        owner, _, field = name.rpartition(".")
        found: dict[int, bool] = {}
        for kind, fields in self._fields.items():
            for function, _, call in self._calls.get(kind, ()) if field in fields else ():
                if call is not None:
                    targets = [
                        t.id for n in nearest_assignments(function) if call.lineno in lines_of(n) for t in targets_of(n)
                    ]
                    found[call.lineno] = owner in targets
        return [line for line, named in found.items() if named] or list(found)

    def callers(self, line: int) -> list[int]:
        """Lines that call the function which a line stands in."""
        inside = self._inside(line)
        calls = self._calls.get(inside.name, ()) if inside is not None else ()
        return [call.lineno for _, _, call in calls if call is not None]

    def _makers(self, field: str) -> Iterator[list[tuple[Function, ast.expr]]]:
        """What is given for a field where tuples that have it are made."""
        for kind, fields in self._fields.items():
            if field in fields:
                yield [
                    (function, args[fields.index(field)])
                    for function, args, _ in self._calls.get(kind, ())
                    if fields.index(field) < len(args) and not any(isinstance(one, ast.Starred) for one in args)
                ]

    def _inside(self, line: int) -> Function | None:
        """The function that a line stands in."""
        return next((f for f in self._functions.values() if line in lines_of(f)), None)

    def beside_each_other(self, line: int, others: Sequence[int]) -> bool:
        """Whether a line stands in a function that one of the others stands in."""
        inside = self._inside(line)
        return inside is not None and any(other in lines_of(inside) for other in others)

    def counts(self, places: Sequence[int]) -> list[int]:
        """Statements like ``n += 1``, and where such a number starts, of the chip's functions that the places stand in, and of those
        that call these."""
        first = {f.name: f for place in places if (f := self._inside(place)) is not None}
        calling = [f for name in list(first) for f, _, call in self._calls.get(name, ()) if call is not None]
        functions = {f.name: f for f in (*first.values(), *calling) if on_chip(f)}
        found: list[int] = []
        for function in functions.values():
            constant = [
                node
                for node in nearest_assignments(function)
                if not isinstance(node, ast.For)
                and isinstance(node.value, ast.Constant)
                and type(node.value.value) is int
            ]
            steps = [node for node in constant if isinstance(node, ast.AugAssign)]
            counted = {target.id for node in steps for target in targets_of(node)}
            starts = [node for node in constant if node not in steps and counted & {t.id for t in targets_of(node)}]
            found += [node.lineno for node in (*steps, *starts)]
        return found

    def signals_and_waits(self, line: int, count: int = 1, depth: int = 1) -> list[int]:
        """Of the function that ``line`` stands in: the ``count`` waits that come last before it, the nearest first, and the signals
        that come first after it; of those by functions of the file the lines in there, too.  Of a helper that does neither, those about its
        calls."""
        inside = self._inside(line)
        calls = [n for n in ast.walk(inside) if isinstance(n, ast.Call)] if inside is not None else []
        if not any(self._does(n, WAITS) or self._does(n, SIGNALS) for n in calls) and depth:
            # A helper: its callers do.
            return [
                place for at in self.callers(line)[:count] for place in self.signals_and_waits(at, count, depth - 1)
            ]
        waits = sorted((found for n in calls if n.lineno < line and (found := self._does(n, WAITS))), reverse=True)
        signals = sorted(found for n in calls if n.lineno > line and (found := self._does(n, SIGNALS)))
        return [place for found in by_turns([waits[:count], signals[:count]]) for place in found]

    def _does(self, call: ast.Call, names: Container[str], depth: int = 1) -> list[int]:
        """The line of a call that is one of these, or of a function that does one, and the line there; empty for others."""
        name = last_name(call.func)
        if name in names:
            return [call.lineno]
        inner = ast.walk(self._functions[name]) if name in self._functions and depth else ()
        found = (self._does(one, names, depth - 1) for one in inner if isinstance(one, ast.Call))
        first = next((lines for lines in found if lines), [])
        return [call.lineno, *first] if first else []

    def _made_of(self, function: Function, node: ast.expr) -> str:
        """What stands before the last attribute of memory: ring, of ``ring.full.index(0)`` and of names for it."""
        own = base_name(node)
        values = [
            n.value
            for n in nearest_assignments(function)
            if own and not isinstance(n, ast.For) and own in [t.id for t in targets_of(n)]
        ]
        at = values[0] if values and values[0] is not None else node
        while isinstance(at, ast.Call) and isinstance(at.func, ast.Attribute):
            at = at.func.value
        return last_name(at.value) if isinstance(at, ast.Attribute) else ""

    def _handed(self, name: str, place: int, silent: Container[str], depth: int = 2) -> Iterator[tuple[int, int]]:
        """The calls of a function of the file that get its parameter at ``place``."""
        function = self._functions.get(name)
        if function is None or not depth or place >= len(function.args.args):
            return
        parameter = function.args.args[place].arg
        for node, number, one in arguments(function, silent):
            if base_name(one) == parameter:
                called = node.func.id if isinstance(node.func, ast.Name) else ""
                inner = list(self._handed(called, number, silent, depth - 1))
                yield from inner
                if inner or called not in self._functions:
                    yield node.lineno, number

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
        accumulators of wgmma are, and not only what comes after them; ``prefer``: names with this in them are followed first; ``layouts``: what makes
        layouts is, too; ``counters``: where they start, too; ``only``: nothing where the call has no such argument.
        """
        self._right, self._products, self._prefer, self._layouts = right, products, prefer, layouts
        self._counters = counters
        frame = self._frame(chain)
        if frame is None:
            return []
        self._queue, self._found, self._passed, self._seen = [], {}, {}, set()
        deciding = argument in ("around", "conditions")
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

    def _quote(self, node: Any) -> None:
        """Note a statement."""
        (self._found if self._computes(node) else self._passed).update(dict.fromkeys(_telling(node)))

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

    def _is_own(self, name: str) -> bool:
        """Whether a function or a class of named fields of the file is called that."""
        return name in self._functions or name in self._fields

    def _push(self, cost: int, frame: _Frame, what: str | ast.expr, path: _Path, quoted: ast.AST | None = None) -> None:
        """Follow a name or an expression when its turn comes, and quote the statement that it stands in."""
        key = (frame.function.name, what if isinstance(what, str) else id(what), path)
        if quoted is not None and getattr(quoted, "lineno", 0) in self.left_out:
            return
        if key not in self._seen:
            self._seen.add(key)
            name = what if isinstance(what, str) else getattr(what, "attr", "")
            if self._prefer and self._prefer in name and cost >= 0:
                cost -= _PREFERRED
            heapq.heappush(self._queue, (cost, next(self._number), (frame, what, path, quoted)))

    def _expression(self, cost: int, frame: _Frame, node: ast.expr, path: _Path) -> None:
        """What an expression reads; of its value, the field ``path``."""
        if isinstance(node, ast.Name):
            self._push(cost, frame, node.id, path)
        elif isinstance(node, ast.Attribute):
            if node.attr not in _NO_VALUES:
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
            # A field of what it returns comes from one place, whoever calls.
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
        bound = [one for one in ast.walk(function) if isinstance(one, ast.comprehension) and name in _names(one.target)]
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
            self._quote(node if not isinstance(node, ast.For) else node.iter)
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
        return [one for one in held if not _is_constant(one.test)]

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
                # A field of a tuple passes through whole chains of calls untouched, until somebody makes the tuple.  What every
                # partition is given is less likely to be the cause than what one call passes on.
                self._push(cost + (0 if path else 1 if call is not None else 4), caller, one, path, call)


def _is_constant(test: ast.expr) -> bool:
    """Whether a condition is about constants, which the compiler decides."""
    return not any(n.id.upper() != n.id for n in ast.walk(test) if isinstance(n, ast.Name))


def _telling(node: Any) -> list[int]:
    """Lines of a statement: of several the first, and those that do more than to name an argument."""
    there = {one.lineno for one in ast.walk(node) if isinstance(one, (ast.BinOp, ast.Call, ast.Compare, ast.IfExp))}
    return [line for line in lines_of(node) if line == node.lineno or line in there]


def _names(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
