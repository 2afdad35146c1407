"""Which of a role's loops is its steady one, and what of it every iteration runs, in listings written by hand."""

from __future__ import annotations

import pytest
from support.listing import assemble, loop

from tilecast.codegen.compiler.binary import Binary
from tilecast.codegen.compiler.structure.assemble import ShapeError, kernel_shape
from tilecast.codegen.compiler.structure.steady import kernel_roles
from tilecast.model.compiled.roles.code import KernelRoles

#: Barriers at 0x400: K full, K empty, Q empty, Q full.
ROLES = [
    "S2R R0, SR_TID.X", "SHF.R.U32.HI R0, RZ, 0x5, R0", "R2UR UR4, R0",
    "S2UR UR5, SR_CgaCtaId", "UMOV UR6, 0x400", "ULEA UR6, UR5, UR6, 0x18", "MOV R4, 0x8000",
    "UISETP.NE.U32.AND UP0, UPT, UR4, 0x4, UPT", "BRA.U UP0, {consumers}",
]  # fmt: skip
GATHER = [
    "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR6+0x10], R3",
    *loop("rows", "LDGSTS.E.BYPASS.128 [R9], [R2.64]", "FADD R9, R9, R9"),
    "SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR6+0x18], RZ",
]
GIVE_BACK = ["SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR6+0x10], RZ"]


def under(flag: str, name: str, rows: list[str], always: bool) -> list[str]:
    """Rows under a branch that the whole warp takes, or ``always``."""
    return rows if always else [f"BRA.U {flag}, {{{name}}}", *rows, f"{name}:"]


def kernel(always: bool = False, inner: tuple[str, ...] = ()) -> KernelRoles:
    """A producer that copies K in every iteration and gathers Q where a tile begins, or ``always``; a consumer that gives Q back and
    has a loop ``inner`` in its own."""
    rows = [
        *ROLES,
        *loop("load", "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR6+0x8], R3", "SYNCS.ARRIVE.TRANS64 RZ, [UR6], R4",
              "UTMALDG.2D [UR8], [UR6]", *under("UP2", "same", GATHER, always), "NOP"), "EXIT",
        "consumers:", "UISETP.GT.U32.AND UP0, UPT, UR4, 0x3, UPT", "@UP0 EXIT",
        *loop("main", "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR6], R3", "HGMMA.64x128x16.F32.BF16 R24, R88, gdesc[UR8], R24, gsb0",
              "WARPGROUP.DEPBAR.LE gsb0, 0x0", *inner, "SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR6+0x8], RZ",
              *under("UP3", "kept", GIVE_BACK, always), "NOP"),
        "EXIT",
    ]  # fmt: skip
    code = tuple(assemble(*rows))
    return kernel_roles(kernel_shape(Binary("k.cubin", "kernel", "sm_90a", code, 8, 1, 168, 0)))


def uses(found: KernelRoles) -> dict[str, list[tuple[str, str]]]:
    """What each role's iteration does at which barrier, or by lanes."""
    return {
        role.name: [
            (one.kind, found.barriers[one.barrier].name if one.barrier >= 0 else "")
            for one in role.loop
            if one.kind in ("wait", "arrive", "copy", "group_copy")
        ]
        for role in found.roles
    }


def test_a_loop_that_fills_slots_is_followed_with_what_each_iteration_does() -> None:
    """Not the loop inside that gathers rows by lanes, nor what only the first block of a tile does."""
    assert uses(kernel()) == {
        "warp 0 (matrix)": [("wait", "0x400"), ("arrive", "0x408")],
        "warp 4 (copy in)": [("wait", "0x408"), ("copy", "0x400")],
    }


def test_what_no_branch_leaves_out_counts() -> None:
    found = uses(kernel(always=True))
    assert found["warp 0 (matrix)"] == [("wait", "0x400"), ("arrive", "0x408"), ("arrive", "0x410")]
    assert found["warp 4 (copy in)"] == [("wait", "0x408"), ("copy", "0x400"), ("wait", "0x410"), ("arrive", "0x418")]


def test_products_around_an_inner_loop_are_refused_in_a_sentence() -> None:
    inner = loop("softmax", "MUFU.EX2 R9, R9", "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR6], R3")
    with pytest.raises(ShapeError, match=r"matrix products in an innermost loop.* found them only around loops"):
        kernel(inner=tuple(inner))


def turns(arrivals: int) -> KernelRoles:
    """Two warpgroups that take turns: each waits at its own barrier and arrives at the other's.  Warp 0 brings the first turn ahead of the
    loop; ``arrivals`` complete a phase."""

    def group(mine: str, other: str) -> list[str]:
        return loop(f"main{mine}", f"SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR6+{mine}], R3",
                    "HGMMA.64x128x16.F32.BF16 R24, R88, gdesc[UR8], R24, gsb0", "WARPGROUP.DEPBAR.LE gsb0, 0x0",
                    f"SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR6+{other}], RZ", "NOP")  # fmt: skip

    set_up = [f"UMOV UR8, {arrivals:#x}", "UIADD3 UR8, UPT, UPT, -UR8, 0x100000, URZ", "USHF.L.U32 UR8, UR8, 0x1, URZ"]
    rows = [
        *ROLES[:-2], *set_up, "SYNCS.EXCH.64 URZ, [UR6+0x20], UR8", "SYNCS.EXCH.64 URZ, [UR6+0x28], UR8",
        "UISETP.GT.U32.AND UP0, UPT, UR4, 0x3, UPT", "BRA.U UP0, {second}",
        "SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR6+0x20], RZ", *group("0x20", "0x28"), "EXIT",
        "second:", *group("0x28", "0x20"), "EXIT",
    ]  # fmt: skip
    return kernel_roles(kernel_shape(Binary("k.cubin", "kernel", "sm_90a", tuple(assemble(*rows)), 8, 1, 168, 0)))


def test_who_brings_the_first_turn_comes_no_more() -> None:
    """Any arrival completes a phase of a barrier of one; where two complete it, each role brings its own."""
    assert {b.name: b.arrivals_by_turns for b in turns(1).barriers} == {"0x420": 1, "0x428": 0}
    assert {b.name: b.arrivals_by_turns for b in turns(2).barriers} == {"0x420": 0, "0x428": 0}
