"""The kernel's file, and files beside it that it imports: loading them with stand-ins for Triton, and which line is running."""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import itertools
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tilecast.base.text_file import read_text
from tilecast.emulator.dataflow import Dataflow
from tilecast.emulator.errors import RequestError, UnsupportedError
from tilecast.emulator.expressions import fields_of, walk
from tilecast.emulator.origins import origins
from tilecast.model.kernel.header import HeaderError, read_header
from tilecast.model.kernel.workload import Workload

#: What a loop's condition says of a number, in the names of a file that is executed.
COUNTED = "__counted__"
#: What files call in place of the method ``to``, which Python's own numbers do not have.
CONVERTED = "__to__"


def _parsed(text: str, path: str) -> ast.Module:
    try:
        return ast.parse(text, path)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = f" line {error.lineno}:" if isinstance(error, SyntaxError) else ""
        reason = error.msg if isinstance(error, SyntaxError) else error
        raise RequestError(f"{path}:{line} expected a kernel file, got no Python: {reason}") from None


#: Rewrites the syntax tree of a file before it is executed.
Change = Callable[[ast.Module], ast.Module]

#: Places are numbers, so that shadow memories can keep them in arrays: file << FILE_SHIFT | line.
FILE_SHIFT = 20


class _File:
    """Text of one file, and the names that its lines assign to."""

    def __init__(self, path: str, text: str) -> None:
        self.path, self.lines = path, text.splitlines()
        self.targets: dict[int, str] = {}
        #: Lines of functions that assign what they return: their callers name it.
        self.returned: set[int] = set()
        #: Lines of the conditions that a line stands under.
        self.under: dict[int, list[int]] = {}
        tree = self.tree = _parsed(text, path)
        nodes = walk(tree)
        #: Whether it takes columns of memory apart.
        self.slices_columns = any(_slices_columns(node) for node in nodes)
        #: Fields of named tuples; statements that make one, or several values, by line: what is made gets names of those.
        self._fields = {
            node.targets[0].id: fields_of(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }
        self._makers: dict[int, ast.Assign | ast.Return] = {}
        #: Of functions that end with several values, which of them a line assigns.
        self._places: dict[int, int] = {}
        for node in nodes:
            if isinstance(node, (ast.Assign, ast.Return)) and isinstance(node.value, (ast.Call, ast.Tuple)):
                self._makers.update(dict.fromkeys(range(node.lineno, (node.end_lineno or node.lineno) + 1), node))
            if isinstance(node, ast.If):
                for line in range(node.body[0].lineno, (node.body[-1].end_lineno or 0) + 1):
                    self.under.setdefault(line, []).append(node.lineno)
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                    self.targets[line] = node.targets[0].id
        for function in (node for node in nodes if isinstance(node, ast.FunctionDef)):
            last = function.body[-1]
            if isinstance(last, ast.Return) and isinstance(last.value, ast.Name):
                lines = range(function.lineno, last.lineno)
                self.returned |= {line for line in lines if self.targets.get(line) == last.value.id}
            elif isinstance(last, ast.Return) and isinstance(last.value, ast.Tuple):
                names = [one.id if isinstance(one, ast.Name) else "" for one in last.value.elts]
                for line in range(function.lineno, last.lineno):
                    if self.targets.get(line) in names:
                        self._places[line] = names.index(self.targets[line])

    def name_at(self, frame: types.FrameType, inner: int | None) -> tuple[str, int | None]:
        """(name that a running statement gives to what is made in it, its place among what its function returns).

        ``inner``: the place of it among several values that a call of the statement returns.
        """
        line = frame.f_lineno
        name, place = self.targets.get(line, ""), self._places.get(line)
        if line in self.returned or place is not None:
            name = ""
        maker = self._makers.get(line)
        value = maker.value if maker is not None else None
        targets = maker.targets[0] if isinstance(maker, ast.Assign) else None
        if isinstance(targets, ast.Tuple):
            number = _running(frame, value.elts) if isinstance(value, ast.Tuple) else inner
            if number is not None and number < len(targets.elts) and isinstance(targets.elts[number], ast.Name):
                name = targets.elts[number].id  # type: ignore[attr-defined]
        elif isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and self._fields.get(value.func.id):
            number = _running(frame, value.args)
            fields = self._fields[value.func.id]
            if number is not None and number < len(fields):
                name = f"{name}.{fields[number]}" if name else fields[number]
        return name, place


#: A kernel is run many times, on other inputs and in another order; a file is read the same each time.
_file = functools.lru_cache(maxsize=16)(_File)


class _Rewritten(ast.NodeTransformer):
    """``while x < end`` bounds x as ``for x in range(end)`` does: in its body x is `COUNTED` of both.  ``x.to(type)`` is `CONVERTED`: what a
    comparison of scalars gives is Python's own."""

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        match node.func:
            case ast.Attribute(value, "to"):
                made = ast.Call(ast.Name(CONVERTED, ast.Load()), [value, *node.args], node.keywords)
                return ast.fix_missing_locations(ast.copy_location(made, node))
        return node

    def visit_While(self, node: ast.While) -> ast.While:
        self.generic_visit(node)
        match node.test:
            case ast.Compare(ast.Name(name), [ast.Lt()], [end]):
                value = ast.Call(ast.Name(COUNTED, ast.Load()), [ast.Name(name, ast.Load()), end], [])
                bounded = ast.Assign([ast.Name(name, ast.Store())], value)
                node.body.insert(0, ast.fix_missing_locations(ast.copy_location(bounded, node)))
        return node


@functools.lru_cache(maxsize=16)
def _code(path: str, text: str) -> types.CodeType:
    return compile(_Rewritten().visit(_parsed(text, path)), path, "exec")


def _running(frame: types.FrameType, expressions: Sequence[ast.expr]) -> int | None:
    """Which of some expressions of the running statement is being evaluated."""
    position = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), None)
    if position is None or position[0] is None or position[2] is None:
        return None
    at = (position[0], position[2])
    for number, one in enumerate(expressions):
        if (one.lineno, one.col_offset) <= at < (one.end_lineno or 0, one.end_col_offset or 0):
            return number
    return None


def _slices_columns(node: ast.AST) -> bool:
    """Whether it is a call ``x.slice(start, length, dim)`` of another dimension than the first."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr != "slice":
        return False
    named = [one.value for one in node.keywords if one.arg == "dim"]
    return any(not isinstance(one, ast.Constant) or one.value for one in (*node.args[2:], *named))


class Source:
    """A kernel file, as text and as names per line; files beside it join when they are imported."""

    def __init__(self, path: Path | str, text: str | None = None) -> None:
        self.path = str(path)
        self.text = read_text(self.path, "the kernel", RequestError) if text is None else text
        self._files = [_file(self.path, self.text)]
        self._numbers = {self.path: 0}

    @property
    def slices_columns(self) -> bool:
        """Whether the files take columns of memory apart, so that a row has more than one cell."""
        return any(file.slices_columns for file in self._files)

    def header(self) -> dict[str, Any]:
        """The TILECAST dict at the top; UnsupportedError where the file has none."""
        try:
            return read_header(self.text, self.path)
        except HeaderError as error:
            own = "of a kernel of your own, --call 'function(arguments)' or --main says what to run"
            raise UnsupportedError(f"{error}; {own}") from None

    def workload(self) -> Workload:
        """The workload that the header says the kernel was written for; UnsupportedError where it says none."""
        written: Any = self.header().get("workload")
        try:
            return Workload.from_dict(written)
        except (TypeError, ValueError) as error:
            got = "none" if written is None else error
            raise UnsupportedError(f"{self.path}: expected a workload in the TILECAST header, got {got}") from None

    def line(self) -> int:
        """The innermost place in these files that is running now; 0 when none is."""
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None:
            number = self._numbers.get(frame.f_code.co_filename)
            if number is not None:
                return number << FILE_SHIFT | frame.f_lineno
            frame = frame.f_back
        return 0

    def calls(self, of: types.FrameType | None = None) -> list[int]:
        """Places in these files that are running now (``of``: of a coroutine that waits), innermost first."""
        found: list[int] = []
        frame: types.FrameType | None = of or sys._getframe(1)
        while frame is not None:
            number = self._numbers.get(frame.f_code.co_filename)
            if number is not None:
                found.append(number << FILE_SHIFT | frame.f_lineno)
            frame = frame.f_back
        return found

    def target(self) -> str:
        """Names that the running statement and those that called it assign to, as in ``ring.full``; empty without one."""
        names: list[str] = []
        place: int | None = None
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None:
            number = self._numbers.get(frame.f_code.co_filename)
            if number is not None:
                name, place = self._files[number].name_at(frame, place)
                names += [name] if name else []
            frame = frame.f_back
        return ".".join(reversed(names))

    def conditions(self, line: int) -> list[int]:
        """Places of the conditions that a place stands under."""
        number = line >> FILE_SHIFT
        found = self._files[number].under.get(line & ((1 << FILE_SHIFT) - 1), [])
        return [number << FILE_SHIFT | one for one in found]

    def computed(self, line: int, what: str = "around") -> list[int]:
        """Places that decide whether a place runs, or (``what="values"``) what it computes: `origins.origins`."""
        number = line >> FILE_SHIFT
        found = origins(self._files[number].tree, line & ((1 << FILE_SHIFT) - 1), what)
        return [number << FILE_SHIFT | one for one in found]

    def values(self, chain: Sequence[int], limit: int, argument: int | str = 0, **stops: Any) -> list[int]:
        """Places that an argument of the call at ``chain[0]`` gets its value from (`Dataflow.lines`); none outside the first file."""
        own = list(itertools.takewhile(lambda place: not place >> FILE_SHIFT, chain))
        return self.dataflow.lines(own, limit, argument, **stops)

    @functools.cached_property
    def dataflow(self) -> Dataflow:
        """Where values of the first file come from."""
        return Dataflow(self._files[0].tree)

    def quote(self, line: int) -> str:
        """A place for an error message; the first file goes without its name."""
        number, line = line >> FILE_SHIFT, line & ((1 << FILE_SHIFT) - 1)
        lines = self._files[number].lines
        if not 0 < line <= len(lines):
            return "outside the kernel's file"
        where = f"{Path(self._files[number].path).name} " if number else ""
        return f"{where}line {line}: {lines[line - 1].strip()}"

    def frames_of(self, error: BaseException) -> list[int]:
        """The places in these files that an exception came through, the last one first."""
        trace, found = error.__traceback__, []
        while trace is not None:
            number = self._numbers.get(trace.tb_frame.f_code.co_filename)
            if number is not None:
                found.append(number << FILE_SHIFT | trace.tb_lineno)
            trace = trace.tb_next
        return found[::-1]

    def quote_of(self, error: BaseException) -> str:
        """The place in these files that an exception came through last."""
        return self.quote((self.frames_of(error) or [0])[0])

    def quote_of_frames(self, frames: Sequence[tuple[str, int]]) -> str:
        """The first of (file, line) pairs that lies in these files."""
        for path, line in frames:
            if path in self._numbers:
                return self.quote(self._numbers[path] << FILE_SHIFT | line)
        return self.quote(0)

    def part_of(self, place: tuple[str, int], columns: tuple[int, int] | None) -> str:
        """The text between two columns (of bytes) of a (file, line); empty where it is not known."""
        number = self._numbers.get(place[0])
        if columns is None or number is None:
            return ""
        line = self._files[number].lines[place[1] - 1].encode()
        return line[columns[0] : columns[1]].decode(errors="replace").strip()

    def load(
        self, modules: Mapping[str, types.ModuleType], replaced: Mapping[str, Any], name: str = "emulated_kernel",
        change: Change | None = None,
    ) -> types.ModuleType:  # fmt: skip
        """Execute the file; imports of triton see ``modules``, and names in ``replaced`` hide builtins.

        Files of its folder that it imports are executed alike; ``name`` is what the file sees as ``__name__``;
        ``change`` may rewrite the first file, whose statements keep their lines.
        """
        return _Loader(self, modules, replaced).execute(self._files[0].path, self.text, name, change)

    def define(self, module: types.ModuleType, text: str, change: ast.NodeTransformer | None = None) -> None:
        """Execute a definition of the first file again in its module, at the lines where ``text`` has it."""
        tree = _Rewritten().visit(ast.parse(text, self.path))
        exec(compile(change.visit(tree) if change else tree, self.path, "exec"), module.__dict__)

    def add(self, path: str) -> str:
        """The text of another file, whose lines are known from now on."""
        text = read_text(path, "an imported file", RequestError)
        self._numbers[path] = len(self._files)
        self._files.append(_file(path, text))
        return text


class _Loader:
    """Executes files that see stand-ins for Triton, and the files beside them that they import."""

    def __init__(self, source: Source, modules: Mapping[str, types.ModuleType], replaced: Mapping[str, Any]) -> None:
        self._source, self._modules, self._replaced = source, modules, replaced
        self._folder = Path(source.path).parent
        self._loaded: dict[str, types.ModuleType] = {}
        # Only the files that are emulated see it: what they import by name must get the stand-ins too.
        self._importlib = types.ModuleType("importlib")
        self._importlib.__dict__.update(vars(importlib), import_module=self._import_module)

    def execute(self, path: str, text: str, name: str, change: Change | None = None) -> types.ModuleType:
        """One file as a module."""
        module = types.ModuleType(name)
        module.__file__ = path
        module.__dict__.update(
            {
                COUNTED: lambda value, _end: value,
                CONVERTED: lambda value, *to, **named: value.to(*to, **named),
                **self._replaced,
            }
        )
        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": self._import}
        self._loaded[path] = module
        code = compile(change(_Rewritten().visit(_parsed(text, path))), path, "exec") if change else _code(path, text)
        exec(code, module.__dict__)
        return module

    def _beside(self, name: str) -> types.ModuleType | None:
        path = self._folder.joinpath(*name.split(".")).with_suffix(".py")
        if not name or not path.is_file():
            return None
        known = self._loaded.get(str(path))
        return known or self.execute(str(path), self._source.add(str(path)), name)

    def _import_module(self, name: str, package: str | None = None) -> Any:
        if name.split(".")[0] == "triton":
            return self._stand_in(name)
        return self._beside(name.removeprefix(".")) or importlib.import_module(name, package)

    def _stand_in(self, name: str) -> types.ModuleType:
        if name not in self._modules:
            raise UnsupportedError(f"{self._source.path}: imports {name}, which the emulator does not have")
        return self._modules[name]

    def _import(self, name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        if level == 0 and name.split(".")[0] == "triton":
            module = self._stand_in(name)
            return module if fromlist else self._modules["triton"]
        if level == 0 and name in self._modules:
            return self._modules[name]
        if name == "importlib":
            return self._importlib
        found = self._beside(name) if "." not in name else None
        if found is not None:
            return found
        real: Callable[..., Any] = builtins.__import__
        return real(name, globals, locals, fromlist, level)
