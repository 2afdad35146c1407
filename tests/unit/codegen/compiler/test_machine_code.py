"""Reading machine code: what an instruction is to the simulator, and which stretches a tile runs through."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.listing import assemble, loop, made_of
from support.whole import whole

from tilecast.codegen.compiler.machine_code import Made, kernel_code, warp_instruction
from tilecast.codegen.compiler.sass import Instruction
from tilecast.model.compiled.code import CodeError, KernelCode, Stretch
from tilecast.model.kernel.workload import Workload


def test_control_words_are_decoded() -> None:
    # 0x000e22: stall 1, yield, counter 0 for the result, none for operands, nothing waited for.
    load = warp_instruction(made_of("LDC R1, c[0x0][0x28]", control=0x000E220000000800 >> 41), 1)
    assert (load.stall, load.write_counter, load.read_counter, load.waits) == (1, 0, 7, 0)
    assert (load.pipe, load.latency, load.kind) == ("control", "constant", "plain")
    # 0x00544c: stall 6, counter 1 for the result, 2 for operands, counters 0 and 2 waited for.
    text = "@!P0 HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24, gsb0"
    product = warp_instruction(made_of(text, control=0x00544C0008001818 >> 41), 1)
    assert (product.stall, product.write_counter, product.read_counter, product.waits) == (6, 1, 2, 0b101)
    assert (product.pipe, product.kind, product.amount, product.from_registers, product.commits) == (
        "tensor",
        "mma",
        128,
        False,
        True,
    )


@pytest.mark.parametrize(
    ("text", "pipe", "kind", "amount"),
    [
        ("HGMMA.64x64x16.F32.BF16 R24, R88, gdesc[UR8], R24", "tensor", "mma", 64),
        ("QGMMA.64x128x32.F32.E4M3.E4M3 R24, R100, gdesc[UR16], R24", "tensor", "mma", 128),
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
    found = warp_instruction(made_of(text), 2)
    assert (found.pipe, found.kind, found.amount) == (pipe, kind, amount)
    assert found.stall == 1  # a stall count of zero still takes the issue slot
    assert found.from_registers == (kind == "mma")
    assert not found.commits


def test_spills_and_reloads_say_which_word() -> None:
    words = [
        warp_instruction(made_of(text), 1).word for text in ("STL [R1+0x4c], R1", "LDL.LU R0, [R1]", "FADD R1, R2, R3")
    ]
    assert words == [19, 0, -1]
    assert warp_instruction(made_of("LDL R0, [R1+0x4]"), 1).latency == "local"


# --- listings ------------------------------------------------------------------------------------------------------

MMA = "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24, gsb0"
MASKING = ["FSEL R4, R4, -INF , P1"] * 16 + ["IADD3 R4, R4, 0x1, RZ"] * 32
END = ["EXIT"]


MADE = Made("triton", "family=fa2", (64, 64), "causal", "bf16", "sm_90a", "none", 4, 100, 1024, 0)


def read(lines: list[Instruction], **facts: object) -> KernelCode:
    return kernel_code(lines, replace(MADE, **facts))  # type: ignore[arg-type]


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


def test_a_branch_around_a_loop_enters_it() -> None:
    code = read(assemble("@P1 BRA {after}", *MAIN, "after:", "NOP", *EDGE, *END))
    assert shape(code.consumers[0]) == [("once", 1), ("main", 3), ("once", 1), ("edge", 51), ("once", 1)]


def test_a_wait_that_was_moved_out_of_line_is_no_loop() -> None:
    """It branches back to where it was, past code that does not lead there alone."""
    wait = "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R2+URZ], R5"
    rows = assemble(
        wait, "@!P0 BRA {away}", "back:", MMA, "NOP", *MAIN, *END, "away:", wait, "@!P0 BRA {away}", "BRA {back}"
    )
    assert shape(read(rows, mask="none").consumers[0]) == [("once", 4), ("main", 3), ("once", 1)]


def test_a_loop_that_ends_in_the_middle_goes_round_by_an_unconditional_branch() -> None:
    rows = assemble("NOP", "main:", MMA, "@P0 BRA {out}", "MUFU.EX2 R4, R4", "BRA {main}", "out:", "NOP", *END)
    assert shape(read(rows, mask="none").consumers[0]) == [("once", 1), ("main", 4), ("once", 2)]


def test_other_families_code_has_no_loop_with_wgmma() -> None:
    with pytest.raises(CodeError, match="no loop with wgmma"):
        read(assemble(*loop("main", "FFMA R4, R4, R5, R6"), *END))


def test_the_left_edge_of_a_window_comes_first() -> None:
    left = loop("left", MMA)
    code = read(assemble(*left, *MAIN, *EDGE, *END), mask="window")
    assert [role for role, _ in shape(code.consumers[0])] == ["left", "main", "edge", "once"]


ROLE, LAST = "USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xe8", "USETMAXREG.DEALLOC.CTAPOOL 0x78"
PASS = ("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R2+URZ], R5", "SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R4+URZ], RZ")


def over_keys(name: str) -> list[str]:
    return [*loop(f"edge{name}", MMA, "NOP"), "NOP", *loop(f"main{name}", MMA)]


def consumer(name: str, first: tuple[str, ...] = ()) -> list[str]:
    """A tile loop with the loops over keys inside, and the loop that passes over others' blocks; ``first`` follows the first S."""
    body = ["NOP", *loop(f"pass{name}", *PASS), "NOP", MMA, *first, *over_keys(name), "NOP", "NOP"]
    return [ROLE, *loop(f"tile{name}", *body)]


HOPPER = {"family": "hopper_ws", "warps": 12, "variant": "family=fa3,warpgroups=2"}
ONE = {"family": "hopper_ws", "warps": 8, "variant": "family=fa3,warpgroups=1"}
SETUP = ["SYNCS.EXCH.64 URZ, [UR4], UR6"] * 5
#: Does tiles again: the warps that multiply there also copy.
AGAIN = [ROLE, *loop("again", "UTMALDG.4D [UR8], [UR4], desc[URZ]", *loop("redone", MMA, "MUFU.EX2 R4, R4"))]


def test_each_consumer_of_a_hopper_kernel_has_its_own_program() -> None:
    rows = assemble(*SETUP, *consumer("a"), *AGAIN, *END, *consumer("b"), LAST, *END)
    code = read(rows, **HOPPER)
    assert code.barriers == 5
    expected = [("once", 1), ("pass", 3), ("once", 2), ("edge", 3), ("once", 1), ("main", 2), ("once", 3)]
    assert [shape(program) for program in code.consumers] == [expected, expected]


def test_a_consumer_without_a_loop_over_work_tiles_does_one() -> None:
    """A grid gives each CTA one tile: all of the role is its program."""
    rows = assemble(*SETUP, ROLE, "NOP", *loop("main", MMA), "NOP", LAST, "NOP", *END)
    assert [shape(program) for program in read(rows, mask="none", **ONE).consumers] == [
        [("once", 2), ("main", 2), ("once", 1)]
    ]


def test_a_tile_loop_may_end_by_an_unconditional_branch() -> None:
    rows = assemble(ROLE, "tile:", "NOP", *loop("main", MMA), "@!P1 BRA {out}", "BRA {tile}", "out:", LAST, *END)
    assert shape(read(rows, mask="none", **ONE).consumers[0]) == [("once", 1), ("main", 2), ("once", 2)]


def test_the_first_block_of_a_masked_hopper_kernel_hides_its_scores() -> None:
    """Under a mask every tile begins on its edge; without one only a ragged end does."""
    hide = ("@P1 BRA {over}", *MASKING, "over:")

    def before_the_loops(mask: str) -> int:
        keys = over_keys("a") if mask == "causal" else loop("main", MMA)
        rows = assemble(*SETUP, ROLE, *loop("tile", "NOP", MMA, *hide, *keys, "NOP"), *END)
        return shape(read(rows, mask=mask, **ONE).consumers[0])[0][1]

    assert before_the_loops("none") == 3
    assert before_the_loops("causal") == 3 + len(MASKING)


def test_a_loop_that_was_moved_out_of_line_stands_where_it_is_entered() -> None:
    away = ["away:", *loop("pass", *PASS), "BRA {back}"]
    tile = loop("tile", "NOP", "@P1 BRA {away}", "back:", "NOP", *over_keys("a"), "NOP")
    (program,) = read(assemble(ROLE, *tile, *END, *away), **ONE).consumers
    assert shape(program) == [("once", 2), ("pass", 3), ("once", 2), ("edge", 3), ("once", 1), ("main", 2), ("once", 2)]


def test_loops_are_named_in_the_order_of_a_tile_not_of_addresses() -> None:
    main = ["main:", *loop("mainloop", MMA), "BRA {done}"]
    rows = assemble(
        ROLE, "BRA {start}", *main, "start:", *loop("tile", "NOP", *loop("edge", MMA, "NOP"), "BRA {main}", "done:", "NOP"),
        *END,
    )  # fmt: skip
    (program,) = read(rows, **ONE).consumers
    assert [role for role, _ in shape(program)] == ["once", "edge", "once", "main", "once"]


def test_other_code_is_refused() -> None:
    with pytest.raises(CodeError, match="expected 2 warp roles that multiply, found 1"):
        read(assemble(*consumer("a"), *END), **HOPPER)
    with pytest.raises(
        CodeError, match="expected 2 loops with wgmma in a consumer of a kernel with mask 'causal', found 1"
    ):
        read(assemble(ROLE, *MAIN, *END), **ONE)
    with pytest.raises(CodeError, match="do not follow each other"):
        either = ["@P1 BRA {other}", *MAIN, "BRA {end}", "other:", *EDGE, "end:"]
        read(assemble(ROLE, *loop("tile", "NOP", *either, "NOP"), *END), **ONE)
    with pytest.raises(CodeError, match="blackwell_ws for sm_90a is not read, only hopper_ws and triton for sm_90a"):
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
            marks=whole,
        ),
        # ptxas ends the tile loop of its second consumer by an unconditional branch.
        (
            "hopper_ws",
            "family=fa3,warpgroups=3,tile_n=64,kv_stages=4,ping_pong=false,rescale=anchored,scheduler=persistent",
            64,
            3,
        ),
        ("triton", "family=fa2,tile_m=64,tile_n=64,warps=4,kv_stages=2", 64, 1),
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
    # Where references move, with 160 registers a thread; none in the loops.
    assert code.stack_bytes <= 32
