"""One timing at a time on a GPU: a lock by its UUID that every verb which times holds meanwhile."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tilecast.base import locks


class GpuLockError(ValueError):
    """A GPU that another tilecast times on, or a lock that cannot be made; one sentence."""


def try_lock(uuid: str, folder: Path | None = None) -> int | None:
    """File descriptor of an exclusive lock on a GPU (in ``folder``, default: the temporary one), None when it is taken.

    It is held until every process that shares the descriptor has closed it.  Windows has no such lock: always free.
    """
    path = (folder or Path(tempfile.gettempdir())) / f"tilecast-{uuid}.lock"
    try:
        lock = locks.try_lock(path, shared_folder=True)
    except OSError as error:
        raise GpuLockError(f"{path}: cannot lock the GPU: {error.strerror or error}") from None
    return None if lock is None else lock.handle


@contextmanager
def timing_on(uuid: str, folder: Path | None = None) -> Iterator[int]:
    """Hold the lock of a GPU, and its file descriptor for those who share it; GpuLockError when another tilecast does."""
    handle = try_lock(uuid, folder)
    if handle is None:
        raise GpuLockError(
            f"another tilecast is timing on {uuid}: wait for it to end, as both would measure each other"
        )
    try:
        yield handle
    finally:
        os.close(handle)
