"""Any CUDA binary in: which kernel of a cubin, of a file with several, of a Triton cache folder or of a listing is meant.

What cannot be told is asked for, and what cannot be read is refused, in one sentence: what, where, expected, got.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilecast.base.text_file import bounded_bytes
from tilecast.codegen.compiler.compile import TARGETS, CompileError, tool
from tilecast.codegen.compiler.elf import MAGIC, ElfError, is_host_elf, read_cubin
from tilecast.codegen.compiler.opcodes import check_known
from tilecast.codegen.compiler.sass import Instruction, disassemble, parse_listing, resources, split_listing

_FATBIN = b"\x50\xed\x55\xba"
_BY_CAPABILITY = {capability: name for name, (capability, _) in TARGETS.items()}
#: Names of kernels that a question lists, and characters of one.
_LISTED, _NAME = 6, 48


class BinaryError(ValueError):
    """A file that holds no kernel that can be read: what, where, expected, got."""


@dataclass(frozen=True, slots=True)
class Binary:
    """A compiled kernel; None where neither the file nor anything beside it says."""

    file: str
    kernel: str
    target: str
    instructions: tuple[Instruction, ...]
    #: Warps of a CTA, CTAs of a cluster.
    warps: int | None
    cluster: int
    #: A thread's.
    registers: int | None
    stack_bytes: int | None
    #: A CTA's: bytes with what the launch adds, columns.
    shared_bytes: int | None = None
    tmem_columns: int | None = None
    #: Where branches through tables lead, entry by entry; empty where the file does not have them.
    table: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A kernel that may be meant: a cubin's, with what Triton wrote beside it, or a listing's text."""

    file: str
    kernel: str
    target: str
    cubin: bytes = b""
    text: str = ""
    threads: int = 0
    cluster: int = 1
    table: tuple[int, ...] = ()
    beside: tuple[tuple[str, Any], ...] = ()
    symbol: int = -1


def read_binary(path: str | Path, arch: str | None = None, kernel: str | None = None) -> Binary:
    """The kernel of ``path`` that ``arch`` (a key of TARGETS) and ``kernel`` (a part of its name will do) leave.

    Raises BinaryError for what cannot be read or chosen, UnknownOpcodeError, CompileError without the tools.
    """
    if arch is not None and arch not in TARGETS:
        raise BinaryError(f"--arch: expected {', '.join(TARGETS)}, got '{arch}'")
    file = Path(path)
    if not file.exists():
        raise BinaryError(f"{path}: expected a cubin, a fatbin, a Triton cache folder or a listing, found none")
    return _load(_choose(str(path), list(_candidates(file, arch)), arch, kernel))


def from_cubin(cubin: bytes, file: str, target: str, kernel: str) -> Binary:
    """The kernel of a cubin that was compiled here."""
    entry = next(entry for entry in read_cubin(cubin).entries if entry.name == kernel)
    return _load(
        _Candidate(file, kernel, target, cubin, "", entry.threads, entry.cluster, entry.table, symbol=entry.symbol)
    )


def _candidates(file: Path, arch: str | None = None) -> Iterable[_Candidate]:
    if file.is_dir():
        return _of_folder(file)
    data = _bytes_of(file)
    if data[:4] == _FATBIN or is_host_elf(data):
        return _of_fatbin(file, arch)
    if data[:4] == MAGIC:
        return _of_cubin(str(file), data, _metadata(file.with_suffix(".json")))
    return _of_listing(file, data)


def _bytes_of(file: Path) -> bytes:
    """All of a file, however large a library is; of what may have no end (a device, a pipe) only so much as a text may have."""
    try:
        return file.read_bytes() if file.is_file() else bounded_bytes(file)
    except OSError as failure:
        raise BinaryError(f"{file}: cannot read the code: {failure.strerror or failure}") from None


def _of_folder(folder: Path) -> list[_Candidate]:
    files = sorted(folder.glob("*.cubin")) or sorted(folder.glob("*/*.cubin"))
    if not files:
        raise BinaryError(f"{folder}: expected a Triton cache folder with *.cubin and *.json, found no .cubin")
    return [
        one for file in files for one in _of_cubin(str(file), file.read_bytes(), _metadata(file.with_suffix(".json")))
    ]


def _metadata(file: Path) -> dict[str, Any]:
    """What Triton writes beside a cubin; nothing where it is not there or something else."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _of_cubin(file: str, data: bytes, beside: dict[str, Any] | None = None) -> list[_Candidate]:
    try:
        cubin = read_cubin(data)
    except ElfError as error:
        raise BinaryError(f"{file}: {error}") from None
    target = _BY_CAPABILITY.get(cubin.capability)
    if target is None:
        raise BinaryError(f"{file}: expected code for {', '.join(TARGETS)}, got sm_{cubin.capability}")
    if not any(entry.has_code for entry in cubin.entries):
        raise BinaryError(
            f"{file}: expected machine code in sections .text.<kernel>, found none: stripped, or never linked"
        )
    facts = tuple((beside or {}).items())
    return [
        _Candidate(file, entry.name, target, data, "", entry.threads, entry.cluster, entry.table, facts, entry.symbol)
        for entry in cubin.entries
        if entry.has_code
    ]


def _of_fatbin(file: Path, arch: str | None = None) -> list[_Candidate]:
    """Kernels of the cubins inside a fatbin, an object or a library that the tool can unpack; other architectures are left out.

    With ``arch`` only its cubins are unpacked, where there are some: libraries hold thousands.
    """
    asked = [arch.rstrip("a")] if arch is not None else []
    cubins, said = [], []
    for which in (*asked, "all"):
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                [str(tool("cuobjdump")), "-xelf", which, str(file.resolve())], cwd=folder, capture_output=True, text=True, check=False
            )  # fmt: skip
            cubins = [(one.name, one.read_bytes()) for one in sorted(Path(folder).glob("*.cubin"))]
        if cubins:
            break
        said = (done.stderr or done.stdout).strip().splitlines()
    if not cubins:
        raise BinaryError(
            f"{file}: expected device code inside, found none ({said[-1] if said else 'cuobjdump is silent'})"
        )
    known = [(name, data) for name, data in cubins if read_cubin(data).capability in _BY_CAPABILITY]
    if not known:
        found = ", ".join(sorted({f"sm_{read_cubin(data).capability}" for _, data in cubins}))
        raise BinaryError(f"{file}: expected code for {', '.join(TARGETS)}, got {found}")
    return [one for name, data in known for one in _of_cubin(f"{file}:{name}", data)]


def _of_listing(file: Path, data: bytes) -> list[_Candidate]:
    text = data.decode("utf-8", errors="replace")
    parts = split_listing(text) if "/*0000*/" in text else ()
    if not parts:
        raise BinaryError(
            f"{file}: expected an ELF of device code, a fatbin, a Triton cache folder, a listing of nvdisasm -c or a Python "
            f"file written by 'tilecast generate', got {f'one that begins {data[:8]!r}' if data else 'an empty file'}"
        )
    found = []
    for part in parts:
        target = next((name for name in TARGETS if part.target and name.startswith(part.target.rstrip("af"))), None)
        if part.target and target is None:
            raise BinaryError(f"{file}: expected code for {', '.join(TARGETS)}, got {part.target}")
        found.append(_Candidate(str(file), part.kernel, target or "", text=part.text))
    return found


def _choose(where: str, found: list[_Candidate], arch: str | None, kernel: str | None) -> _Candidate:
    """The one candidate that is left; BinaryError that asks where there are more, and says what there is where there are none."""
    left = [one for one in found if arch in (None, one.target) or not one.target]
    if not left:
        targets = ", ".join(sorted({one.target for one in found}))
        raise BinaryError(f"{where}: expected code for {arch}, got {targets}")
    if kernel is not None:
        named = [one for one in left if one.kernel == kernel] or [one for one in left if kernel in one.kernel]
        if not named:
            raise BinaryError(f"{where}: expected a kernel '{kernel}', got {_names(left)}")
        left = named
    if len(left) > 1:
        held = sorted({one.target for one in left})
        if len(held) > 1:
            raise BinaryError(f"{where}: holds code for {', '.join(held)}: which one? Say --arch")
        if len({one.kernel for one in left}) > 1:
            raise BinaryError(f"{where}: holds {_names(left)}: which one? Say --kernel")
        files = ", ".join(one.file for one in left[:_LISTED])
        raise BinaryError(f"{where}: holds {len(left)} kernels named {left[0].kernel}: which file? {files}")
    (one,) = left
    if not one.target:
        if arch is None:
            raise BinaryError(f"{where}: the listing does not say what it was compiled for: say --arch")
        return _Candidate(one.file, one.kernel, arch, text=one.text)
    return one


def _names(found: Iterable[_Candidate]) -> str:
    names = sorted({one.kernel for one in found})
    short = [name if len(name) <= _NAME else f"{name[: _NAME - 3]}..." for name in names[:_LISTED]]
    return ", ".join(short) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")


def _load(one: _Candidate) -> Binary:
    where = f"{one.file}: {one.kernel[:_NAME]}" if one.kernel else one.file
    try:
        instructions = disassemble(one.cubin, one.kernel, one.symbol) if one.cubin else parse_listing(one.text)
        used = resources(one.cubin, one.kernel) if one.cubin else None
    except CompileError as error:
        if "Cannot decode architecture" in str(error):
            raise BinaryError(f"{where}: the nvdisasm at hand does not know {one.target}: use a newer triton") from None
        if one.cubin and str(error).startswith(("nvdisasm", "cuobjdump")):
            raise BinaryError(
                f"{where}: its code cannot be disassembled, expected plain instructions: stripped or encrypted? ({error})"
            ) from None
        if not one.cubin:
            raise BinaryError(f"{where}: not a whole listing: {error}") from None
        raise
    check_known(((i.opcode, i.address) for i in instructions), where)
    beside = dict(one.beside)
    shared, tmem = beside.get("shared"), beside.get("tmem_size")
    return Binary(
        one.file, one.kernel, one.target, instructions, one.threads // 32 or None, one.cluster,
        used.registers if used else None, used.stack_bytes if used else None,
        None if shared is None else int(shared), None if tmem is None else int(tmem), one.table,
    )  # fmt: skip
