"""Read a text file that a user names: one sentence of the caller's own error class when that cannot be done."""

from __future__ import annotations

from pathlib import Path


def read_text(path: str | Path, what: str, error: type[Exception]) -> str:
    """The content of ``path``; ``error`` that says ``what`` ("the plan") cannot be read, and why."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as failure:
        raise error(f"{path}: cannot read {what}: {failure.strerror or failure}") from None
    except UnicodeDecodeError:
        raise error(f"{path}: cannot read {what}: expected text in UTF-8") from None
