"""Read a text file that a user names: one sentence of the caller's own error class when that cannot be done."""

from __future__ import annotations

import errno
import io
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

_T = TypeVar("_T")

#: No file that people write is larger; a device without an end (/dev/zero) is.
MOST_BYTES = 256 << 20


def read_text(path: str | Path, what: str, error: type[Exception]) -> str:
    """The content of ``path``; ``error`` that says ``what`` ("the plan") cannot be read, and why."""
    try:
        return content(path)
    except OSError as failure:
        raise error(f"{path}: cannot read {what}: {failure.strerror or failure}") from None
    except UnicodeDecodeError:
        raise error(f"{path}: cannot read {what}: expected text in UTF-8") from None


def parsed(path: str | Path, what: str, error: type[Exception], parse: Callable[[str], _T]) -> _T:
    """What ``parse`` makes of the content of ``path``; an ``error`` that it raises names the file."""
    text = read_text(path, what, error)
    try:
        return parse(text)
    except error as failure:
        raise error(f"{path}: {failure}") from None


def content(path: str | Path) -> str:
    """The text of a file, of a pipe as well; OSError and UnicodeDecodeError for what is none or more than `MOST_BYTES`."""
    return io.TextIOWrapper(io.BytesIO(bounded_bytes(path)), encoding="utf-8").read()


def bounded_bytes(path: str | Path) -> bytes:
    """What a file, a pipe or a device holds; OSError for more than `MOST_BYTES`."""
    with Path(path).open("rb") as file:
        read = file.read(MOST_BYTES + 1)
    if len(read) > MOST_BYTES:
        raise OSError(errno.EFBIG, f"more than {MOST_BYTES >> 20} MB")
    return read
