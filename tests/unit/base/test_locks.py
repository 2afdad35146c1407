"""A lock keeps others out, whichever process made its file, and leaves no file where it is to leave none."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tilecast.base import locks
from tilecast.base.locks import try_lock

pytest.importorskip("fcntl")


@pytest.mark.parametrize("shared_folder", [False, True])
def test_one_holds_it_at_a_time(tmp_path: Path, shared_folder: bool) -> None:
    path = tmp_path / "x.lock"
    first = try_lock(path, shared_folder=shared_folder)
    assert first is not None
    assert try_lock(path, shared_folder=shared_folder) is None
    first.release()
    second = try_lock(path, shared_folder=shared_folder)
    assert second is not None
    second.release()
    assert path.exists()


def test_a_released_lock_can_leave_no_file(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    lock = try_lock(path, removes=True)
    assert lock is not None and path.exists()
    lock.release()
    assert not list(tmp_path.iterdir())


def test_waiting_ends_when_the_holder_lets_go(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    first = try_lock(path, removes=True)
    assert first is not None
    threading.Timer(0.2, first.release).start()
    second = try_lock(path, removes=True, wait_s=30)
    assert second is not None and path.exists()
    assert try_lock(path) is None
    second.release()


def test_a_file_deleted_between_opening_and_locking_is_not_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A holder deletes the file after we opened it: locking what we opened would let a third one in beside us."""
    path = tmp_path / "x.lock"
    holder = try_lock(path, removes=True)
    assert holder is not None
    opened, real = [], locks._open

    def late(where: Path, shared_folder: bool) -> int:
        handle = real(where, shared_folder)
        if not opened:
            holder.release()
        opened.append(handle)
        return handle

    monkeypatch.setattr(locks, "_open", late)
    mine = try_lock(path, removes=True)
    assert mine is not None and len(opened) == 2
    assert os.fstat(mine.handle).st_ino == path.stat().st_ino
    monkeypatch.undo()
    assert try_lock(path) is None
    mine.release()
    assert not path.exists()


def test_never_two_at_once_while_files_come_and_go(tmp_path: Path) -> None:
    path, inside, most = tmp_path / "x.lock", [0], [0]
    guard = threading.Lock()

    def work(_: int) -> None:
        for _ in range(40):
            lock = try_lock(path, removes=True, wait_s=60)
            assert lock is not None
            with guard:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
            with guard:
                inside[0] -= 1
            lock.release()

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(6) as pool:
        patch.setattr(locks, "_POLL_S", 0.0)
        list(pool.map(work, range(6)))
    assert most == [1] and not path.exists()


def test_a_process_that_inherits_it_holds_it(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    lock = try_lock(path, shared_folder=True)
    assert lock is not None
    child = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(lock.handle,), stderr=subprocess.DEVNULL
    )
    lock.release()
    assert try_lock(path, shared_folder=True) is None
    child.communicate(b"\n")
    again = try_lock(path, shared_folder=True)
    assert again is not None
    again.release()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may open anything")
def test_a_file_that_can_only_be_read_still_locks_in_a_shared_folder(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    path.touch(0o444)
    with pytest.raises(PermissionError):
        try_lock(path)
    lock = try_lock(path, shared_folder=True)
    assert lock is not None
    lock.release()


def test_a_file_that_is_there_is_never_created_again_in_a_shared_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux refuses O_CREAT for another user's file in /tmp (fs.protected_regular)."""
    path = tmp_path / "x.lock"
    path.touch()
    asked, real = [], os.open

    def watched(where: object, flags: int, *rest: int) -> int:
        asked.append(flags)
        return real(where, flags, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", watched)
    lock = try_lock(path, shared_folder=True)
    monkeypatch.undo()
    assert lock is not None and not any(flags & (os.O_CREAT | os.O_RDWR | os.O_WRONLY) for flags in asked)
    lock.release()


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        try_lock(tmp_path / "none" / "x.lock")
