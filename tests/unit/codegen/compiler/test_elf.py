"""The header of a cubin: architecture under both ABIs, threads, table of branches; and what is no cubin."""

from __future__ import annotations

import struct

import pytest
from support.cubins import elf, threads

from tilecast.codegen.compiler.elf import ElfError, is_host_elf, read_cubin


@pytest.mark.parametrize(("capability", "abi"), [(80, 7), (90, 7), (100, 8), (103, 8)])
def test_the_capability_stands_where_the_abi_says(capability: int, abi: int) -> None:
    assert read_cubin(elf({".text.k": b"\1"}, capability=capability, abi=abi)).capability == capability


def test_kernels_with_their_threads_and_tables() -> None:
    sections = {
        ".text.a": b"\1\2", ".text.b": bytes(16), ".nv.info.a": threads(384),
        ".nv.constant2.a": struct.pack("<III", 0x310, 0x60E0, 0x310),
    }  # fmt: skip
    a, b = read_cubin(elf(sections)).entries
    assert (a.name, a.threads, a.has_code, a.table) == ("a", 384, True, (0x310, 0x60E0, 0x310))
    assert (b.name, b.threads, b.has_code, b.table, b.cluster) == ("b", 0, False, (), 1)


def test_a_kernel_is_found_in_the_table_of_symbols() -> None:
    """By its name and that it is a function, so that one of many is disassembled alone."""
    names = b"\0k\0other\0"
    table = struct.pack("<IBBHQQ", 1, 3, 0, 0, 0, 0) + struct.pack("<IBBHQQ", 3, 0x12, 0, 0, 0, 0)
    table += struct.pack("<IBBHQQ", 1, 0x12, 0x10, 0, 0, 0)
    (k,) = read_cubin(elf({".text.k": b"\1", ".symtab": table, ".strtab": names})).entries
    assert k.symbol == 2
    assert read_cubin(elf({".text.k": b"\1"})).entries[0].symbol == -1


def test_what_is_no_cubin_is_said() -> None:
    whole = elf({".text.k": bytes(64)})
    host = elf({}, machine=62)
    assert is_host_elf(host) and not is_host_elf(whole) and not is_host_elf(b"MZ")
    for data, text in (
        (b"MZ\0\0", "expected an ELF, its first bytes are b'MZ"),
        (whole[:40], "expected a 64-bit ELF"),
        (host, "got machine 62"),
        (whole[:100], "cut off"),
        (whole.replace(struct.pack("<Q", 64), struct.pack("<Q", 1 << 40)), "cut off"),
    ):
        with pytest.raises(ElfError, match=text):
            read_cubin(data)
