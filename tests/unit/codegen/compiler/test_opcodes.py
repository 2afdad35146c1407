"""The table of opcodes: pipes the simulator knows, and what falls into none of them."""

from __future__ import annotations

import pytest

from tilecast.codegen.compiler.opcodes import MATRIX, latency_of, pipe_of
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
