"""C sources that ship beside Python ones, compiled once by the C compiler at hand and kept; None where there is none.

A file so compiled says nothing that Python does not: it computes the same numbers sooner, and code that asks for it must do
without.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

from tilecast.base.files import OutputError, cache_folder, write_bytes_atomically

#: Folder of tilecast's cache.
FOLDER = "native"
#: Doubles as Python has them: nothing contracted, nothing reordered.
_FLAGS = ("-std=c99", "-O2", "-fPIC", "-shared", "-ffp-contract=off")
#: Processors whose doubles are rounded after every operation.
_ABLE = ("x86_64", "aarch64", "arm64")
_COMPILERS = ("cc", "gcc", "clang")
_SECONDS = 60


@lru_cache(maxsize=16)
def load_native(source: Path) -> ctypes.CDLL | None:
    """The library made of ``source``; None where no compiler makes it, or none can be kept and loaded."""
    if platform.machine() not in _ABLE:
        return None
    kept = _kept_as(source)
    return _load(kept) or (_load(kept) if _compile(source, kept) else None)


def _load(kept: Path) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(str(kept))
    except OSError:  # not there, or damaged
        return None


def _kept_as(source: Path) -> Path:
    said = b"\n".join((source.read_bytes(), " ".join(_FLAGS).encode(), platform.platform().encode()))
    return cache_folder(FOLDER) / f"{source.stem}_{hashlib.sha256(said).hexdigest()[:24]}.so"


def _compile(source: Path, kept: Path) -> bool:
    """Whether a compiler made ``source`` and it could be kept."""
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        return False
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / "made.so"
            command = [compiler, *_FLAGS, "-o", str(made), str(source)]
            subprocess.run(command, check=True, capture_output=True, timeout=_SECONDS)
            write_bytes_atomically(kept, made.read_bytes())
    except (OSError, OutputError, subprocess.SubprocessError):
        return False
    return True
