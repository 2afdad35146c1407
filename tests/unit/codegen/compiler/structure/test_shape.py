"""Roles, loops and barriers of listings written by hand: what decides a role, a ring, a guard, a poll."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.listing import assemble, loop

from tilecast.codegen.compiler.binary import Binary
from tilecast.codegen.compiler.structure.assemble import ShapeError, kernel_shape
from tilecast.codegen.compiler.structure.shape import Barrier, KernelShape, Step

WARP = ["S2R R0, SR_TID.X", "SHF.R.U32.HI R0, RZ, 0x5, R0", "R2UR UR4, R0"]
BASE = ["S2UR UR5, SR_CgaCtaId", "UMOV UR6, 0x400", "ULEA UR6, UR5, UR6, 0x18"]
WORK = ["FFMA R9, R9, R9, R9"] * 3


def shape(*rows: str, warps: int = 12, table: tuple[int, ...] = ()) -> KernelShape:
    code = tuple(assemble(*rows))
    return kernel_shape(Binary("k.cubin", "kernel", "sm_90a", code, warps, 1, 168, 0, table=table))


def kinds(steps: tuple[Step, ...]) -> list[str]:
    return [step.kind for step in steps if step.kind != "plain"]


def barriers(found: KernelShape, role: int = 0) -> list[Barrier]:
    return [barrier for one in found.roles[role].walk() for step in one.steps for _, barrier in step.barriers]


# --- roles ---------------------------------------------------------------------------------------------------------


def test_warps_are_told_apart_by_comparisons_of_their_index() -> None:
    found = shape(
        *WARP, "UISETP.NE.U32.AND UP0, UPT, UR4, 0x8, UPT", "BRA.U UP0, {consumers}",
        "USETMAXREG.DEALLOC.CTAPOOL 0x28", *loop("load", "UTMALDG.2D [UR8], [UR10]"), "EXIT",
        "consumers:", "UISETP.GT.U32.AND UP0, UPT, UR4, 0x7, UPT", "@UP0 EXIT",
        "USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xe8", *loop("main", *WORK), "EXIT",
    )  # fmt: skip
    assert [(role.warps, role.registers, role.work) for role in found.roles] == [
        (tuple(range(8)), 232, "compute"), ((8,), 40, "copy in"), ((9, 10, 11), 168, "idle"),
    ]  # fmt: skip


def test_threads_before_a_number_are_whole_warps_or_undecided() -> None:
    """A comparison inside a warp splits lanes, not roles: the warp runs both ways."""
    found = shape(
        "S2R R0, SR_TID.X", "ISETP.GT.U32.AND P1, PT, R0, 0x4f, PT", "@P1 BRA {other}", *loop("a", *WORK), "EXIT",
        "other:", *loop("b", *WORK, "NOP"), "EXIT", warps=4,
    )  # fmt: skip
    assert [(role.warps, len(role.loops)) for role in found.roles] == [((0, 1), 1), ((2,), 2), ((3,), 1)]


#: The default warps store each other warp's role in shared memory and the workers branch through a table.
HANDED_OUT = [
    *WARP, *BASE, "UISETP.GE.U32.AND UP0, UPT, UR4, 0x4, UPT", "BRA.U !UP0, {default}",
    "again:", "BAR.SYNC.DEFER_BLOCKING 0x1", "MOV R3, UR6", "LDS.U8 R2, [R3+UR4+0xfc]", "IMAD.SHL.U32 R4, R2, 0x4, RZ",
    "LDC R5, c[0x2][R4]", "BRX R5 -0xd0",
    "first:", *loop("one", *WORK), "BRA {again}", "second:", *loop("two", *WORK, "NOP"), "BRA {again}", "last:", "EXIT",
    "default:", "MOV R8, 0x1000100", "STS [UR6+0x100], R8", "BAR.SYNC.DEFER_BLOCKING 0x1", *loop("own", "MUFU.EX2 R9, R9", *WORK),
    "MOV R8, 0x2020202", "STS [UR6+0x100], R8", "EXIT",
]  # fmt: skip


def handed_out(*, entries: tuple[str, ...], table: bool) -> KernelShape:
    places = {name: 16 * sum(not row.endswith(":") for row in HANDED_OUT[: HANDED_OUT.index(f"{name}:")]) for name in ("first", "second", "last")}  # fmt: skip
    code = [
        row if row.opcode != "BRX" else _with_targets(row, tuple(dict.fromkeys(places[name] for name in entries)))
        for row in assemble(*HANDED_OUT)
    ]
    words = tuple(places[name] for name in entries) if table else ()
    return kernel_shape(Binary("k.cubin", "", "sm_90a", tuple(code), 8, 1, None, None, table=words))


def _with_targets(row, targets):  # type: ignore[no-untyped-def]
    from dataclasses import replace

    return replace(row, targets=targets)


@pytest.mark.parametrize("table", [True, False])
def test_roles_handed_out_through_shared_memory(table: bool) -> None:
    found = handed_out(entries=("first", "second", "last"), table=table)
    # Bytes 00 01 00 01 for warps 4 to 7; two ends them all.
    assert [(role.warps, len(role.loops), len(role.loops[0].steps)) for role in found.roles] == [
        ((0, 1, 2, 3), 1, 5), ((4, 6), 1, 4), ((5, 7), 1, 5),
    ]  # fmt: skip


def test_a_table_that_names_a_place_twice_needs_its_words() -> None:
    """The disassembler lists every place once: without the table nothing tells which entry is which."""
    found = handed_out(entries=("second", "second", "last"), table=True)
    assert [role.warps for role in found.roles] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert [len(role.loops) for role in found.roles] == [1, 1]
    unknown = handed_out(entries=("second", "second", "last"), table=False)
    assert {warp for role in unknown.roles for warp in role.warps} == set(range(8))


def test_roles_handed_out_without_a_table_and_an_address_that_a_role_loses() -> None:
    """The register of the address is used for something else in one role, and made again where it cannot be followed."""
    found = shape(
        *WARP, *BASE, "UISETP.GE.U32.AND UP0, UPT, UR4, 0x1, UPT", "BRA.U !UP0, {default}",
        "again:", "USETMAXREG.DEALLOC.CTAPOOL 0x28", "LDS.U8 R2, [UR6+UR4+0x100]", "ISETP.EQ.U32.AND P1, PT, R2, RZ, PT", "@P1 BRA {first}",
        "ISETP.EQ.U32.AND P1, PT, R2, 0x1, PT", "@P1 BRA {second}", "EXIT",
        "first:", *loop("one", *WORK), "REDUX UR6, R9", "BRA {again}", "second:", *loop("two", *WORK, "NOP"), "BRA {again}",
        "default:", "MOV R8, 0x20000", "STS [UR6+0x101], R8", *loop("own", "MUFU.EX2 R9, R9"), "MOV R8, 0x30303", "STS [UR6+0x101], R8", "EXIT",
        warps=4,
    )  # fmt: skip
    assert [(role.warps, len(role.loops)) for role in found.roles] == [((0,), 1), ((1, 2), 1), ((3,), 0)]
    assert found.roles[2].registers == 40


def test_a_spilled_warp_index_is_followed() -> None:
    found = shape(
        *WARP, "STL [R1+0x4c], R0", "MOV R0, RZ", "LDL R7, [R1+0x4c]", "R2UR UR7, R7",
        "UISETP.LT.U32.AND UP0, UPT, UR7, 0x4, UPT", "BRA.U UP0, {low}", *loop("a", *WORK), "EXIT",
        "low:", *loop("b", *WORK, "NOP"), "EXIT", warps=8,
    )  # fmt: skip
    assert [role.warps for role in found.roles] == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_what_has_no_shape_is_refused() -> None:
    with pytest.raises(ShapeError, match="expected a loop, found none in 2 instructions"):
        shape("NOP", "EXIT")
    code = tuple(assemble(*loop("a", *WORK), "EXIT"))
    silent = Binary("k.sass", "", "sm_80", code, None, 1, None, None)
    with pytest.raises(ShapeError, match="does not say how many warps a CTA has: say --warps"):
        kernel_shape(silent)
    with pytest.raises(ShapeError, match="expected 1 to 32 warps of a CTA, got 33"):
        kernel_shape(silent, 33)
    assert [role.warps for role in kernel_shape(silent, 2).roles] == [(0, 1)]


# --- barriers ------------------------------------------------------------------------------------------------------


def test_barriers_by_address_whoever_computes_it() -> None:
    found = shape(
        *WARP, *BASE, "UIADD3 UR7, UPT, UPT, UR6, 0x8, URZ", "UISETP.GT.AND UP0, UPT, UR4, 0x3, UPT", "@!UP0 UIADD3 UR7, UPT, UPT, UR6, URZ, URZ",
        *loop("a", "SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR7+0x10], RZ", "SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR6+0x18], RZ",
              "SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR20+0x8], RZ", "SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR20+0x8], RZ", "FADD R9, R9, R9"),
        "EXIT", warps=8,
    )  # fmt: skip
    low, high = Barrier(False, (0x410,)), Barrier(False, (0x418,))
    first, second, third, fourth = [step.barriers for step in found.roles[0].loops[0].steps if step.barriers]
    assert first == (((0, 1, 2, 3), low), ((4, 5, 6, 7), high))
    assert second == ((tuple(range(8)), high),)
    assert third == fourth and not third[0][1].resolved and third[0][1].offset == 8
    assert found.resolved() == (2, 4)


def test_an_elected_thread_arrives_at_the_barrier_of_its_warp() -> None:
    """Who is elected is unknown, but above warp 3 the condition that the election is part of does not depend on it."""
    found = shape(
        *WARP, *BASE, "UIADD3 UR7, UPT, UPT, UR6, 0x8, URZ",
        *loop("a", "ELECT P1, URZ, PT", "@P1 IMAD.U32 R47, RZ, RZ, UR7", "MOV R46, UR4", "ISETP.GT.OR P0, PT, R46, 0x3, !P1",
              "@!P0 IMAD R47, RZ, RZ, UR6", "@P1 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R47+URZ+0x10], RZ", "FADD R9, R9, R9"),
        "EXIT", warps=8,
    )  # fmt: skip
    (arrival,) = [step.barriers for step in found.roles[0].loops[0].steps if step.barriers]
    assert arrival == (((0, 1, 2, 3), Barrier(False, (0x410,))), ((4, 5, 6, 7), Barrier(False, (0x418,))))


def test_a_vote_on_what_all_lanes_share_is_known() -> None:
    def arrivals(predicate: str) -> tuple[object, ...]:
        found = shape(
            "S2R R0, SR_TID.X", "SHF.R.U32.HI R2, RZ, 0x5, R0", "LOP3.LUT R3, R0, 0x1f, RZ, 0xc0, !PT", *WARP, *BASE,
            "UIADD3 UR7, UPT, UPT, UR6, 0x8, URZ", predicate, "VOTEU.ANY UP2, P3", "@!UP2 UIADD3 UR7, UPT, UPT, UR6, URZ, URZ",
            *loop("a", "SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR7+0x10], RZ", "FADD R9, R9, R9"), "EXIT", warps=8,
        )  # fmt: skip
        (arrival,) = [step.barriers for step in found.roles[0].loops[0].steps if step.barriers]
        return arrival

    low, high = Barrier(False, (0x410,)), Barrier(False, (0x418,))
    assert arrivals("ISETP.GT.AND P3, PT, R2, 0x3, PT") == (((0, 1, 2, 3), low), ((4, 5, 6, 7), high))
    # The other vote is not known: what was written under it is taken for what is read, in every warp.
    assert arrivals("ISETP.GT.AND P3, PT, R3, 0x3, PT") == ((tuple(range(8)), low),)


def wrapping(stages: int, begin: int = 0) -> list[str]:
    """A loop whose slot goes round ``stages`` places, as compilers write a counter that wraps."""
    return [
        f"UMOV UR10, {begin:#x}",
        *loop("main", "ULEA UR11, UR10, UR6, 0x3", "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR11+0x40], R3", "@!P1 BRA {away}", "back:",
              "UIADD3 UR10, UPT, UPT, UR10, 0x1, URZ", f"UISETP.NE.U32.AND UP0, UPT, UR10, {stages:#x}, UPT",
              "USEL UR10, UR10, URZ, UP0", *WORK),
        "EXIT", "away:", "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR11+0x40], R3", "@!P1 BRA {away}", "BRA {back}",
    ]  # fmt: skip


def dividing(stages: int) -> list[str]:
    """The same with a counter that only counts, less the slots of the rounds it made."""
    magic = (1 << 32) // stages + 1
    return [
        "UMOV UR10, URZ",
        *loop("main", f"UIMAD.WIDE.U32 UR12, UR10, {magic:#x}, URZ", "ULEA UR11, UR10, UR6, 0x3", f"UIMAD UR11, UR13, {-8 * stages:#x}, UR11",
              "SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR11+0x40], RZ", "UIADD3 UR10, UPT, UPT, UR10, 0x1, URZ", *WORK),
        "EXIT",
    ]  # fmt: skip


@given(st.integers(2, 12), st.booleans())
def test_a_slot_counter_makes_a_ring(stages: int, divides: bool) -> None:
    rows = dividing(stages) if divides else wrapping(stages)
    (found,) = barriers(shape(*BASE, *rows, warps=4))
    assert found == Barrier(False, tuple(0x440 + 8 * i for i in range(stages)))
    assert found.label() == f"0x440 ring of {stages}"


def test_two_slots_an_iteration_leave_every_other_place() -> None:
    advance = ["UIADD3 UR10, UPT, UPT, UR10, 0x1, URZ", "UISETP.NE.U32.AND UP0, UPT, UR10, 0x6, UPT", "USEL UR10, UR10, URZ, UP0"]  # fmt: skip
    rows = ["UMOV UR10, URZ", *loop("main", "ULEA UR11, UR10, UR6, 0x3", "SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR11], RZ", *advance, *advance, *WORK)]  # fmt: skip
    (found,) = barriers(shape(*BASE, *rows, "EXIT", warps=4))
    assert found.places == (0x400, 0x410, 0x420) and found.label() == "0x400 ring of 3, 16 B apart"


def test_an_address_that_never_comes_back_is_no_ring() -> None:
    rows = ["MOV R4, RZ", *loop("main", "SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R4+0x40], RZ", "VIADD R4, R4, 0x8", *WORK)]
    (found,) = barriers(shape(*rows, "EXIT", warps=4))
    assert not found.resolved


def test_the_leader_of_a_pair_and_the_peer() -> None:
    rows = [
        *BASE, "UIADD3 UR7, UPT, UPT, UR6, 0x20, URZ", "ULOP3.LUT UR7, UR7, 0xfefffff8, URZ, 0xc0, !UPT",
        "ULOP3.LUT UR8, UR5, 0x1, URZ, 0x3c, !UPT", "UPRMT UR9, UR8, 0x654, UR6",
        *loop("main", "SYNCS.ARRIVE.TRANS64.RED.A1T0 RZ, [UR7], RZ", "SYNCS.ARRIVE.TRANS64.RED.A1T0 RZ, [UR9], RZ",
              "SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR6], RZ", *WORK),
    ]  # fmt: skip
    found = barriers(shape(*rows, "EXIT", warps=1))
    assert [(barrier.places, barrier.owner) for barrier in found] == [((0x420,), "leader"), ((0x400,), "peer"), ((0x400,), "own")]  # fmt: skip


def test_named_barriers_by_number_also_from_a_register() -> None:
    rows = [*WARP, "VIADD R5, R0, 0x3", *loop("main", "BAR.ARV R5, 0x40", "BAR.SYNC.DEFER_BLOCKING 0x0", *WORK), "EXIT"]
    found = shape(*rows, warps=2)
    arrive, wait = [step for step in found.roles[0].loops[0].steps if step.barriers]
    assert (arrive.kind, arrive.amount) == ("named_arrive", 64) and (wait.kind, wait.amount) == ("named_wait", -1)
    assert [(warps, barrier.label()) for warps, barrier in arrive.barriers] == [((0,), "#3"), ((1,), "#4")]


# --- loops ---------------------------------------------------------------------------------------------------------


def test_a_poll_is_one_wait_wherever_its_retry_stands() -> None:
    found = shape(*BASE, *wrapping(3), warps=4)
    (main,) = found.roles[0].loops
    assert kinds(main.steps) == ["wait", "retry", "exit"] and main.guards == ()
    assert next(step for step in main.steps if step.kind == "wait").note == "away"
    spin = loop("spin", "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR6], R3", "@!P1 BRA {spin}")[:-1]
    (main,) = shape(*BASE, *loop("main", *spin, *WORK), "EXIT", warps=1).roles[0].loops
    assert kinds(main.steps) == ["wait", "retry", "exit"]


def test_guards_by_what_decides_them() -> None:
    rows = [
        *WARP, *loop(
            "main", "FSETP.GEU.AND P1, PT, R5, 1, PT", "VOTE.ANY R4, PT, !P1", "ISETP.NE.U32.AND P2, PT, R4, RZ, PT",
            "@!P2 BRA {kept}", *WORK, "kept:", "@P1 BRA {thread}", *WORK[:2], "thread:",
            "UISETP.NE.U32.AND UP0, UPT, UR4, URZ, UPT", "BRA.U UP0, {skip}", "UTMALDG.2D [UR8], [UR10]", "skip:",
            "ISETP.GT.AND P3, PT, R20, RZ, PT", "BRA.U UP3, {far}", "met:", "NOP",
        ), "EXIT", "far:", *WORK, "NOP", "BRA {met}",
    ]  # fmt: skip
    (main,) = shape(*rows, warps=4).roles[0].loops
    inside = {guard.name: sum(step.guard == guard.name for step in main.steps) for guard in main.guards}
    assert inside == {"vote0": 3, "thread0": 2, "warp0": 1, "uniform0": 0}
    assert [guard.warps for guard in main.guards] == [(), (), (0,), ()]
    assert len(main.guards[3].away) == 5


def test_loops_in_loops_with_what_stands_around_them() -> None:
    rows = [
        "NOP",
        *loop("tile", "NOP", "NOP", *loop("first", *WORK), "NOP", *loop("second", *WORK, "NOP"), "NOP", "NOP"),
        "EXIT",
    ]
    found = shape(*rows, warps=1)
    (tile,) = found.roles[0].loops
    first, second = tile.inner
    assert [one.name for one in found.roles[0].walk()] == ["0", "0.0", "0.1"]
    assert (len(tile.before(first)), len(tile.after(first)), len(tile.before(second)), len(tile.after(second))) == (
        2,
        1,
        1,
        3,
    )
    assert (first.steady, tile.steady, len(found.roles[0].whole.before(tile))) == (True, False, 1)
    assert first.pipes() == {"fma": 3, "other": 1}


def test_instructions_that_set_something_going() -> None:
    rows = [
        *BASE, "UIADD3 UR9, UPT, UPT, UR6, 0x8, URZ", "UMOV UR25, 0x10200490", "MOV R4, 0x8000",
        *loop("main", "SYNCS.ARRIVE.TRANS64 RZ, [UR6], R4", "UTMALDG.4D.2CTA [UR8], [UR4], desc[URZ]",
              "UTCHMMA.2CTA tmem[UR7], gdesc[UR4], tmem[UR7], tmem[UR24], idesc[UR25], UPT", "UTCBAR.2CTA.MULTICAST [UR9], URZ, UR3",
              "LDTM.x32 R40, tmem[UR4]", "STTM.x16 tmem[UR5], R4", "FENCE.VIEW.ASYNC.T", "HGMMA.64x128x16.F32.BF16 R24, R88, gdesc[UR8], R24, gsb0",
              "WARPGROUP.DEPBAR.LE gsb0, 0x1", "HMMA.16816.F32.BF16 R24, R4, R8, R24", "LDGSTS.E.BYPASS.128 [R9], [R2.64]", "LDGDEPBAR",
              "DEPBAR.LE SB0, 0x2", "ELECT P3, URZ, PT", "UTMASTG.4D [UR32], [UR14]"),
        "EXIT",
    ]  # fmt: skip
    (main,) = shape(*rows, warps=1).roles[0].loops
    steps = {step.instruction.opcode: step for step in main.steps}
    assert steps["SYNCS"].kind == "expect" and steps["SYNCS"].amount == 0x8000
    assert steps["UTMALDG"].barriers[0][1].places == (0x408,) and steps["UTMALDG"].pair
    product = steps["UTCHMMA"]
    assert (product.shape, product.source, product.pair) == ((256, 128, 16), "tensor", True)
    assert steps["UTCBAR"].barriers == steps["UTMALDG"].barriers and steps["UTCBAR"].multicast
    assert (steps["HGMMA"].shape, steps["HGMMA"].source, steps["HGMMA"].note) == ((64, 128, 16), "registers", "commits")
    assert steps["HMMA"].shape == (16, 8, 16)
    assert [steps[name].amount for name in ("LDTM", "STTM", "WARPGROUP", "DEPBAR", "LDGSTS")] == [32, 16, 1, 2, 16]
    assert [steps[name].kind for name in ("WARPGROUP", "DEPBAR", "LDGDEPBAR", "ELECT", "UTMASTG", "FENCE")] == [
        "matrix_wait", "group_wait", "group", "elect", "copy_out", "fence",
    ]  # fmt: skip


def test_barriers_that_are_set_up_with_their_arrivals() -> None:
    rows = [*BASE, "UMOV UR8, 0x80", "UIADD3 UR8, UPT, UPT, -UR8, 0x100000, URZ", "USHF.L.U32 UR8, UR8, 0x1, URZ",
            "SYNCS.EXCH.64 URZ, [UR6+0x18], UR8", *loop("main", *WORK), "EXIT"]  # fmt: skip
    assert shape(*rows, warps=1).barriers == ((Barrier(False, (0x418,)), 128),)
