"""The table of opcodes: pipes the simulator knows, and what falls into none of them."""

from __future__ import annotations

import pytest

from tilecast.codegen.compiler.opcodes import (
    MATRIX,
    MMA_SYNC,
    OPCODES,
    TCGEN05,
    WGMMA,
    WIDTHS,
    UnknownOpcodeError,
    check_known,
    latency_of,
    pipe_of,
)
from tilecast.model.compiled.code import LATENCIES, PIPES


@pytest.mark.parametrize(
    ("opcode", "pipe"),
    [
        ("MUFU", "mufu"), ("FFMA", "fma"), ("FFMA2", "fma"), ("IMAD", "fma"), ("FMNMX3", "alu"), ("IADD3", "alu"),
        ("VOTEU", "alu"), ("SHFL", "shared"), ("S2UR", "control"), ("UIADD3", "uniform"), ("R2UR", "uniform"),
        ("HGMMA", "tensor"), ("UTCHMMA", "tensor"), ("UTMALDG", "uniform"), ("NOP", "other"),
    ],
)  # fmt: skip
def test_pipes(opcode: str, pipe: str) -> None:
    assert pipe_of(opcode) == pipe
    assert pipe in PIPES


def test_latencies() -> None:
    assert [latency_of(name) for name in ("MUFU", "LDL", "SYNCS", "FFMA")] == ["mufu", "local", "poll", "fixed"]
    assert {latency_of(name) for name in ("MUFU", "SHFL", "LDC", "S2R", "LDG", "I2F", "R2UR")} <= set(LATENCIES)
    assert {pipe_of(name) for name in MATRIX} == {"tensor"}


def test_every_row_is_in_the_words_of_the_table() -> None:
    spaces = {"shared", "global", "local", "constant", "tensor"}
    for name, known in OPCODES.items():
        assert known.pipe in PIPES and known.width in WIDTHS, name
        assert {*known.reads, *known.writes} <= spaces, name
        assert not known.asynchronous or known.writes or name in WGMMA, name


def test_what_an_instruction_moves_and_who_waits_for_it() -> None:
    copy, product, packed = OPCODES["UTMALDG"], OPCODES["UTCHMMA"], OPCODES["FFMA2"]
    assert (copy.reads, copy.writes, copy.width, copy.asynchronous) == (("global",), ("shared",), "cta", True)
    assert (product.reads, product.writes, product.asynchronous) == (("shared", "tensor"), ("tensor",), True)
    assert (packed.width, packed.reads, OPCODES["LDS"].asynchronous) == ("packed", (), False)
    assert "HMMA" in MMA_SYNC and "HGMMA" in WGMMA and "UTCQMMA" in TCGEN05
    assert set(MATRIX) == MMA_SYNC | WGMMA | TCGEN05


def test_an_unknown_opcode_is_named_with_its_place() -> None:
    check_known([("FFMA", 0), ("EXIT", 16)], "k.cubin")
    with pytest.raises(UnknownOpcodeError, match=r"k.cubin: .* got 'FFROB' at 0x20"):
        check_known([("FFMA", 0), ("FFROB", 32)], "k.cubin")
