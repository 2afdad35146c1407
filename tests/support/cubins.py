"""Files of device code made by hand: ELFs with the few fields that a reader looks at, and fatbins around cubins."""

from __future__ import annotations

import struct

_EM_CUDA = 190


def elf(sections: dict[str, bytes], *, capability: int = 90, abi: int = 7, machine: int = _EM_CUDA) -> bytes:
    """An ELF64 with ``sections``; ``abi`` 8 keeps the capability in the second byte of the flags."""
    names, offsets = b"\0", [0]
    for name in (*sections, ".shstrtab"):
        offsets.append(len(names))
        names += name.encode() + b"\0"
    bodies = [*sections.values(), names]
    headers, at, data = [bytes(64)], 64, b""
    for offset, body in zip(offsets[1:], bodies, strict=True):
        headers.append(struct.pack("<IIQQQQIIQQ", offset, 1, 0, 0, at + len(data), len(body), 0, 0, 1, 0))
        data += body
    flags = capability << 8 if abi >= 8 else capability
    begin = b"\x7fELF\x02\x01\x01\x33" + bytes([abi]) + bytes(7)
    rest = struct.pack(
        "<HHIQQQIHHHHHH", 2, machine, 1, 0, 0, at + len(data), flags, 64, 0, 0, 64, len(headers), len(headers) - 1
    )
    return begin + rest + data + b"".join(headers)


def threads(count: int) -> bytes:
    """The attribute by which a kernel names the threads of its CTA, behind one without a value."""
    return struct.pack("<BBH", 0x01, 0x50, 0) + struct.pack("<BBHIII", 0x04, 0x10, 12, count, 1, 1)


def fatbin(cubins: list[tuple[int, bytes]]) -> bytes:
    """A fatbin with (capability, cubin)s, uncompressed."""
    body = b""
    for capability, cubin in cubins:
        padded = cubin + bytes(-len(cubin) % 8)
        body += struct.pack("<HHIQIIHHIIIQQQ", 2, 0x0101, 64, len(padded), 0, 0, 7, 1, capability, 0, 0, 0x11, 0, 0)
        body += padded
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body
