"""What the functions of a file do with memory and barriers: who makes, initialises, stores, waits, signals, and who calls whom."""

from __future__ import annotations

import ast
from collections.abc import Container, Iterator, Sequence

from tilecast.emulator.expressions import (
    SIGNALS,
    WAITS,
    Function,
    arguments,
    base_name,
    fields_of,
    is_constant,
    last_name,
    lines_of,
    memory_name,
    nearest_assignments,
    of_language,
    on_chip,
    targets_of,
    walk,
)
from tilecast.emulator.origins import by_turns

#: Attributes of a tensor that say nothing of its values.
NO_VALUES = {"layout", "type", "shape", "dtype", "element_ty"}
#: Calls that say which program runs, and how many there are.
_NUMBERS = {"program_id", "num_programs"}
#: Statements of a function that is short.
_SHORT = 3


class Uses:
    """The functions of one file, and what they do with each other and with memory."""

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
            n.id for node in tree.body if not isinstance(node, Function) for n in walk(node) if isinstance(n, ast.Name)
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
        #: Lines of statements that the run in question did not execute: nothing came from them.
        self.left_out: frozenset[int] = frozenset()

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
        parameter's; those of the functions that these call come first.  Where no caller calls it that: memory ``full`` of whatever.
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
            f"{one}.{other}" for one, other in held if one in owners and one and other not in ("", last, *NO_VALUES)
        ]
        return [at for other in names for at in self.given(other, silent)]

    def _on_chip(self) -> list[Function]:
        """Functions that are no host code."""
        return [function for function in self._functions.values() if on_chip(function)]

    def unused(self) -> list[str]:
        """Functions for the chip whose names stand nowhere else in the file: what was to call them does not."""
        read = {n.id for f in self._functions.values() for n in walk(f) if isinstance(n, ast.Name)}
        return [
            function.name
            for function in self._on_chip()
            if function.name not in read and function.name not in self._outside
        ]

    def unread(self) -> list[tuple[str, str, list[int]]]:
        """Parameters and names of the chip's functions that nothing reads: (name, function, where it might be: its assignment, the
        statements of a short function, or those that read the parameters beside it)."""
        found = []
        for function in self._on_chip():
            read = {n.id for n in walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
            body = [
                one for one in function.body if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))
            ]
            short = [line for one in body for line in lines_of(one)] if len(body) <= _SHORT else [function.lineno]
            names = [one.arg for one in function.args.args if one.arg != one.arg.upper()]
            for number, name in enumerate(names):
                if name not in read:
                    beside = {*names[max(number - 1, 0) : number], *names[number + 1 : number + 2]}
                    places = [line for one in body if len(body) > _SHORT for line in _reading(one, beside)]
                    found.append((name, function.name, list(dict.fromkeys(places)) or short))
            for node in nearest_assignments(function):
                single = (
                    targets_of(node) if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) else []
                )
                found += [(one.id, function.name, [node.lineno]) for one in single if one.id not in read]
        return [one for one in found if not self.left_out.issuperset(one[2])]

    def not_entered(self) -> list[int]:
        """Lines of loops and conditions of the chip's functions that ran and were never entered, those of loops first."""
        heads = [
            node
            for function in self._on_chip()
            for node in ast.walk(function)
            if isinstance(node, (ast.For, ast.While, ast.If))
            and node.lineno not in self.left_out
            and node.body[0].lineno in self.left_out
            and not (isinstance(node, ast.If) and is_constant(node.test))
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
        """Barriers that a role signals and none waits for, or the other way round: (name, lines of the side there is, what is missing)."""
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
            (signals, waited, "no role waits for it"),
            (waits, signalled, "no role signals it"),
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

    def _is_own(self, name: str) -> bool:
        """Whether a function or a class of named fields of the file is called that."""
        return name in self._functions or name in self._fields


def _reading(statement: ast.stmt, names: Container[str]) -> list[int]:
    """Lines of a statement that read one of these names."""
    return [
        n.lineno
        for n in ast.walk(statement)
        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load) and n.id in names
    ]
