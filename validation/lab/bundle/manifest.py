"""What a bundle says about itself: `manifest.json`, written last and checked first.  No torch, no GPU."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any

FORMAT = "tilecast-bundle"
VERSION = 1
MANIFEST = "manifest.json"
#: Everything a bundle may hold beside its manifest.
MEMBERS = ("machine.toml", "calibrate.csv", "points.csv", "sustained.csv", "codes.txt", "log.txt")


class BundleError(ValueError):
    """A bundle that cannot be made or read; one sentence: what, where, expected, got, what to do."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A member: its size in bytes and the SHA-256 of its content in hexadecimal."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Failed:
    """Something that was asked for and is not in the bundle, and why."""

    stage: str
    what: str
    reason: str


def failure_lines(failed: Iterable[Failed]) -> list[str]:
    """One line for every reason a kernel (or a benchmark) failed for in a stage, however many shapes it failed at."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for failure in failed:
        groups.setdefault((failure.stage, failure.what.split(" ")[0], failure.reason), []).append(failure.what)
    return [
        f"{stage}: {whats[0]}{f' and {len(whats) - 1} more of {kernel}' if len(whats) > 1 else ''}: {reason}"
        for (stage, kernel, reason), whats in groups.items()
    ]


@dataclass(frozen=True, slots=True)
class Manifest:
    """Where, when and with what a bundle was made.  ``capability`` is 90 for sm_90; ``machine`` the shipped machine file."""

    tilecast: str
    gpu: str
    capability: int
    machine: str
    driver: str
    torch: str
    triton: str
    date: str
    command: str
    quick: bool
    plan: str
    plan_sha256: str
    #: Seconds each stage took, over all runs that worked on it.
    seconds: dict[str, float]
    failed: tuple[Failed, ...]
    #: Plan entries that this GPU cannot run by the families' own rules, one sentence each.
    left_out: tuple[str, ...]
    files: dict[str, FileEntry]

    def to_json(self) -> str:
        """The text of `manifest.json`."""
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=2) + "\n"


def entry_of(content: bytes) -> FileEntry:
    """Size and hash of a member."""
    return FileEntry(len(content), hashlib.sha256(content).hexdigest())


_TEXT = ("tilecast", "gpu", "machine", "driver", "torch", "triton", "date", "command", "plan", "plan_sha256")


def parse_manifest(where: str, text: str) -> Manifest:
    """The manifest of the bundle ``where``; BundleError for another format, another version or a wrong field."""
    try:
        raw = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise BundleError(f"{where}: {MANIFEST} is not JSON ({error}): ask for the bundle again") from None
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise BundleError(
            f'{where}: not a bundle: {MANIFEST} lacks "format": "{FORMAT}"; make one with tilecast bundle'
        )
    if raw.get("version") != VERSION:
        raise BundleError(
            f"{where}: bundle format {raw.get('version')!r}, this tilecast reads {VERSION}: use the tilecast that wrote it "
            f"({raw.get('tilecast', 'unknown')})"
        )
    names = {field.name for field in fields(Manifest)}
    missing = sorted(names - set(raw))
    if missing:
        raise BundleError(f"{where}: {MANIFEST} lacks '{missing[0]}': ask for the bundle again")
    values = {name: raw[name] for name in names}
    for name in _TEXT:
        _expect(where, name, values[name], str)
    _expect(where, "capability", values["capability"], int)
    _expect(where, "quick", values["quick"], bool)
    return Manifest(**{**values, **_nested(where, values)})


def _nested(where: str, values: dict[str, Any]) -> dict[str, Any]:
    """The fields that are lists and tables, typed."""
    for name, kind in (("seconds", dict), ("files", dict), ("failed", list), ("left_out", list)):
        _expect(where, name, values[name], kind)
    files = {}
    for name, entry in values["files"].items():
        if name not in MEMBERS:
            raise BundleError(
                f"{where}: {MANIFEST} lists '{name}', which no bundle holds; expected {', '.join(MEMBERS)}"
            )
        if (
            not isinstance(entry, dict)
            or type(entry.get("size")) is not int
            or not isinstance(entry.get("sha256"), str)
        ):
            raise BundleError(f"{where}: {MANIFEST}: '{name}' takes a size and a sha256, got {entry!r}")
        files[name] = FileEntry(entry["size"], entry["sha256"])
    failed = []
    for entry in values["failed"]:
        parts = [entry.get(name) for name in ("stage", "what", "reason")] if isinstance(entry, dict) else [None]
        if not all(isinstance(part, str) for part in parts):
            raise BundleError(f"{where}: {MANIFEST}: an entry of 'failed' takes stage, what and reason, got {entry!r}")
        failed.append(Failed(*parts))
    for name, number in values["seconds"].items():
        if type(number) not in (int, float):
            raise BundleError(f"{where}: {MANIFEST}: 'seconds' takes numbers, got {name} = {number!r}")
    return {"files": files, "failed": tuple(failed), "left_out": tuple(str(line) for line in values["left_out"])}


def _expect(where: str, name: str, value: object, kind: type) -> None:
    if type(value) is not kind:
        raise BundleError(f"{where}: {MANIFEST}: field '{name}' takes {kind.__name__}, got {value!r}")
