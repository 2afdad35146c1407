"""Locks on files: held by the process that has the descriptor open, freed by the system however the process ends."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class FileLock:
    """An exclusive lock; a process that inherits ``handle`` shares it, and it lasts until all have closed it."""

    path: Path
    handle: int
    #: Whether `release` takes the file away.
    removes: bool

    def release(self) -> None:
        """Let go in this process."""
        if self.removes:
            # While the lock is held: a process that opened the file before finds, once it has the lock, that the name is gone.
            with contextlib.suppress(OSError):
                self.path.unlink()
        os.close(self.handle)


def try_lock(path: Path, *, shared_folder: bool = False, removes: bool = False, wait_s: float = 0.0) -> FileLock | None:
    """An exclusive lock on the file ``path``, which is made when absent; None when another holds it for ``wait_s`` seconds.

    ``shared_folder``: ``path`` lies in a folder such as /tmp and may belong to another user, who can be locked out but whose
    file can only be read.  Otherwise the file is opened for writing, as locks on network file systems ask for.
    ``removes``: the lock's release deletes the file; not for files of several users, nor for locks that are inherited.
    Raises OSError where the file can be neither opened nor made.  Windows has no such lock: it is always free there.
    """
    try:
        import fcntl
    except ImportError:
        return FileLock(path, os.open(os.devnull, os.O_RDONLY), False)
    until = time.monotonic() + wait_s
    while True:
        handle = _open(path, shared_folder)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            os.close(handle)
            if time.monotonic() >= until:
                return None
            time.sleep(_POLL_S)
            continue
        except BaseException:
            os.close(handle)
            raise
        if _is_the_file(handle, path):
            return FileLock(path, handle, removes)
        os.close(handle)  # its holder deleted the file between our opening and locking it: lock the new one


def _open(path: Path, shared_folder: bool) -> int:
    if not shared_folder:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    # Systems refuse O_CREAT for another user's file in a folder that all may write to; opening it is allowed.
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)


def _is_the_file(handle: int, path: Path) -> bool:
    """Whether the open file still has its name; opened anew, because network file systems keep old answers to stat."""
    try:
        again = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.path.sameopenfile(handle, again)
    finally:
        os.close(again)
