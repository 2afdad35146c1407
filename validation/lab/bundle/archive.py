"""The zip itself: written whole or not at all, read member by member and never unpacked."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tilecast.base.files import write_bytes_atomically
from tilecast.validation.lab.bundle.manifest import MANIFEST, MEMBERS, BundleError, Manifest, entry_of, parse_manifest

#: A member larger than this is refused before it is unpacked; a full H200 bundle has none above 2 MB.
MOST_BYTES = 256 << 20


@dataclass(frozen=True)
class Bundle:
    """A bundle whose hashes were checked; ``members`` maps name to content."""

    path: str
    manifest: Manifest
    members: Mapping[str, bytes]

    def text(self, name: str) -> str:
        """A member as text, "" when the bundle has none; BundleError when it is not UTF-8."""
        try:
            return self.members.get(name, b"").decode("utf-8")
        except UnicodeDecodeError:
            raise BundleError(f"{self.path}: {name} is not UTF-8 text: ask for the bundle again") from None


def write_bundle(output: Path, manifest: Manifest, members: Mapping[str, bytes]) -> Manifest:
    """Write the zip through a temporary file beside it; returns the manifest with sizes and hashes filled in.

    Raises BundleError where the file cannot be written; what was there before then stays.
    """
    unknown = sorted(set(members) - set(MEMBERS))
    if unknown:
        raise BundleError(f"{output}: a bundle holds {', '.join(MEMBERS)}; got '{unknown[0]}'")
    full = replace(manifest, files={name: entry_of(content) for name, content in members.items()})
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(MANIFEST, full.to_json())
        for name, content in members.items():
            archive.writestr(name, content)
    write_bytes_atomically(output, memory.getvalue(), BundleError)
    return full


def read_bundle(path: Path) -> Bundle:
    """Read and verify a bundle; BundleError names the first thing that is not as its manifest says."""
    try:
        with zipfile.ZipFile(path) as archive:
            return _read(str(path), archive)
    except OSError as error:
        raise BundleError(f"{path}: cannot read the bundle: {error.strerror or error}") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        if isinstance(error, BundleError):
            raise
        raise BundleError(f"{path}: not a bundle, or a damaged one ({error}): ask for it again") from None


def _read(where: str, archive: zipfile.ZipFile) -> Bundle:
    infos = archive.infolist()
    names = [info.filename for info in infos]
    if MANIFEST not in names:
        raise BundleError(f"{where}: not a bundle: it holds no {MANIFEST}; make one with tilecast bundle")
    for info in infos:
        if names.count(info.filename) > 1:
            raise BundleError(f"{where}: damaged: holds '{info.filename}' twice: ask for the bundle again")
        if info.file_size > MOST_BYTES:
            raise BundleError(
                f"{where}: '{info.filename}' unpacks to {info.file_size} bytes, at most {MOST_BYTES} expected"
            )
    try:
        text = archive.read(MANIFEST).decode("utf-8")
    except UnicodeDecodeError:
        raise BundleError(f"{where}: {MANIFEST} is not UTF-8 text: ask for the bundle again") from None
    manifest = parse_manifest(where, text)
    foreign = sorted(set(names) - set(manifest.files) - {MANIFEST})
    if foreign:
        raise BundleError(f"{where}: holds '{foreign[0]}', which its manifest does not list: ask for the bundle again")
    members = {}
    for name, entry in manifest.files.items():
        if name not in names:
            raise BundleError(f"{where}: damaged: '{name}' is missing: ask for the bundle again")
        content = archive.read(name)
        if entry_of(content) != entry:
            raise BundleError(
                f"{where}: damaged: '{name}' is not what the manifest's hash says: ask for the bundle again"
            )
        members[name] = content
    return Bundle(where, manifest, members)
