"""What was read from a kernel's machine code: one JSON a kernel, in a cache.

A cache that is damaged, or that cannot be written, is no reason to fail: the kernel is compiled again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from tilecast.base.files import OutputError, write_text_atomically

T = TypeVar("T")


def record_file(cache: str | Path, family: str, *said: str) -> Path:
    """The file in ``cache`` of the kernel of which all of ``said`` is true: source, target, compiler, what is read."""
    return Path(cache) / f"{family}_{hashlib.sha256(chr(10).join(said).encode()).hexdigest()[:24]}.json"


def keep(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record, in a folder made for it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomically(path, json.dumps(record))
    except (OSError, OutputError):
        return


def kept(path: Path, read: Callable[[Any], T]) -> T | None:
    """What ``read`` makes of the record; None for none, and for one that is damaged or of another version."""
    try:
        return read(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, LookupError, TypeError):
        return None
