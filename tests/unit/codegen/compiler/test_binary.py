"""Any CUDA binary in: which kernel is meant, and one sentence for everything that cannot be read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.cubins import elf, fatbin, threads

from tilecast.codegen.compiler.binary import BinaryError, read_binary
from tilecast.codegen.compiler.opcodes import UnknownOpcodeError

pytest.importorskip("triton")

LISTING = """
\t.headerflags\t@"EF_CUDA_TEXMODE_UNIFIED EF_CUDA_64BIT_ADDRESS EF_CUDA_SM90 EF_CUDA_VIRTUAL_SM(EF_CUDA_SM90)"
\t.section\t.text.first,"ax",@progbits
.text.first:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/                   FADD R2, R2, R3 ;
        /*0020*/              @P0 BRA `(.L_x_0) ;
        /*0030*/                   EXIT ;
\t.section\t.text.second,"ax",@progbits
.text.second:
        /*0000*/                   EXIT ;
"""


def refusal(path: Path, **asked: str) -> str:
    with pytest.raises(BinaryError) as told:
        read_binary(path, **asked)
    sentence = str(told.value)
    assert str(path) in sentence and "\n" not in sentence
    return sentence


def write(folder: Path, name: str, data: bytes | str) -> Path:
    file = folder / name
    file.write_bytes(data.encode() if isinstance(data, str) else data)
    return file


def test_a_listing_without_encodings_is_read(tmp_path: Path) -> None:
    file = write(tmp_path, "k.sass", LISTING)
    found = read_binary(file, kernel="fir")
    assert (found.kernel, found.target, found.warps, found.registers) == ("first", "sm_90a", None, None)
    assert [i.opcode for i in found.instructions] == ["MOV", "FADD", "BRA", "EXIT"]
    assert found.instructions[2].targets == (0x10,)
    assert "holds first, second: which one? Say --kernel" in refusal(file)
    assert "expected a kernel 'third', got first, second" in refusal(file, kernel="third")
    assert "expected code for sm_80, got sm_90a" in refusal(file, arch="sm_80", kernel="first")


def test_a_listing_of_cuobjdump_names_addresses(tmp_path: Path) -> None:
    text = """
        code for sm_80
                Function : only
        .headerflags    @"EF_CUDA_SM80 EF_CUDA_VIRTUAL_SM(EF_CUDA_SM80)"
        /*0000*/                   NOP ;                      /* 0x0000000000007918 */
                                                              /* 0x000fea0003800000 */
        /*0010*/              @!P0 BRA 0x0 ;                  /* 0xfffffffc00f08947 */
                                                              /* 0x000fea000383ffff */
"""
    found = read_binary(write(tmp_path, "k.txt", text))
    assert (found.kernel, found.target) == ("only", "sm_80")
    assert found.instructions[1].target == 0 and found.instructions[1].control == 0x000FEA000383FFFF >> 41


def test_a_listing_may_not_say_its_architecture(tmp_path: Path) -> None:
    file = write(tmp_path, "k.sass", "        /*0000*/                   EXIT ;\n")
    assert "does not say what it was compiled for: say --arch" in refusal(file)
    assert read_binary(file, arch="sm_80").target == "sm_80"


def test_an_unknown_opcode_is_named_and_refused(tmp_path: Path) -> None:
    file = write(tmp_path, "k.sass", LISTING.replace("FADD", "FROBNICATE"))
    with pytest.raises(UnknownOpcodeError, match="got 'FROBNICATE' at 0x10"):
        read_binary(file, kernel="first")


def test_what_is_no_binary_is_refused_in_a_sentence(tmp_path: Path) -> None:
    empty = tmp_path / "cache"
    empty.mkdir()
    blackwell = elf({".text.k": b"\1"}, capability=120, abi=8)
    for file, text in (
        (tmp_path / "none.cubin", "found none"),
        (empty, "found no .cubin"),
        (write(tmp_path, "a.cubin", b"MZ\x90\0"), "expected an ELF of device code"),
        (write(tmp_path, "b.cubin", elf({".text.k": b"\1"})[:90]), "cut off"),
        (write(tmp_path, "c.cubin", blackwell), "expected code for sm_80, sm_90a, sm_100a, sm_103a, got sm_120"),
        (write(tmp_path, "d.cubin", elf({".data": b"\1"})), "stripped"),
        (write(tmp_path, "e.cubin", elf({".text.k": bytes(64)})), "stripped"),
        (write(tmp_path, "f.cubin", elf({".text.k": bytes(range(64)), ".nv.info.k": threads(128)})), "encrypted"),
        (write(tmp_path, "g.o", elf({}, machine=62)), "expected device code inside, found none"),
        (write(tmp_path, "h.sass", LISTING.replace("SM90", "SM75")), "got sm_75"),
    ):
        assert text in refusal(file)
    with pytest.raises(BinaryError, match="--arch: expected sm_80"):
        read_binary(empty, arch="sm_42")


@pytest.fixture(scope="module")
def made() -> dict[str, bytes]:
    from support.triton_kernels import cubin

    return {"sm_80": cubin("layer_norm", "sm_80"), "sm_90a": cubin("layer_norm", "sm_90a")}


def test_a_cubin_and_what_triton_writes_beside_it(tmp_path: Path, made: dict[str, bytes]) -> None:
    write(tmp_path, "layer_norm.cubin", made["sm_90a"])
    write(tmp_path, "layer_norm.json", json.dumps({"shared": 2064, "tmem_size": 0, "num_warps": 4}))
    for path in (tmp_path, tmp_path / "layer_norm.cubin", tmp_path.parent):
        if path == tmp_path.parent and len(list(path.glob("*/*.cubin"))) != 1:
            continue
        found = read_binary(path)
        assert (found.kernel, found.target, found.warps) == ("layer_norm", "sm_90a", 4)
        assert (found.shared_bytes, found.tmem_columns, found.stack_bytes) == (2064, 0, 0)
        assert found.registers and found.instructions[0].address == 0
    write(tmp_path, "again.cubin", made["sm_90a"])
    assert "holds 2 kernels named layer_norm: which file?" in refusal(tmp_path)


def test_a_fatbin_holds_several_architectures(tmp_path: Path, made: dict[str, bytes]) -> None:
    file = write(tmp_path, "two.fatbin", fatbin([(80, made["sm_80"]), (90, made["sm_90a"])]))
    assert "holds code for sm_80, sm_90a: which one? Say --arch" in refusal(file)
    assert read_binary(file, arch="sm_80").target == "sm_80"
