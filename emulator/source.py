"""The generated file: loading it with stand-ins for Triton, and finding the line that is running."""

from __future__ import annotations

import ast
import builtins
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tilecast.base.text_file import read_text
from tilecast.emulator.errors import RequestError, UnsupportedError
from tilecast.model.kernel.header import HeaderError, read_header
from tilecast.model.kernel.workload import Workload


def _parsed(text: str, path: str) -> ast.Module:
    try:
        return ast.parse(text, path)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = f" line {error.lineno}:" if isinstance(error, SyntaxError) else ""
        reason = error.msg if isinstance(error, SyntaxError) else error
        raise RequestError(f"{path}:{line} expected a kernel file, got no Python: {reason}") from None


class Source:
    """A generated kernel file, as text and as names per line."""

    def __init__(self, path: Path | str, text: str | None = None) -> None:
        self.path = str(path)
        self.text = read_text(self.path, "the kernel", RequestError) if text is None else text
        self._lines = self.text.splitlines()
        self._targets: dict[int, str] = {}
        #: Lines of functions that assign what they return: their callers name it.
        self._returned: set[int] = set()
        tree = _parsed(self.text, self.path)
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                    self._targets[line] = node.targets[0].id
        for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            last = function.body[-1]
            if isinstance(last, ast.Return) and isinstance(last.value, ast.Name):
                lines = range(function.lineno, last.lineno)
                self._returned |= {line for line in lines if self._targets.get(line) == last.value.id}

    def header(self) -> dict[str, Any]:
        """The TILECAST dict at the top; UnsupportedError where the file has none."""
        try:
            return read_header(self.text, self.path)
        except HeaderError as error:
            raise UnsupportedError(f"{error}: the emulator runs kernels that tilecast generated") from None

    def workload(self) -> Workload:
        """The workload that the header says the kernel was written for; UnsupportedError where it says none."""
        written: Any = self.header().get("workload")
        try:
            return Workload.from_dict(written)
        except (TypeError, ValueError) as error:
            got = "none" if written is None else error
            raise UnsupportedError(f"{self.path}: expected a workload in the TILECAST header, got {got}") from None

    def line(self) -> int:
        """The innermost line of this file that is running now; 0 when none is."""
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename == self.path:
                return frame.f_lineno
            frame = frame.f_back
        return 0

    def target(self) -> str:
        """Names that the running statement and those that called it assign to, as in ``ring.full``; empty without one."""
        names: list[str] = []
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename == self.path:
                name = self._targets.get(frame.f_lineno, "")
                names += [name] if name and frame.f_lineno not in self._returned else []
            frame = frame.f_back
        return ".".join(reversed(names))

    def quote(self, line: int) -> str:
        """A line for an error message."""
        if not 0 < line <= len(self._lines):
            return "outside the kernel's file"
        return f"line {line}: {self._lines[line - 1].strip()}"

    def quote_of(self, error: BaseException) -> str:
        """The line of this file that an exception came through last."""
        trace, line = error.__traceback__, 0
        while trace is not None:
            line = trace.tb_lineno if trace.tb_frame.f_code.co_filename == self.path else line
            trace = trace.tb_next
        return self.quote(line)

    def load(self, modules: Mapping[str, types.ModuleType], replaced: Mapping[str, Any]) -> types.ModuleType:
        """Execute the file; imports of triton see ``modules``, and names in ``replaced`` hide builtins."""
        real = builtins.__import__

        def imported(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
            if name.split(".")[0] != "triton":
                return real(name, globals, locals, fromlist, level)
            if name not in modules:
                raise UnsupportedError(f"{self.path}: imports {name}, which the emulator does not have")
            return modules[name] if fromlist else modules["triton"]

        module = types.ModuleType("emulated_kernel")
        module.__dict__.update(replaced)
        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": imported}
        exec(compile(self.text, self.path, "exec"), module.__dict__)
        return module
