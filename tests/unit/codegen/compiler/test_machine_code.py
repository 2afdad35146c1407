"""Reading machine code: control words, what an instruction is, and which stretches a tile runs through."""

from __future__ import annotations

from pathlib import Path

import pytest

from tilecast.codegen.compiler import machine_code
from tilecast.codegen.compiler.machine_code import Line, disassemble_with_control, instruction, kernel_code
from tilecast.model.compiled.code import CodeError, KernelCode, Stretch
from tilecast.model.kernel.workload import Workload

LISTING = """
\tcode for sm_90a
        /*0000*/                   LDC R1, c[0x0][0x28] ;                                     /* 0x00000a00ff017b82 */
                                                                                              /* 0x000e220000000800 */
        /*1f30*/              @!P0 HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;      /* 0x01e00000081879f0 */
                                                                                              /* 0x00544c0008001818 */
\t\t..........
"""


@pytest.fixture
def cuobjdump(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):  # type: ignore[no-untyped-def]
    """Let a script that prints a text stand for cuobjdump."""

    def install(text: str) -> None:
        (tmp_path / "listing").write_text(text)
        script = tmp_path / "cuobjdump"
        script.write_text(f"#!/bin/sh\ncat '{tmp_path}/listing'\necho broken >&2\n")
        script.chmod(0o755)
        monkeypatch.setattr(machine_code, "tool", lambda name: script)

    return install


def test_control_words_are_decoded(cuobjdump) -> None:  # type: ignore[no-untyped-def]
    cuobjdump(LISTING)
    first, second = disassemble_with_control(Path("kernel.cubin"))
    assert (first.address, first.text, first.opcode) == (0, "LDC R1, c[0x0][0x28]", "LDC")
    assert (second.address, second.opcode) == (0x1F30, "HGMMA")
    # 0x000e22: stall 1, yield, counter 0 for the result, none for operands, nothing waited for.
    load = instruction(first, 1)
    assert (load.stall, load.write_counter, load.read_counter, load.waits) == (1, 0, 7, 0)
    assert (load.pipe, load.latency, load.kind) == ("control", "constant", "plain")
    # 0x00544c: stall 6, counter 1 for the result, 2 for operands, counters 0 and 2 waited for.
    product = instruction(second, 1)
    assert (product.stall, product.write_counter, product.read_counter, product.waits) == (6, 1, 2, 0b101)
    assert (product.pipe, product.kind, product.amount, product.from_registers, product.commits) == (
        "tensor",
        "mma",
        128,
        False,
        True,
    )


def test_a_file_without_instructions_is_refused_with_what_the_tool_said(cuobjdump) -> None:  # type: ignore[no-untyped-def]
    cuobjdump("no device code\n")
    with pytest.raises(CodeError, match=r"kernel.cubin: cuobjdump printed no instructions: broken"):
        disassemble_with_control(Path("kernel.cubin"))


@pytest.mark.parametrize(
    ("text", "pipe", "kind", "amount"),
    [
        ("HGMMA.64x64x16.F32.BF16 R24, R88, gdesc[UR8], R24", "tensor", "mma", 64),
        ("WARPGROUP.DEPBAR.LE gsb0, 0x1", "other", "mma_wait", 1),
        ("WARPGROUP.ARRIVE", "other", "plain", 0),
        ("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R2+URZ], R5", "shared", "wait", 0),
        ("SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R4+URZ], RZ", "shared", "arrive", 0),
        ("SYNCS.EXCH.64 URZ, [UR4], UR6", "shared", "plain", 0),
        ("UTMALDG.4D [UR8], [UR4], desc[URZ]", "uniform", "load", 0),
        ("@P1 STG.E.128 desc[UR4][R2.64], R8", "shared", "store", 16),
        ("STG.E.64 desc[UR4][R2.64], R8", "shared", "store", 8),
        ("STG.E desc[UR4][R2.64], R8", "shared", "store", 4),
        ("BAR.SYNC.DEFER_BLOCKING R5, 0x80", "control", "barrier", 0),
        ("BAR.SYNC.DEFER_BLOCKING 0x0", "control", "barrier", 2),
        ("@!UP0 UIADD3 UR4, UR4, 0x1, URZ", "uniform", "plain", 0),
        ("MUFU.EX2 R4, R4", "mufu", "plain", 0),
        ("STL [R1+0x4c], R14", "shared", "spill", 4),
        ("STL.64 [R1], R14", "shared", "spill", 8),
        ("@P0 LDL.LU R14, [R1+0x50]", "shared", "reload", 4),
        ("FFMA R4, R4, R5, R6", "fma", "plain", 0),
        ("@!P2 FSEL R4, R4, -INF , P1", "alu", "plain", 0),
        ("SHFL.BFLY PT, R4, R5, 0x1, 0x1f", "shared", "plain", 0),
        ("NOP", "other", "plain", 0),
    ],
)
def test_what_an_instruction_is(text: str, pipe: str, kind: str, amount: int) -> None:
    found = instruction(Line(0, text, 0), 2)
    assert (found.pipe, found.kind, found.amount) == (pipe, kind, amount)
    assert found.stall == 1  # a stall count of zero still takes the issue slot
    assert found.from_registers == (kind == "mma")
    assert not found.commits


def test_spills_and_reloads_say_which_word() -> None:
    words = [
        instruction(Line(0, text, 0), 1).word for text in ("STL [R1+0x4c], R1", "LDL.LU R0, [R1]", "FADD R1, R2, R3")
    ]
    assert words == [19, 0, -1]
    assert instruction(Line(0, "LDL R0, [R1+0x4]", 0), 1).latency == "local"


@pytest.mark.parametrize(
    ("text", "target"),
    [("@P0 BRA 0x1f0", 0x1F0), ("BRA.U.ANY 0x10", 0x10), ("BRX R4 -0x10", None), ("IADD3 R4, R4, 0x10, RZ", None)],
)
def test_branch_targets(text: str, target: int | None) -> None:
    assert Line(0, text, 0).target == target


# --- listings ------------------------------------------------------------------------------------------------------

MMA = "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24, gsb0"
MASKING = ["FSEL R4, R4, -INF , P1"] * 16 + ["IADD3 R4, R4, 0x1, RZ"] * 32
END = ["EXIT"]


def assemble(*rows: str) -> list[Line]:
    """Lines at addresses 16 apart; ``name:`` rows are labels and ``{name}`` their addresses."""
    labels: dict[str, int] = {}
    texts: list[str] = []
    for row in rows:
        if row.endswith(":"):
            labels[row[:-1]] = 16 * len(texts)
        else:
            texts.append(row)
    return [
        Line(16 * i, text.format(**{k: hex(v) for k, v in labels.items()}) if "{" in text else text, 1)
        for i, text in enumerate(texts)
    ]


def loop(name: str, *body: str) -> list[str]:
    return [f"{name}:", *body, f"@P0 BRA {{{name}}}"]


def read(
    lines: list[Line], family: str = "triton", mask: str = "causal", warps: int = 4, variant: str = "family=fa2"
) -> KernelCode:
    return kernel_code(
        lines, family=family, variant=variant, head_dims=(64, 64), mask=mask, dtype="bf16",
        arch="sm_90a", compiler="none",
        warps=warps, registers=100, shared_bytes=1024, stack_bytes=0,
    )  # fmt: skip


def shape(program: tuple[Stretch, ...]) -> list[tuple[str, int]]:
    return [(stretch.role, len(stretch.instructions)) for stretch in program]


MAIN, EDGE = loop("main", MMA, "MUFU.EX2 R4, R4"), loop("edge", MMA, *MASKING, "MUFU.EX2 R4, R4")


def test_a_program_is_cut_at_its_loops() -> None:
    code = read(assemble("S2R R0, SR_TID.X", *MAIN, "NOP", "NOP", *EDGE, "STG.E [R4], R5", *END, "NOP"))
    assert [shape(program) for program in code.consumers] == [
        [("once", 1), ("main", 3), ("once", 2), ("edge", 51), ("once", 2)],  # nothing after EXIT
    ]


def test_every_warpgroup_of_a_triton_kernel_runs_the_same_code() -> None:
    code = read(assemble(*MAIN, *EDGE, *END), warps=8)
    assert len(code.consumers) == 2
    assert code.consumers[0] == code.consumers[1]


def test_branches_over_masking_and_always_are_taken_others_are_not() -> None:
    def once(*rows: str) -> int:
        found = shape(read(assemble(*rows, *MAIN, *EDGE, *END)).consumers[0])
        assert found[1:] == [("main", 3), ("edge", 51), ("once", 1)]
        return found[0][1]

    assert once("@P1 BRA {over}", *MASKING, "over:", "NOP") == 2
    assert once("BRA {over}", "NOP", "NOP", "over:", "NOP") == 2
    assert once("@P1 BRA {over}", "NOP", "NOP", "over:", "NOP") == 4
    assert once("@P1 BRA {over}", *MASKING[:15], *MASKING[16:], "NOP", "over:", "NOP") == 50  # too few selects
    assert once("@P1 BRA {over}", *MASKING[:40], "over:", "NOP") == 42  # too short
    assert once("@P1 BRA {over}", *MASKING, "MUFU.EX2 R4, R4", "over:", "NOP") == 51  # computes, too


def test_branches_around_a_loop_enter_it() -> None:
    for jump in ("@P1 BRA {after}", "BRA {after}"):
        code = read(assemble(jump, *MAIN, "after:", "NOP", *EDGE, *END))
        assert shape(code.consumers[0]) == [("once", 1), ("main", 3), ("once", 1), ("edge", 51), ("once", 1)]


def test_an_unconditional_branch_back_is_no_loop() -> None:
    rows = assemble("back:", MMA, "NOP", "BRA {back}", *END)
    with pytest.raises(CodeError, match="no loop with wgmma"):
        read(rows)


def test_the_left_edge_of_a_window_comes_first() -> None:
    left = loop("left", MMA)
    code = read(assemble(*left, *MAIN, *EDGE, *END), mask="window")
    assert [role for role, _ in shape(code.consumers[0])] == ["left", "main", "edge", "once"]


def consumer(name: str, skip: bool = True, first: tuple[str, ...] = ()) -> list[str]:
    """A tile loop with the loops over keys inside, and the loop that passes over others' blocks; ``first`` follows the first S."""
    passing = loop(
        f"pass{name}", "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R2+URZ], R5", "SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R4+URZ], RZ"
    )
    return loop(f"tile{name}", "NOP", *(passing if skip else []), "NOP", MMA, *first, *loop(f"edge{name}", MMA, "NOP"), "NOP",
                *loop(f"main{name}", MMA), "NOP", "NOP")  # fmt: skip


SETUP = ["SYNCS.EXCH.64 URZ, [UR4], UR6"] * 5


def test_each_consumer_of_a_hopper_kernel_has_its_own_program() -> None:
    rows = assemble(*SETUP, *consumer("a"), *consumer("b"), *END)
    code = read(rows, family="hopper_ws", warps=12, variant="family=fa3,warpgroups=2")
    assert code.barriers == 5
    expected = [("once", 1), ("pass", 3), ("once", 2), ("edge", 3), ("once", 1), ("main", 2), ("once", 3)]
    assert [shape(program) for program in code.consumers] == [expected, expected]


def test_the_first_block_of_a_masked_hopper_kernel_hides_its_scores() -> None:
    """Under a mask every tile begins on its edge; without one only a ragged end does."""
    hide = ("@P1 BRA {over}", *MASKING, "over:")

    def before_the_loops(mask: str) -> int:
        rows = assemble(*SETUP, *consumer("a", first=hide), *END)
        code = read(rows, family="hopper_ws", mask=mask, warps=8, variant="family=fa3,warpgroups=1")
        return shape(code.consumers[0])[2][1]

    assert before_the_loops("none") == 3
    assert before_the_loops("causal") == 3 + len(MASKING)


def test_a_passing_loop_that_was_moved_away_is_lent_by_the_other_consumer() -> None:
    rows = assemble(*consumer("a"), *consumer("b", skip=False), *END)
    first, second = read(rows, family="hopper_ws", warps=12, variant="family=fa3,warpgroups=2").consumers
    assert shape(second) == [("pass", 3), ("once", 3), ("edge", 3), ("once", 1), ("main", 2), ("once", 3)]
    assert second[0] == first[1]


def test_other_code_is_refused() -> None:
    with pytest.raises(CodeError, match="expected 4 loops with wgmma, found 2"):
        read(assemble(*consumer("a"), *END), family="hopper_ws", variant="family=fa3,warpgroups=2")
    with pytest.raises(CodeError, match="no loop over work tiles"):
        read(assemble(*MAIN, *EDGE, *END), family="hopper_ws", variant="family=fa3,warpgroups=1")
    with pytest.raises(CodeError, match="got blackwell_ws"):
        read(assemble(*MAIN, *END), family="blackwell_ws")


@pytest.mark.parametrize(
    ("family", "variant", "rows", "consumers"),
    [
        (
            "hopper_ws",
            "family=fa3,warpgroups=2,tile_n=64,kv_stages=2,overlap=true,ping_pong=false,scheduler=persistent",
            64,
            2,
        ),
        pytest.param(
            "hopper_ws",
            "family=fa3,warpgroups=2,tile_n=64,kv_stages=2,overlap=true,ping_pong=false,scheduler=grid",
            64,
            2,
            marks=pytest.mark.xfail(
                strict=True, reason="an unmasked grid kernel has no loop over work tiles to be read by"
            ),
        ),
        ("triton", "family=fa2,tile_m=64,tile_n=64,warps=4,stages=2", 64, 1),
    ],
)
def test_a_compiled_kernel_multiplies_what_its_tiles_need(family: str, variant: str, rows: int, consumers: int) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    from tilecast.codegen.compiler.profile import profile

    work = Workload(1, 16, 16, 1024, 1024, 64, 128)
    code = profile(family, variant, work, "h200-sxm")
    assert len(code.consumers) == consumers
    for program in code.consumers:
        loops = [stretch for stretch in program if stretch.role in ("main", "edge")]
        # Without a mask the template of Hopper writes no loop over masked blocks.
        assert len(loops) == (1 if family == "hopper_ws" else 2)
        for stretch in loops:
            products = [i for i in stretch.instructions if i.kind == "mma"]
            scores, outputs = [[i for i in products if i.from_registers == kind] for kind in (False, True)]
            # S = Q K^T: 16 of head_dim_qk at a time, tile_n columns; O = P V: 16 keys at a time, head_dim_v columns.
            assert [i.amount for i in scores] == [64] * (work.head_dim_qk // 16)
            assert [i.amount for i in outputs] == [work.head_dim_v] * (64 // 16)
            assert sum(64 * i.amount * 16 for i in products) == rows * 64 * (64 + 128)
            assert sum(i.commits for i in products) >= 2
    assert code.key() == (family, variant, 64, 128, "none", "bf16")
    assert code.stack_bytes == 0
