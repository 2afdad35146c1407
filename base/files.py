"""Writing files whole or not at all, and where files that can be made again are kept."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


class OutputError(ValueError):
    """A destination that cannot be written; one sentence."""


def check_writable(path: str | Path, error: type[Exception] = OutputError) -> Path:
    """The path, if a file can be created or replaced there; ``error`` otherwise.  Nothing is written."""
    if not str(path):
        raise error("expected a file name to write to, got an empty one")
    target = Path(path)
    try:
        target.stat()
    except FileNotFoundError:
        pass
    except OSError as failure:
        raise error(f"{path}: cannot write: {failure.strerror}") from None
    if target.is_dir():
        raise error(f"{path}: expected a file name, got a folder")
    folder = target.parent
    if not folder.is_dir():
        raise error(f"{path}: cannot write: folder {folder} does not exist")
    if not os.access(folder, os.W_OK) or (target.exists() and not os.access(target, os.W_OK)):
        raise error(f"{path}: cannot write: no permission")
    return target


def write_text_atomically(path: str | Path, text: str, error: type[Exception] = OutputError) -> None:
    """`write_bytes_atomically` of the text in UTF-8."""
    write_bytes_atomically(path, text.encode(), error)


def write_bytes_atomically(path: str | Path, content: bytes, error: type[Exception] = OutputError) -> None:
    """Write through a temporary file in the same folder, forced to disk: a reader sees the old file or the whole new one.

    ``error`` says in one sentence what failed; what was there before then stays, and nothing else is left.  What is no
    file (/dev/null, /dev/stdout, a pipe) is written to, not replaced.
    """
    target = check_writable(path, error)
    temporary = ""
    try:
        if target.exists() and not target.is_file():
            target.write_bytes(content)
            return
        # A link stays, and what it points to is replaced.
        target = target.resolve()
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes private files; a result gets the permissions of any other new file.
        mode = os.umask(0)
        os.umask(mode)
        os.chmod(temporary, 0o666 & ~mode)
        os.replace(temporary, target)
    except OSError as failure:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        raise error(f"{path}: cannot write: {failure.strerror or failure}") from None


def cache_folder(name: str) -> Path:
    """The folder ``name`` of tilecast's cache: below $TILECAST_CACHE, $XDG_CACHE_HOME or ~/.cache.  It may not exist."""
    base = os.environ.get("TILECAST_CACHE") or os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "tilecast" / name
