"""Which of a role's loops is its steady one, and what of it every iteration runs, in listings written by hand."""

from __future__ import annotations

import pytest
from support.listing import assemble, loop

from tilecast.codegen.compiler.binary import Binary
from tilecast.codegen.compiler.structure.assemble import ShapeError, kernel_shape
from tilecast.codegen.compiler.structure.steady import kernel_roles, loops_left_out
from tilecast.model.compiled.roles.code import KernelRoles
from tilecast.model.compiled.roles.costs import role_costs
from tilecast.model.machine.machine import load_machine

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


def test_a_loop_that_meets_no_other_role_is_not_followed() -> None:
    """A warp that gathers Q of the next tile: nothing says how often its inner loop runs to a block of keys."""
    rows = [
        *ROLES,
        *loop("load", "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR6+0x8], R3", "SYNCS.ARRIVE.TRANS64 RZ, [UR6], R4",
              "UTMALDG.2D [UR8], [UR6]", "NOP"), "EXIT",
        "consumers:", "UISETP.GT.U32.AND UP0, UPT, UR4, 0x3, UPT", "BRA.U UP0, {others}",
        *loop("main", "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR6], R3", "HGMMA.64x128x16.F32.BF16 R24, R88, gdesc[UR8], R24, gsb0",
              "WARPGROUP.DEPBAR.LE gsb0, 0x0", "SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR6+0x8], RZ", "NOP"), "EXIT",
        "others:", "UISETP.NE.U32.AND UP0, UPT, UR4, 0x5, UPT", "@UP0 EXIT", *loop("tiles", *GATHER), "EXIT",
    ]  # fmt: skip
    shape = kernel_shape(Binary("k.cubin", "kernel", "sm_90a", tuple(assemble(*rows)), 8, 1, 168, 0))
    assert [role.name for role in kernel_roles(shape).roles] == ["warp 0 (matrix)", "warp 4 (copy in)"]
    assert list(loops_left_out(shape)) == [5]


@pytest.mark.parametrize("paced", [False, True])
def test_a_role_of_tiles_that_no_iteration_waits_for_is_not_followed(paced: bool) -> None:
    """A warp that is asked for the next tile by the one that copies, under a predicate, and waits until Q is given back, under a branch;
    followed where every iteration waits for what it gives."""
    waits = ("SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR6+0x18], R3",) if paced else ()
    rows = [
        *ROLES,
        *loop("load", "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR6+0x8], R3", "SYNCS.ARRIVE.TRANS64 RZ, [UR6], R4",
              "UTMALDG.2D [UR8], [UR6]", "@!P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR6+0x20], RZ", "NOP"), "EXIT",
        "consumers:", "UISETP.GT.U32.AND UP0, UPT, UR4, 0x3, UPT", "BRA.U UP0, {others}",
        *loop("main", "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR6], R3", *waits, "HGMMA.64x128x16.F32.BF16 R24, R88, gdesc[UR8], R24, gsb0",
              "WARPGROUP.DEPBAR.LE gsb0, 0x0", "SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR6+0x8], RZ",
              *under("UP3", "kept", GIVE_BACK, False), "NOP"), "EXIT",
        "others:", "UISETP.NE.U32.AND UP0, UPT, UR4, 0x5, UPT", "@UP0 EXIT",
        *loop("tiles", "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR6+0x20], R3", "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR6+0x10], R3",
              "LDGSTS.E.BYPASS.128 [R9], [R2.64]", "SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR6+0x18], RZ", "NOP"), "EXIT",
    ]  # fmt: skip
    found = kernel_roles(kernel_shape(Binary("k.cubin", "kernel", "sm_90a", tuple(assemble(*rows)), 8, 1, 168, 0)))
    assert [role.warp for role in found.roles] == [0, 4, *[5] * paced]
    given_back = ("arrive", "0x410")
    assert (given_back in uses(found)["warp 0 (matrix)"]) == paced


def test_products_around_an_inner_loop_are_refused_in_a_sentence() -> None:
    inner = loop("softmax", "MUFU.EX2 R9, R9", "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR6], R3")
    with pytest.raises(ShapeError, match=r"matrix products in an innermost loop.* found them only around loops"):
        kernel(inner=tuple(inner))


def turns(arrivals: int, *ahead: str) -> KernelRoles:
    """Two warpgroups that take turns: each waits at its own barrier and arrives at the other's.  Warp 0 brings the first turn ahead of the
    loop, after rows ``ahead``; ``arrivals`` complete a phase."""

    def group(mine: str, other: str) -> list[str]:
        return loop(f"main{mine}", f"SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR6+{mine}], R3",
                    "HGMMA.64x128x16.F32.BF16 R24, R88, gdesc[UR8], R24, gsb0", "WARPGROUP.DEPBAR.LE gsb0, 0x0",
                    f"SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR6+{other}], RZ", "NOP")  # fmt: skip

    set_up = [f"UMOV UR8, {arrivals:#x}", "UIADD3 UR8, UPT, UPT, -UR8, 0x100000, URZ", "USHF.L.U32 UR8, UR8, 0x1, URZ"]
    rows = [
        *ROLES[:-2], *set_up, "SYNCS.EXCH.64 URZ, [UR6+0x20], UR8", "SYNCS.EXCH.64 URZ, [UR6+0x28], UR8",
        "UISETP.GT.U32.AND UP0, UPT, UR4, 0x3, UPT", "BRA.U UP0, {second}",
        *ahead, "SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR6+0x20], RZ", *group("0x20", "0x28"), "EXIT",
        "second:", *group("0x28", "0x20"), "EXIT",
    ]  # fmt: skip
    return kernel_roles(kernel_shape(Binary("k.cubin", "kernel", "sm_90a", tuple(assemble(*rows)), 8, 1, 168, 0)))


def test_who_brings_the_first_turn_comes_no_more() -> None:
    """Any arrival completes a phase of a barrier of one; where two complete it, each role brings its own."""
    assert {b.name: b.arrivals_by_turns for b in turns(1).barriers} == {"0x420": 1, "0x428": 0}
    assert {b.name: b.arrivals_by_turns for b in turns(2).barriers} == {"0x420": 0, "0x428": 0}


def test_barriers_of_the_system_below_shared_memory_are_none_of_the_kernel() -> None:
    """A pair of CTAs that allocates tensor memory waits at 0x28; the kernel has one 0x400 further on, to which others arrive."""
    first = turns(1, "UMOV UR9, 0x28", "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR9], R3").roles[0]
    assert [one.kind for one in first.ahead if one.kind != "plain"] == ["arrive"]


MMA = "HMMA.16816.F32.BF16 R8, R4, R6, R8"


def read(*rows: str, warps: int = 4, target: str = "sm_80") -> KernelRoles:
    return kernel_roles(kernel_shape(Binary("k.cubin", "kernel", target, tuple(assemble(*rows)), warps, 1, 128, 0)))


def test_what_ends_a_tile_is_no_part_of_an_iteration() -> None:
    """In a loop over the blocks of all tiles: code under a branch that stores results; with a product of its own it counts."""
    end = ["STG.E [R2], R8"] + ["FADD R9, R9, R9"] * 9
    found = read(*loop("main", MMA, "@P1 BRA {next}", *end, "next:", "NOP"), "EXIT")
    assert [len(role.loop) for role in found.roles] == [4] and found.flop == 4 * 2 * 16 * 8 * 16
    found = read(*loop("main", MMA, "@P1 BRA {next}", *end, MMA, "next:", "NOP"), "EXIT")
    assert [len(role.loop) for role in found.roles] == [15] and found.flop == 2 * 4 * 2 * 16 * 8 * 16


def test_warps_that_share_a_loop_of_products_are_one_role() -> None:
    """One of them alone waits for a lock ahead of it: what the CTA multiplies does not depend on that."""
    rows = [
        "S2R R0, SR_TID.X", "SHF.R.U32.HI R0, RZ, 0x5, R0", "ISETP.NE.AND P1, PT, R0, RZ, PT", "@P1 BRA {work}",
        *loop("lock", "LDG.E R5, [R2]", "FADD R5, R5, R5"), "work:", *loop("main", MMA, MMA), "EXIT",
    ]  # fmt: skip
    found = read(*rows)
    assert [role.name for role in found.roles] == ["warp 0 (matrix)"]
    assert found.flop == 2 * 4 * 2 * 16 * 8 * 16


def test_of_two_loops_of_products_the_one_with_fewer_instructions_a_product_is_followed() -> None:
    """The other is its remainder, which is not unrolled."""
    found = read(*loop("main", *[MMA] * 4, "NOP"), *loop("rest", MMA, "NOP"), "EXIT")
    assert [len(role.loop) for role in found.roles] == [6]


@pytest.mark.parametrize(
    ("code", "dtype"),
    [("HMMA.1688.F32.TF32", "tf32"), ("HMMA.16816.F16", "bf16"), ("IMMA.16832.S8.S8", "fp8"), ("IMMA.16864.S4.S4", "int4")],
)  # fmt: skip
def test_products_of_a_warp_take_as_long_for_as_many_bytes(code: str, dtype: str) -> None:
    """32 bytes of k each (A100 data sheet: 156, 312, 624, 1248 T/s)."""
    (role,) = read(*loop("main", f"{code} R8, R4, R6, R8"), "EXIT").roles
    product = next(one for one in role.loop if one.kind == "mma_sync")
    assert product.dtype == dtype
    costs = role_costs(load_machine("a100"))
    same = product._replace(shape=(16, 8, 16), dtype="bf16")
    assert costs.product(product)[0] == pytest.approx(costs.product(same)[0])


def test_products_that_nothing_rates_are_named() -> None:
    with pytest.raises(
        ShapeError, match=r"got DMMA\.16x8x16 at 0x0 of double precision, whose rate no machine file has"
    ):
        read(*loop("main", "DMMA.16x8x16 R8, R4, R6, R8"), "EXIT", target="sm_90a")
