"""Which file is meant by a kernel that a user names, and which targets it is written for."""

from __future__ import annotations

from pathlib import Path

from tilecast.base.data import shipped_kernel
from tilecast.base.text_file import read_text
from tilecast.codegen.compiler.compile import TARGETS, CompileError
from tilecast.model.kernel.header import HeaderError, read_header


def named_file(file: str) -> str:
    """The path of ``file``, which may be the name of a shipped kernel; ``file`` itself where there is neither."""
    shipped = None if Path(file).exists() else shipped_kernel(file)
    return file if shipped is None else str(shipped)


def written_for(path: str) -> tuple[str, ...]:
    """Targets that a generated file is written for, by its header; CompileError where it is no such file."""
    try:
        header = read_header(read_text(path, "the kernel", CompileError), path)
    except HeaderError as error:
        raise CompileError(f"{error}; forecast and emulate take any other with --call 'function(arguments)'") from None
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = f" line {error.lineno}:" if isinstance(error, SyntaxError) else ""
        reason = error.msg if isinstance(error, SyntaxError) else error
        raise CompileError(f"{path}:{line} expected a kernel file, got no Python: {reason}") from None
    return tuple(target for target in header.get("targets", ()) if target in TARGETS) or tuple(TARGETS)
