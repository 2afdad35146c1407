"""Launches of kernels: CTAs dealt to SMs, iterations said in words, CTAs that share an SM."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilecast.base.data import MEASURED
from tilecast.model.compiled.code import CodeError
from tilecast.model.compiled.roles import launch as launches
from tilecast.model.compiled.roles.code import Barrier, KernelRoles, RoleCode, RoleInstruction, together
from tilecast.model.compiled.roles.costs import role_costs
from tilecast.model.compiled.roles.launch import CtaCost, cta_cost, launch, spread
from tilecast.model.compiled.roles.run import RolesRun, run_roles, tile_cycles
from tilecast.model.compiled.roles.store import load_roles
from tilecast.model.machine.machine import load_machine

H200 = load_machine("h200-sxm")
COSTS = role_costs(H200)
STEADY = RolesRun(100.0, {"tensor": 80.0, "issue": 30.0}, {})
#: Cycles from a CTA's last clock to the first of the next.
BETWEEN = H200["launch.cta_turnaround_cycles"]


def one(pipe: str, kind: str = "plain", barrier: int = -1, amount: int = 0, **more) -> RoleInstruction:
    return RoleInstruction(pipe, more.pop("stall", 1), more.pop("waits", 0), more.pop("write_counter", 7), 7, "fixed", kind, barrier, amount, **more)  # fmt: skip


def product(columns: int = 128) -> RoleInstruction:
    return one("tensor", "wgmma", amount=1, shape=(64, columns, 16), source="smem", dtype="bf16")


def test_iterations_as_they_are_said() -> None:
    assert spread("7", 3) == [7, 7, 7]
    assert spread("1:4", 4) == [1, 2, 3, 4] and spread("1:128", 1) == [1]
    for wrong in ("", "0", "1:2:3", "-1", "many"):
        with pytest.raises(CodeError, match="iterations: expected"):
            spread(wrong, 2)
    with pytest.raises(CodeError, match="CTAs: expected"):
        spread("1", 0)


@given(st.integers(1, 1000), st.integers(1, 200), st.integers(1, 3))
def test_equal_ctas_go_in_waves(ctas: int, iterations: int, per_sm: int) -> None:
    cost = CtaCost(per_sm, STEADY, 500.0, 1.0)
    found = launch(cost, [iterations] * ctas, H200)
    waves = ceil(ctas / (132 * per_sm))
    assert found.cycles == pytest.approx(waves * (BETWEEN + 500.0 + (iterations - 1) * 100.0))
    assert found.busy["tensor"] == pytest.approx(ctas * iterations / (132 * per_sm) * 80.0 / found.cycles)


def test_long_ctas_go_first() -> None:
    cost = CtaCost(1, STEADY, 0.0, 0.0)
    # Those of two iterations have SMs of their own, and two of one follow each other.
    assert launch(cost, [1] * 132 + [2] * 66, H200).cycles == 2 * BETWEEN + 200.0


def test_ctas_that_stay_take_tile_after_tile() -> None:
    cost = CtaCost(1, STEADY, 500.0, 0.0, 200.0)
    assert launch(cost, [1] * 264, H200, 132).cycles == BETWEEN + 500.0 + 200.0 + 2 * 100.0
    # Two CTAs have six tiles, whatever other SMs there are.
    assert launch(cost, [1] * 6, H200, 2).cycles == BETWEEN + 500.0 + 2 * 200.0 + 3 * 100.0
    assert launch(cost, [1] * 264, H200, 264).cycles == 2 * (BETWEEN + 600.0)


def test_ctas_of_an_sm_share_its_tensor_core_and_nothing_else() -> None:
    wait = (one("other", "wgmma_wait"), one("fma", stall=400))
    role = RoleCode("warp 0", 0, (), (product(), *wait), (one("other"),), (one("other"),))
    kernel = KernelRoles("hand-made", "sm_90a", (role,), ())
    alone, both = cta_cost(kernel, COSTS), cta_cost(kernel, COSTS, 2)
    assert alone.steady.cycles == pytest.approx(64 + 66.85 + 400, abs=6.0)
    # The second CTA's product runs while the first one's warp stands.
    assert both.steady.cycles == pytest.approx(alone.steady.cycles, abs=70.0)
    assert both.steady.busy["tensor"] == pytest.approx(2 * alone.steady.busy["tensor"])


def test_ctas_of_an_sm_have_barriers_of_their_own() -> None:
    barrier = Barrier("full", 2, False, ((1, "arrive", 1),))
    roles = (RoleCode("a", 0, (), (one("shared", "wait", 0),)), RoleCode("b", 4, (), (one("shared", "arrive", 0),)))
    found = together(KernelRoles("hand-made", "sm_90a", roles, (barrier,)), 2)
    assert [role.loop[0].barrier for role in found.roles] == [0, 0, 1, 1]
    assert [one.parties for one in found.barriers] == [((1, "arrive", 1),), ((3, "arrive", 1),)]


@pytest.mark.parametrize(("outside", "passes"), [(0, 0), (1, 1), (4, 1), (5, 2)])
def test_copies_go_round_once_more_for_products_outside_of_the_loop(outside: int, passes: int) -> None:
    """A tile of three iterations and ``outside`` products before them ends: the role that copies brings what those take, too."""
    full = Barrier("full", 2, False, ((1, "copy", 1),))
    step = (one("shared", "wait", 0), product())
    begin = step * passes + (product(),) * (outside - passes)
    roles = (
        RoleCode("warp 0", 0, (), (step[0], *(product(),) * 4), begin or (one("other"),), (one("other"),)),
        RoleCode("copy in", 4, (), (one("other", "copy", 0),), (one("other"),), (one("other"),)),
    )
    kernel = KernelRoles("hand-made", "sm_90a", roles, (full,))
    assert kernel.more_passes == passes
    # With fewer copies it would wait for ever and be refused.
    assert tile_cycles(kernel, COSTS, 3) > COSTS.copy_latency


def test_products_outside_of_the_loop_count_as_iterations() -> None:
    role = RoleCode("warp 0", 0, (), (product(),) * 4, (product(),) * 8, (one("other"),))
    assert cta_cost(KernelRoles("hand-made", "sm_90a", (role,), ()), COSTS).peeled == 2
    with pytest.raises(CodeError, match="expected the code around its loops"):
        cta_cost(KernelRoles("hand-made", "sm_90a", (RoleCode("warp 0", 0, (), (product(),)),), ()), COSTS)


def test_a_later_tile_finds_what_other_roles_brought_while_the_one_before_ended() -> None:
    """Loads and copies of the role that multiplies nothing go under the tile before; what is loaded around loops L1 holds."""
    full = Barrier("full", 1, False, ((1, "copy", 1),))
    load = one("shared", write_counter=0)._replace(latency="global")
    use = one("fma", waits=1)
    loop = (product()._replace(waits=2), one("other", "wgmma_wait"))
    opened = one("shared", "wait", 0, write_counter=1)
    roles = (
        RoleCode("warp 0", 0, (), loop, (load, use, opened), (one("other"),)),
        RoleCode("copy in", 4, (), (one("other"),), (load, use, one("other", "copy", 0)), (one("other"),)),
    )
    kernel = KernelRoles("hand-made", "sm_90a", roles, (full,))
    first, later = (tile_cycles(kernel, COSTS, 4, later=again) for again in (False, True))
    # Gone are the copy, the other role's load and most of this one's, which stands beside the other's.
    spared = COSTS.copy_latency + COSTS.latency["global"] - COSTS.latency["local"]
    assert first - later == pytest.approx(spared, abs=40.0)
    assert cta_cost(kernel, COSTS).later_ends is None
    told = cta_cost(kernel, COSTS, stay=True)
    assert told.later_ends is not None and told.ends - told.later_ends == pytest.approx(spared, abs=40.0)


def recorded(slots: int, adders: int, *more: str) -> KernelRoles:
    """A recorded loop of a backward pass, head_dim 64 without a mask."""
    knobs = (
        f"family=fa3_bwd,tile_m=128,dq_slots={slots},heads_abreast=1,dk_first=false,adders={adders},{','.join(more)}"
    )
    return load_roles((MEASURED / "h200_backward_loops.txt").read_text(encoding="utf-8"))[
        f"64/64 none gradients {knobs}"
    ]


def test_ends_of_a_tile_do_not_go_by_the_iterations_that_they_are_told_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles may go at another pace than roles that began anyhow; all 24 iterations' difference stood at their ends."""
    kernel = recorded(2, 2, "ahead=true", "fragments=true")
    pace = (tile_cycles(kernel, COSTS, 24) - tile_cycles(kernel, COSTS, 12)) / 12
    told = cta_cost(kernel, COSTS)
    other = replace(told.steady, cycles=told.steady.cycles - 300.0)
    assert cta_cost(kernel, COSTS, steady=other).ends == told.ends
    monkeypatch.setattr(launches, "_TOLD", 48)
    # Where its two warpgroups stand to each other at an end is worth a twentieth of an iteration.
    assert cta_cost(kernel, COSTS).ends == pytest.approx(told.ends, abs=0.05 * told.steady.cycles)
    assert tile_cycles(kernel, COSTS, 8) == pytest.approx(told.ends + 8 * pace, rel=0.01)


def test_sms_add_to_sums_in_l2_together() -> None:
    """They are in step: with one slot for dQ, what is waited for is the addition at the rate that all SMs reach together."""
    alone = role_costs(H200.with_facts({"l2.reduce_tbps": 100.0}))
    assert alone.add_bytes == H200["tma.reduce_bytes_per_clk"]
    assert COSTS.add_bytes * 132 * H200["chip.clock_rated_mhz"] * 1e6 == pytest.approx(H200["l2.reduce_tbps"] * 1e12)
    kernel, size = recorded(1, 1, "ahead=false", "fragments=false"), 128 * 64 * 4
    longer = size / COSTS.add_bytes - size / alone.add_bytes
    assert run_roles(kernel, COSTS).cycles - run_roles(kernel, alone).cycles == pytest.approx(longer, rel=0.05)
    # Of two slots one is added while the other fills.
    both = recorded(2, 1, "ahead=false", "fragments=false")
    assert run_roles(both, COSTS).cycles - run_roles(both, alone).cycles < 0.1 * longer


def test_what_lanes_copy_into_shared_memory_products_pay_for() -> None:
    """As beside tiles of the copy engine: a cycle a KB (smem/beside_mma), whoever asked; here 2 KB in some 64 cycles."""
    matrix = RoleCode("warp 0", 0, (), (*(product(),) * 16, one("other", "wgmma_wait", amount=1)))
    copies = RoleCode("warp 1", 1, (), (one("shared", "group_copy", amount=16, stall=63), one("other", "group")))
    alone, beside = (
        run_roles(KernelRoles("hand-made", "sm_90a", roles, ()), COSTS).cycles
        for roles in ((matrix,), (matrix, copies))
    )
    assert alone == pytest.approx(16 * 64.0, abs=5.0)
    assert beside / alone - 1 == pytest.approx(2048 / 64 * H200["tensor.mma_cycles_per_copied_byte"], rel=0.1)
