"""Reading a listing: control words, predicates, branch targets; and what cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tilecast.codegen.compiler import sass
from tilecast.codegen.compiler.compile import CompileError
from tilecast.codegen.compiler.sass import Instruction, Resources, disassemble, resources

LISTING = """
\t.target\tsm_90a
.text.attention:
        /*0000*/                   LDC R1, c[0x0][0x28] ;                        /* 0x00000a00ff017b82 */
                                                                                 /* 0x000e220000000800 */
.L_x_1:
.L_x_7:
        /*0010*/              @!P0 HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;  /* 0x01e00000081879f0 */
                                                                                 /* 0x00544c0008001818 */
        /*0020*/              @!P0 BRA `(.L_x_1) ;                               /* 0xfffffffc00f08947 */
                                                                                 /* 0x000fea000383ffff */
        /*0030*/              @!P0 BRA P1, `(.L_x_2) ;                           /* 0xfffffffc00f08947 */
                                                                                 /* 0x000fea000383ffff */
        /*0040*/                   BRA.U !UP1, `(.L_x_2) ;                       /* 0xfffffffc00f08947 */
                                                                                 /* 0x000fea000383ffff */
        /*0050*/                   BRX R2 -0x4710    (*"BRANCH_TARGETS .L_x_1,.L_x_2"*); /* 0xffffffb8023c7949 */
                                                                                 /* 0x000fea000383ffff */
.L_x_2:
        /*0060*/                   BRA `(.L_x_7) ;                               /* 0xfffffffc00f08947 */
                                                                                 /* 0x000fea000383ffff */
        /*0070*/               @P0 EXIT ;                                        /* 0x000000000000894d */
                                                                                 /* 0x000fea0003800000 */
        /*0080*/                   EXIT ;                                        /* 0x000000000000794d */
                                                                                 /* 0x000fea0003800000 */
"""


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):  # type: ignore[no-untyped-def]
    """Let a script that prints a text stand for the toolkit's binaries."""

    def install(text: str, status: int = 0) -> None:
        (tmp_path / "listing").write_text(text)
        script = tmp_path / "tool"
        script.write_text(f"#!/bin/sh\ncat '{tmp_path}/listing'\necho broken >&2\nexit {status}\n")
        script.chmod(0o755)
        monkeypatch.setattr(sass, "tool", lambda name: script)

    return install


def test_a_listing_is_read(says) -> None:  # type: ignore[no-untyped-def]
    says(LISTING)
    load, product, spin, both, uniform, indirect, back, leave, end = disassemble(b"cubin")
    assert load == Instruction(0, "LDC", "", "R1, c[0x0][0x28]", "", 0x000E220000000800 >> 41)
    assert (product.address, product.opcode, product.modifiers) == (0x10, "HGMMA", ".64x128x16.F32.BF16")
    assert (product.predicate, product.operands) == ("@!P0", "R24, gdesc[UR8], R24, gsb0")
    assert product.text == "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24, gsb0"
    assert [i.target for i in (load, spin, both, uniform, back)] == [None, 0x10, 0x60, 0x60, 0x10]
    assert indirect.target is None and indirect.targets == (0x10, 0x60) and indirect.operands == "R2 -0x4710"
    # A predicate before the opcode or among a branch's operands: the next instruction can follow.
    assert [i.goes_on for i in (load, product, spin, both, uniform)] == [True] * 5
    assert [i.goes_on for i in (indirect, back, leave, end)] == [False, False, True, False]


def test_what_cannot_be_read_is_refused_with_what_the_tool_said(says) -> None:  # type: ignore[no-untyped-def]
    says("no device code\n")
    with pytest.raises(CompileError, match="nvdisasm printed no instructions: no device code"):
        disassemble(b"cubin")
    with pytest.raises(CompileError, match="cuobjdump reports no resources"):
        resources(b"cubin")
    says("", status=1)
    with pytest.raises(CompileError, match="nvdisasm: broken"):
        disassemble(b"cubin")


def test_resources(says) -> None:  # type: ignore[no-untyped-def]
    says(" Function attention:\n  REG:168 STACK:24 SHARED:0 LOCAL:0\n")
    assert resources(b"cubin") == Resources(168, 24)
