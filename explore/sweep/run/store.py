"""The store: one SQLite file, one row a result, committed the moment it is known.

Write-ahead logging without a sync a commit: a killed process loses nothing that was committed and the file stays sound; a
power cut may lose the last commits, and the file still stays sound.  One sweep writes at a time (a lock beside the
file, freed by the system however the process ends); other processes may read meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilecast.base.locks import FileLock, try_lock
from tilecast.explore.sweep.errors import StoreError

#: "tcsw" in SQLite's header: this file is a sweep store.
_APPLICATION = 0x74637377
SCHEMA = 1
_TABLES = """
CREATE TABLE results (key TEXT PRIMARY KEY, status TEXT NOT NULL, item TEXT NOT NULL, result TEXT NOT NULL,
                      seconds REAL NOT NULL, unix_s REAL NOT NULL);
CREATE TABLE machines (sha TEXT NOT NULL, name TEXT NOT NULL, document TEXT NOT NULL, PRIMARY KEY (sha, name));
CREATE TABLE runs (unix_s REAL NOT NULL, tilecast TEXT NOT NULL, source TEXT NOT NULL, command TEXT NOT NULL,
                   items INTEGER NOT NULL, known INTEGER NOT NULL);
"""
_BATCH = 500
#: How long another program may hold the file before that is an error.
_PATIENCE_S = 5.0


@dataclass(frozen=True, slots=True)
class Stored:
    """One result as stored; ``item`` and ``result`` are JSON."""

    key: str
    status: str
    item: str
    result: str
    seconds: float

    def fields(self) -> dict[str, Any]:
        """The result as a dictionary."""
        return dict(json.loads(self.result))


class Store:
    """An open store; a context manager.  Every failure is a StoreError of one sentence that names the file."""

    def __init__(self, path: Path | None, *, write: bool = True) -> None:
        """Open ``path`` (None: in memory), creating it when it is to be written and absent."""
        self.name = "the store in memory" if path is None else str(path)
        self._lock: FileLock | None = None
        if path is not None:
            _refuse_folder(path, write)
            if write:
                self._lock = _lock(path)
        self._path = path
        self._created = path is not None and not path.exists()
        try:
            with self._plain():
                self._base = _connect(path, write)
                self._prepare(create=write)
        except StoreError:
            self._abandon()
            raise

    def _prepare(self, create: bool) -> None:
        base = self._base
        application, version, tables = (
            base.execute(text).fetchone()[0]
            for text in ("PRAGMA application_id", "PRAGMA user_version", "SELECT count(*) FROM sqlite_master")
        )
        if tables == 0 and create:
            base.execute("PRAGMA journal_mode=WAL")
            base.execute("PRAGMA synchronous=NORMAL")
            base.executescript(
                f"BEGIN; {_TABLES} PRAGMA application_id={_APPLICATION}; PRAGMA user_version={SCHEMA}; COMMIT;"
            )
            return
        if application != _APPLICATION:
            raise StoreError(f"{self.name}: not a sweep store: expected a file that tilecast sweep made")
        if version != SCHEMA:
            raise StoreError(
                f"{self.name}: written by another tilecast (schema {version}, expected {SCHEMA}): use that version, or "
                "another file with --store"
            )
        if create:
            base.execute("PRAGMA synchronous=NORMAL")

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            empty = kind is not None and self._base.execute("SELECT 1 FROM results LIMIT 1").fetchone() is None
        except sqlite3.Error:
            empty = False
        if empty:
            self._abandon()
        self.close()

    def _abandon(self) -> None:
        """Close, and leave no file that was made for nothing."""
        self._disconnect()
        if self._created and self._path is not None:
            _remove(self._path)
        self.close()

    def close(self) -> None:
        """Close; what was committed is in the file."""
        self._disconnect()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _disconnect(self) -> None:
        if hasattr(self, "_base"):
            with contextlib.suppress(sqlite3.Error):
                self._base.close()

    def known(self, keys: Iterable[str]) -> dict[str, str]:
        """Status of every key that has a result."""
        return {row[0]: row[1] for row in self._rows("SELECT key, status FROM results WHERE key IN", keys)}

    def get(self, keys: Iterable[str]) -> dict[str, Stored]:
        """Results by key; absent keys are absent."""
        sql = "SELECT key, status, item, result, seconds FROM results WHERE key IN"
        return {row[0]: Stored(*row) for row in self._rows(sql, keys)}

    def _rows(self, sql: str, keys: Iterable[str]) -> Iterator[tuple[Any, ...]]:
        listed = list(keys)
        for start in range(0, len(listed), _BATCH):
            some = listed[start : start + _BATCH]
            with self._plain():
                found = self._base.execute(f"{sql} ({','.join('?' * len(some))})", some).fetchall()
            yield from found

    def put(self, key: str, item: str, result: dict[str, Any], seconds: float) -> None:
        """Commit one result; a result that is there already is replaced (retried failures)."""
        text = json.dumps(result, sort_keys=True, ensure_ascii=False)
        row = (key, result["status"], item, text, seconds, time.time())
        with self._plain():
            self._base.execute("INSERT OR REPLACE INTO results VALUES (?,?,?,?,?,?)", row)

    def begin(self, machines: Iterable[tuple[str, dict[str, Any]]], run: tuple[str, str, str, int, int]) -> None:
        """Note a run (tilecast version, source hash, command, items, known) and its (hash, document) machines."""
        with self._plain():
            self._base.execute("BEGIN")
            for sha, document in machines:
                row = (sha, document["name"], json.dumps(document, sort_keys=True))
                self._base.execute("INSERT OR IGNORE INTO machines VALUES (?,?,?)", row)
            self._base.execute("INSERT INTO runs VALUES (?,?,?,?,?,?)", (time.time(), *run))
            self._base.execute("COMMIT")

    @contextlib.contextmanager
    def _plain(self) -> Iterator[None]:
        """Turn what SQLite raises into one sentence."""
        try:
            yield
        except sqlite3.Error as error:
            raise StoreError(f"{self.name}: {_reason(error)}") from None


def _reason(error: sqlite3.Error) -> str:
    name = getattr(error, "sqlite_errorname", "") or ""
    if name.startswith("SQLITE_FULL"):
        return "the disk is full: results so far are kept; free some space and run the same command again"
    if name.startswith("SQLITE_IOERR"):
        return f"cannot write ({error}; is the disk full?): results so far are kept; run the same command again"
    if name.startswith(("SQLITE_NOTADB", "SQLITE_CORRUPT")):
        return f"damaged or not a sweep store ({error}): restore it, or name another file with --store"
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return "locked by another program: end that program, or name another file with --store"
    if name.startswith(("SQLITE_READONLY", "SQLITE_PERM", "SQLITE_CANTOPEN")):
        return f"cannot be opened for writing ({error}): check its permissions, or name another file with --store"
    return f"cannot be used ({error}): restore it, or name another file with --store"


def _refuse_folder(path: Path, write: bool) -> None:
    if path.is_dir():
        raise StoreError(f"{path}: expected a file for the store, got a folder")
    if not path.parent.is_dir():
        raise StoreError(f"{path}: cannot keep the store: folder {path.parent} does not exist")
    if not write and not path.exists():
        raise StoreError(f"{path}: no such store: run the sweep first")
    if write and not os.access(path if path.exists() else path.parent, os.W_OK):
        raise StoreError(f"{path}: cannot keep the store: no permission to write")


def _connect(path: Path | None, write: bool) -> sqlite3.Connection:
    if path is None:
        return sqlite3.connect(":memory:", isolation_level=None)
    if write:
        return sqlite3.connect(path, isolation_level=None, timeout=_PATIENCE_S)
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", isolation_level=None, timeout=_PATIENCE_S, uri=True)


def _lock(path: Path) -> FileLock:
    """An exclusive lock on FILE.lock, which is there as long as this process holds it."""
    beside = path.with_name(f"{path.name}.lock")
    try:
        lock = try_lock(beside, removes=True)
    except OSError as error:
        raise StoreError(f"{beside}: cannot lock the store: {error.strerror or error}") from None
    if lock is None:
        raise StoreError(
            f"{path}: another sweep is writing to it: wait for it to end, or name another file with --store"
        )
    return lock


def _remove(path: Path) -> None:
    """Leave nothing of a store that could not be made."""
    for suffix in ("", "-wal", "-shm", "-journal"):
        with contextlib.suppress(OSError):
            path.with_name(path.name + suffix).unlink()
