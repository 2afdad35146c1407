"""The work folder of a bundle in the making: what was asked for, what was measured, what failed.

Everything is appended line by line, so that a run that was killed goes on where it stopped.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tilecast.validation.lab.bundle.manifest import MEMBERS, BundleError, Failed

STATE = "state.json"
_LINES = ("checked.jsonl", "failed.jsonl", "seconds.jsonl", "profiles.jsonl")
_KNOWN = (STATE, *MEMBERS, *_LINES)


@dataclass(frozen=True)
class WorkFolder:
    """A folder with what is already known; `mend` it before appending."""

    path: Path

    def file(self, name: str) -> Path:
        """Path of one of its files."""
        return self.path / name

    def open(self, asked: dict[str, Any]) -> bool:
        """Create it, or go on in it (True); BundleError when it holds the work of another GPU, plan or option."""
        state = self.file(STATE)
        if state.exists():
            found = _json(state)
            for name, value in asked.items():
                if found.get(name) != value:
                    raise BundleError(
                        f"{self.path}: holds an unfinished bundle with {name} {found.get(name)!r}, asked for {value!r}: "
                        "use another --resume folder, or delete this one"
                    )
            self._mend()
            return True
        if self.path.exists() and any(path.name != STATE + ".new" for path in self.path.iterdir()):
            raise BundleError(f"{self.path}: not the folder of an unfinished bundle: pass another with --resume")
        self.path.mkdir(parents=True, exist_ok=True)
        temporary = self.file(STATE + ".new")
        temporary.write_text(json.dumps(asked, indent=2), encoding="utf-8")
        temporary.replace(state)
        return False

    def _mend(self) -> None:
        """Cut what a kill left of a last line."""
        for name in _KNOWN:
            path = self.file(name)
            if name != STATE and path.exists():
                content = path.read_bytes()
                whole = content.rfind(b"\n") + 1
                if whole != len(content):
                    with path.open("r+b") as file:
                        file.truncate(whole)

    def append(self, name: str, entry: dict[str, Any]) -> None:
        """Add a line to one of the lists, on disk before it returns."""
        with self.file(name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def lines(self, name: str) -> list[dict[str, Any]]:
        """The entries of a list."""
        path = self.file(name)
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []

    def fail(self, stage: str, what: str, reason: str) -> None:
        """Record something that will not be tried again."""
        self.append("failed.jsonl", asdict(Failed(stage, what, reason)))
        self.log(f"failed: {stage}: {what}: {reason}")

    def failed(self) -> tuple[Failed, ...]:
        """Everything recorded as failed, in order."""
        return tuple(dict.fromkeys(Failed(**entry) for entry in self.lines("failed.jsonl")))

    def spent(self) -> dict[str, float]:
        """Seconds by stage."""
        total: dict[str, float] = {}
        for entry in self.lines("seconds.jsonl"):
            total[entry["stage"]] = round(total.get(entry["stage"], 0.0) + entry["seconds"], 1)
        return total

    def log(self, text: str) -> None:
        """Add a line with the time (UTC) to the log."""
        with self.file("log.txt").open("a", encoding="utf-8") as file:
            file.write(f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} {text}\n")

    def members(self) -> dict[str, bytes]:
        """What goes into the zip; home folders in the log become ~."""
        found = {name: self.file(name).read_bytes() for name in MEMBERS if self.file(name).exists()}
        if "log.txt" in found:
            found["log.txt"] = found["log.txt"].replace(str(Path.home()).encode() + b"/", b"~/")
        return found

    def remove(self) -> None:
        """Delete what this package wrote, and the folder when nothing else is in it."""
        for name in _KNOWN:
            self.file(name).unlink(missing_ok=True)
        if not any(self.path.iterdir()):
            self.path.rmdir()


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BundleError(f"{path}: cannot read: {error}") from None
    if not isinstance(found, dict):
        raise BundleError(f"{path}: expected the state of an unfinished bundle, got {type(found).__name__}")
    return found
