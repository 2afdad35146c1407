"""Every benchmark compiles offline for every architecture that has it, into the instructions it is meant to time."""

from __future__ import annotations

import re

import pytest
from support.whole import is_whole

from tilecast.codegen.compiler.compile import CompileError as NoTool
from tilecast.codegen.compiler.flow import steady_loops
from tilecast.codegen.compiler.sass import Instruction, disassemble
from tilecast.validation.lab.calibrate import nvrtc
from tilecast.validation.lab.calibrate.cases import Case
from tilecast.validation.lab.calibrate.groups import all_cases
from tilecast.validation.lab.calibrate.run import chosen

pytestmark = pytest.mark.skipif(not nvrtc.available(), reason="needs NVRTC: pip install 'tilecast[gpu]'")
CHIPS = (80, 90, 100, 103, 120)


def representatives(chip: int) -> list[Case]:
    """Of every source file the first or the last case in turn, the ends of its parameter ranges; on Hopper both with `--whole`."""
    by_source: dict[str, list[Case]] = {}
    for case in chosen(all_cases(), chip, quick=False):
        by_source.setdefault(case.source, []).append(case)
    found = []
    for turn, cases in enumerate(by_source.values()):
        ends = dict.fromkeys((0, len(cases) - 1)) if chip == 90 and is_whole() else [-((turn + chip) % 2)]
        found += [cases[end] for end in ends]
    return found


@pytest.mark.parametrize("chip", CHIPS)
def test_every_source_compiles(chip: int) -> None:
    for case in representatives(chip):
        assert nvrtc.compile_cubin(case.text(), nvrtc.ARCHES[chip])[:4] == b"\x7fELF", case.label()


def test_the_compilers_complaint_names_the_line() -> None:
    with pytest.raises(nvrtc.CompileError, match=r"refused a benchmark for sm_90a: bench.cu\(1\)"):
        nvrtc.compile_cubin("void f() { nonsense; }", "sm_90a")


def disassembled(case: Case, arch: str = "sm_90a") -> tuple[Instruction, ...]:
    try:
        return disassemble(nvrtc.compile_cubin(case.text(), arch))
    except NoTool as error:
        pytest.skip(str(error))


def opcodes(case: Case, arch: str = "sm_90a") -> list[str]:
    return [i.text for i in disassembled(case, arch)]


def loops(case: Case) -> list[list[str]]:
    """Opcodes of the inner loops."""
    return [[i.opcode + i.modifiers for i in loop.instructions] for loop in steady_loops(disassembled(case))]


def find(**wanted: object) -> Case:
    group, benchmark = wanted.pop("group"), wanted.pop("benchmark")
    (case,) = [
        c for c in all_cases()
        if (c.group, c.benchmark) == (group, benchmark) and all(c.params.get(k) == v for k, v in wanted.items())
    ]  # fmt: skip
    return case


@pytest.mark.parametrize("a", ["smem", "register"])
def test_no_matrix_work_is_deleted(a: str) -> None:
    # The assembler replaces groups whose accumulators it knows to be overwritten by a dummy 64x8x16 instruction.
    case = find(group="tensor", benchmark="wgmma_latency", n=128, a=a, steps=4, warpgroups=1, b="k-major")
    matrix = [line for line in opcodes(case) if line.startswith("HGMMA")]
    assert len(matrix) % 4 == 0
    assert all("64x128x16" in line for line in matrix)


def test_shared_memory_streams_keep_all_sixteen_loads() -> None:
    for stream, opcode in (("ld_shared", r"LDS\.128"), ("ldmatrix", r"LDSM")):
        case = find(
            group="smem", benchmark="beside_mma", stream=stream, mma_warpgroups=0, stream_warpgroups=1, fill=False
        )
        assert sum(bool(re.match(opcode, line)) for line in opcodes(case)) == 16


def test_streams_are_the_instructions_they_name() -> None:
    for stream, opcode, count in (("ex2", "MUFU.EX2", 128), ("max2", "FMNMX", 128), ("pack_bf16x2", "F2FP.BF16", 128)):
        case = find(group="arithmetic", benchmark="rate", stream=stream, warps_per_partition=1)
        assert sum(line.startswith(opcode) for line in opcodes(case)) == count
    case = find(group="arithmetic", benchmark="rate", stream="ffma2", warps_per_partition=1)
    assert sum(line.startswith("FFMA2") for line in opcodes(case, "sm_100a")) == 128


def test_no_instruction_of_a_live_stream_is_deleted() -> None:
    # The assembler takes what does not change out of the loop, and drops what nothing reads.
    for load, opcode, count in (
        ("chaos", "FFMA", 16), ("chaos+fold", "LOP3", 8), ("chaos+2 folds", "LOP3", 16), ("chaos+ex2+fold", "MUFU.EX2", 16),
        ("chaos+ffma+fold", "FFMA", 32), ("chaos+fadd+fold", "FADD", 16), ("chaos+max2+fold", "FMNMX", 16),
        ("chaos+pack_bf16x2+fold", "F2FP.BF16", 16), ("ld_shared", "LDS.128", 16), ("st_shared", "STS.128", 16),
    ):  # fmt: skip
        (body,) = loops(find(group="power", benchmark="load", load=load))
        assert sum(line.startswith(opcode) for line in body) == count, (load, body)
