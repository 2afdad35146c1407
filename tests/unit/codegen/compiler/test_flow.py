"""Loops of a listing by dominance, and the path an iteration takes: masking is skipped, waits are no loops of their own."""

from __future__ import annotations

from support.listing import assemble, loop

from tilecast.codegen.compiler.flow import Flow, steady_loops

BODY = ["FFMA R4, R4, R5, R6"] * 20
MASKING = ["FSEL R4, R4, -INF , P1"] * 16 + ["IADD3 R4, R4, 0x1, RZ"] * 32
WAIT = "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R2+URZ], R5"


def test_the_outer_of_two_loops_is_none_unless_the_inner_waits() -> None:
    (inner,) = steady_loops(assemble(*loop("outer", *BODY, *loop("inner", *BODY, "MUFU.EX2 R4, R4")), "EXIT"))
    assert (inner.begin, inner.pipes()["fma"], inner.pipes()["mufu"]) == (20, 20, 1)
    (outer,) = steady_loops(assemble(*loop("outer", *BODY, *loop("spin", WAIT)), "EXIT"))
    assert (outer.begin, len(outer.instructions), outer.opcodes()["SYNCS"]) == (0, 23, 1)


def test_masking_that_a_branch_jumps_over_is_left_out() -> None:
    (found,) = steady_loops(assemble(*loop("main", *BODY, "@P1 BRA {over}", *MASKING, "over:", "NOP"), "EXIT"))
    assert (len(found.instructions), found.skipped, found.opcodes()["FSEL"]) == (23, 48, 0)
    (found,) = steady_loops(assemble(*loop("main", *BODY, "@P1 BRA {over}", *MASKING[1:], "over:", "NOP"), "EXIT"))
    assert (len(found.instructions), found.skipped) == (70, 0)


def test_what_a_warp_votes_for_is_rare() -> None:
    """Skipped by a branch on a vote's outcome; not where all must agree, nor by a branch on anything else."""
    for vote, kept in (("VOTE.ANY P0, P0", 24), ("VOTE.ALL P0, P0", 44), ("VOTE.ANY P1, P0", 44)):
        code = ["FSETP.GT.AND P0, PT, R4, 64, PT", vote, "@!P0 BRA {over}", *BODY, "over:"]
        (found,) = steady_loops(assemble(*loop("main", *BODY, *code), "EXIT"))
        assert len(found.instructions) == kept


def test_code_out_of_line_belongs_to_a_loop_but_not_to_its_steady_iteration() -> None:
    rows = assemble(
        *loop("main", *BODY, WAIT, "@!P0 BRA {away}", "back:", "NOP"), "EXIT",
        "away:", WAIT, "@!P0 BRA {away}", "BRA {back}",
    )  # fmt: skip
    flow = Flow(rows)
    (main,) = [one for one in flow.loops if one.header == 0]
    assert len(flow.code(main.blocks)) == 24 + 3
    (found,) = steady_loops(rows)
    assert found.instructions == tuple(rows[:24])


def test_a_loop_may_begin_in_its_middle() -> None:
    """A jump to the condition at the end: the condition is what every iteration leads through."""
    rows = assemble("BRA {test}", "body:", *BODY, "test:", "ISETP.NE.AND P0, PT, R4, RZ, PT", "@P0 BRA {body}", "EXIT")
    (found,) = steady_loops(rows)
    assert found.instructions == (*rows[21:23], *rows[1:21])


def test_roles_begin_where_registers_change() -> None:
    rows = assemble(
        "@P0 BRA {other}", "USETMAXREG.DEALLOC.CTAPOOL 0x78", "NOP", "BRA {join}",
        "other:", "USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xe8", "NOP", "join:", "USETMAXREG.DEALLOC.CTAPOOL 0x28", "EXIT",
    )  # fmt: skip
    assert Flow(rows).roles() == {1: frozenset({1}), 4: frozenset({4}), 6: frozenset({6})}


def test_code_that_only_an_indirect_branch_reaches_is_read() -> None:
    rows = assemble("BRX R2 -0x10", *loop("first", *BODY), "EXIT", *loop("second", *BODY), "EXIT")
    assert [found.begin for found in steady_loops(rows)] == [1, 23]


def test_a_branch_on_divergence_is_not_taken_by_lanes_that_run_together() -> None:
    """What follows it is no other entry into the loop, which would be none then; one on convergence is taken."""
    code = loop("main", *BODY, "BRA.DIV ~URZ, {apart}", "back:", "NOP")
    (found,) = steady_loops(assemble(*code, "EXIT", "apart:", *BODY, "BRA {back}"))
    assert (found.begin, len(found.instructions)) == (0, 23)
    rows = assemble(*loop("main", *BODY, "BRA.CONV ~URZ, {on}", *BODY, "on:", "NOP"), "EXIT")
    (found,) = steady_loops(rows)
    assert len(found.instructions) == 23 and rows[20].conditional and rows[20].taken_together
