"""Writing results: whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


class OutputError(ValueError):
    """A destination that cannot be written; one sentence."""


def check_writable(path: str | Path) -> Path:
    """The path, if a file can be created or replaced there; OutputError otherwise.  Nothing is written."""
    target = Path(path)
    if target.is_dir():
        raise OutputError(f"{path}: expected a file name, got a folder")
    folder = target.parent
    if not folder.is_dir():
        raise OutputError(f"{path}: cannot write: folder {folder} does not exist")
    if not os.access(folder, os.W_OK) or (target.exists() and not os.access(target, os.W_OK)):
        raise OutputError(f"{path}: cannot write: no permission")
    return target


def write_text_atomically(path: str | Path, text: str) -> None:
    """`write_bytes_atomically` of the text in UTF-8."""
    write_bytes_atomically(path, text.encode())


def write_bytes_atomically(path: str | Path, content: bytes) -> None:
    """Write through a temporary file in the same folder, so that a failure leaves no half-written file."""
    target = check_writable(path)
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as error:
        raise OutputError(f"{path}: cannot write: {error.strerror or error}") from None
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        mode = os.umask(0)
        os.umask(mode)
        os.chmod(temporary, 0o666 & ~mode)
        os.replace(temporary, target)
    except OSError as error:
        Path(temporary).unlink(missing_ok=True)
        raise OutputError(f"{path}: cannot write: {error.strerror or error}") from None
