"""What an ELF of device code says about itself: architecture, kernels, threads and cluster of a CTA.

Format: ELF64, little endian, machine 190 (EM_CUDA).  Where the compute capability stands depends on the ABI version, and
launch bounds are attributes of `.nv.info.<kernel>`; both checked against `cuobjdump -elf` of Triton 3.6's cubins.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

MAGIC = b"\x7fELF"
_EM_CUDA = 190
_CODE, _INFO, _TABLE = ".text.", ".nv.info.", ".nv.constant2."
#: Attributes of `.nv.info`: threads of a CTA as the launch must have them, as it may have at most; CTAs of a cluster.
_REQUIRED_THREADS, _MAX_THREADS, _CLUSTER = 0x10, 0x05, 0x3D
#: An entry of the table of symbols (name, type, visibility, section, value, size), and the type that is a function.
_SYMBOL, _FUNCTION = struct.Struct("<IBBHQQ"), 2
#: Format of an attribute whose value follows in as many bytes as its header says.
_SIZED = 0x04


class ElfError(ValueError):
    """Bytes that are no ELF of device code: what is wrong with them, without the file's name."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A kernel of a cubin."""

    name: str
    #: Threads of a CTA, 0 where the compiler was not told.
    threads: int
    #: CTAs of a cluster, 1 where the code names none.
    cluster: int
    #: Whether its code section holds anything.
    has_code: bool
    #: Words of its own constant bank (c[0x2]): where branches through tables lead, from the kernel's begin.
    table: tuple[int, ...] = ()
    #: Its place in the table of symbols, by which the disassembler takes one kernel of many; -1: it has none.
    symbol: int = -1


@dataclass(frozen=True, slots=True)
class Cubin:
    """What a cubin holds; ``capability`` is 90 for sm_90 and sm_90a."""

    capability: int
    entries: tuple[Entry, ...]


def is_host_elf(data: bytes) -> bool:
    """Whether ``data`` is an ELF of the host, in which device code may lie."""
    return data[:4] == MAGIC and len(data) >= 64 and struct.unpack_from("<H", data, 18)[0] != _EM_CUDA


def read_cubin(data: bytes) -> Cubin:
    """The header and the kernels of a cubin; ElfError for anything else."""
    if data[:4] != MAGIC:
        raise ElfError(f"expected an ELF, its first bytes are {data[:4]!r}")
    if len(data) < 64 or data[4] != 2:
        raise ElfError("expected a 64-bit ELF with its header")
    if is_host_elf(data):
        raise ElfError(
            f"expected device code (machine {_EM_CUDA}), got machine {struct.unpack_from('<H', data, 18)[0]}"
        )
    abi, flags = data[8], struct.unpack_from("<I", data, 48)[0]
    capability = flags >> 8 & 0xFF if abi >= 8 else flags & 0xFF
    sections = _sections(data)
    names = [name.removeprefix(_CODE) for name in sections if name.startswith(_CODE)]
    symbols = _functions(sections)
    return Cubin(capability, tuple(_entry(name, sections, symbols.get(name, -1)) for name in names))


def _functions(sections: dict[str, bytes]) -> dict[str, int]:
    """Functions of the table of symbols, and where they stand in it."""
    table, names, found = sections.get(".symtab", b""), sections.get(".strtab", b""), {}
    for i in range(len(table) // _SYMBOL.size):
        name, info, *_ = _SYMBOL.unpack_from(table, i * _SYMBOL.size)
        if info & 15 == _FUNCTION:
            found[names[name : names.find(b"\0", name)].decode(errors="replace")] = i
    return found


def _sections(data: bytes) -> dict[str, bytes]:
    """Sections with contents, by name; ElfError where the table points outside of the file."""
    try:
        (offset,) = struct.unpack_from("<Q", data, 40)
        size, count, names_at = struct.unpack_from("<HHH", data, 58)
        headers = [struct.unpack_from("<IIQQQQ", data, offset + i * size) for i in range(count)]
        if not headers:
            return {}
        names = data[headers[names_at][4] :][: headers[names_at][5]]
        found = {}
        for name, kind, _, _, begin, length in headers:
            text = names[name : names.index(b"\0", name)].decode()
            nothing = kind == 8  # takes memory, not file
            if not nothing and begin + length > len(data):
                raise ElfError(f"section '{text}' ends behind the end of the file: cut off")
            found[text] = b"" if nothing else data[begin : begin + length]
        return found
    except (struct.error, ValueError, IndexError, OverflowError) as error:
        if isinstance(error, ElfError):
            raise
        raise ElfError("its table of sections is cut off or damaged") from None


def _entry(name: str, sections: dict[str, bytes], symbol: int) -> Entry:
    found = _attributes(sections.get(_INFO + name, b""))
    words = sections.get(_TABLE + name, b"")

    def volume(attribute: int) -> int:
        payload = found.get(attribute, b"")
        if len(payload) < 12:
            return 0
        x, y, z = struct.unpack_from("<III", payload)
        return int(x * y * z)

    threads = volume(_REQUIRED_THREADS) or volume(_MAX_THREADS)
    table = struct.unpack(f"<{len(words) // 4}I", words[: len(words) // 4 * 4])
    return Entry(name, threads, max(1, volume(_CLUSTER)), any(sections[_CODE + name]), table, symbol)


def _attributes(info: bytes) -> dict[int, bytes]:
    """Attributes with sized values."""
    found, at = {}, 0
    while at + 4 <= len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == _SIZED:
            found[attribute] = info[at : at + size]
            at += size
    return found
