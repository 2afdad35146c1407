"""Steady loops of roles that are worked out by hand: pipes, tensor core, rings, hand-overs, deadlocks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tilecast.model.compiled.code import CodeError
from tilecast.model.compiled.roles.apart import roles_apart
from tilecast.model.compiled.roles.code import Barrier, KernelRoles, RoleCode, RoleInstruction
from tilecast.model.compiled.roles.costs import role_costs
from tilecast.model.compiled.roles.run import run_roles
from tilecast.model.machine.changes import change_machine
from tilecast.model.machine.machine import load_machine

B200 = load_machine("b200")
COSTS = role_costs(B200)


def one(pipe: str = "other", kind: str = "plain", barrier: int = -1, amount: int = 0, **more) -> RoleInstruction:
    return RoleInstruction(pipe, more.pop("stall", 1), more.pop("waits", 0), more.pop("write_counter", 7), 7, "fixed", kind, barrier, amount, **more)  # fmt: skip


def product(n: int = 128) -> RoleInstruction:
    return one("tensor", "matrix", shape=(128, n, 16), source="smem", dtype="bf16")


def wait(barrier: int, passes: int = 0, **more) -> tuple[RoleInstruction, RoleInstruction]:
    """A poll, and the instruction that waits for its answer."""
    return (one("shared", "wait", barrier, passes, write_counter=0, **more), one(waits=1))


def kernel(*roles: RoleCode, barriers: tuple[Barrier, ...] = ()) -> KernelRoles:
    return KernelRoles("hand-made", "sm_100a", roles, barriers)


def test_the_tensor_core_alone_sets_the_pace() -> None:
    found = kernel(RoleCode("mma", 0, (), (product(),) * 4))
    run = run_roles(found, COSTS)
    assert run.cycles == run.busy["tensor"] == 4 * COSTS.product(product())[0] == 4 * 64.0


@pytest.mark.parametrize(
    ("pipe", "amount", "cycles"), [("mufu", 0, 8.0), ("alu", 0, 2.0), ("fma", 0, 128 / 120), ("fma", 2, 256 / 120)]
)
def test_a_pipe_that_is_full_sets_the_pace(pipe: str, amount: int, cycles: float) -> None:
    loop = (product(), *(one(pipe, amount=amount),) * 90)
    run = run_roles(kernel(RoleCode("both", 0, (), loop)), COSTS)
    assert run.busy[pipe] == pytest.approx(90 * cycles)
    assert run.cycles == pytest.approx(90 * cycles, abs=1.0)


def test_a_role_that_waits_for_ever_while_others_go_round_is_named() -> None:
    matrix = RoleCode("mma", 0, (), (*wait(0), product()))
    found = kernel(
        matrix, RoleCode("spin", 4, (), (one(),) * 4), barriers=(Barrier("K", 1, False, ((1, "arrive", 1),)),)
    )
    with pytest.raises(CodeError, match="mma waits while other roles go round: mma at K"):
        run_roles(found, COSTS)


def test_roles_on_one_sub_partition_share_its_pipes_and_others_do_not() -> None:
    work = (one("mufu"),) * 10
    matrix = RoleCode("mma", 0, (), (product(), *work))
    beside, away = RoleCode("softmax", 4, (), work), RoleCode("store", 1, (), work)
    assert run_roles(kernel(matrix, away), COSTS).cycles == pytest.approx(80.0, abs=1.0)
    # Turns are taken: the other warp runs ten of its own for every ten.
    assert run_roles(kernel(matrix, beside), COSTS).cycles == pytest.approx(160.0, abs=2.0)


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_ring_hides_the_hand_over_as_far_as_it_reaches(stages: int) -> None:
    """The matrix role waits for a full slot, multiplies, and commits the slot; the producer fills it again."""
    full = Barrier("full", stages, False, ((1, "arrive", 1),))
    empty = Barrier("empty", stages, False, ((0, "commit", 1),))
    matrix = RoleCode("mma", 0, (), (*wait(0), product(), one("uniform", "commit", 1)))
    producer = RoleCode("load", 1, (), (*wait(1, passes=1), one("shared", "arrive", 0)))
    run = run_roles(kernel(matrix, producer, barriers=(full, empty)), COSTS)
    cycles, completion = COSTS.product(product())
    # Round trip of a slot: hand-over, the instruction after the poll's answer, product, completion, the same at the producer.
    trip = COSTS.handover + 1 + cycles + completion + 1
    assert run.cycles == pytest.approx(max(trip / stages, cycles), abs=3.0)


def test_a_phase_is_complete_when_all_have_arrived() -> None:
    """Two softmax roles feed one barrier: the slower one sets the pace."""
    ready = Barrier("ready", 1, False, ((1, "arrive", 1), (2, "arrive", 1)))
    done = Barrier("done", 1, False, ((0, "commit", 1),))
    matrix = RoleCode("mma", 0, (), (*wait(0), product(), one("uniform", "commit", 1)))
    quick = RoleCode("quick", 1, (), (*wait(1, passes=1), one("shared", "arrive", 0)))
    slow = RoleCode("slow", 2, (), (*wait(1, passes=1), one(stall=500), one("shared", "arrive", 0)))
    run = run_roles(kernel(matrix, quick, slow, barriers=(ready, done)), COSTS)
    alone = run_roles(kernel(matrix, quick, replace(slow, loop=quick.loop), barriers=(ready, done)), COSTS)
    assert run.cycles - alone.cycles == pytest.approx(500.0, abs=1.0)
    assert run.waits["mma", "ready"] == pytest.approx(run.cycles - 1 - COSTS.poll - 2, abs=3.0)


def test_named_barriers_make_warps_meet() -> None:
    meet = Barrier("#1", 1, True, ((0, "named_wait", 1), (1, "named_wait", 1)))
    comes = one("control", "named_wait", 0, amount=256, shape=(128, 0, 0))
    matrix = RoleCode("mma", 0, (), (product(), comes))
    other = RoleCode("other", 1, (), (one(stall=300), comes))
    # Who comes last goes on as soon as a barrier lets it.
    assert run_roles(kernel(matrix, other, barriers=(meet,)), COSTS).cycles == pytest.approx(300 + COSTS.met, abs=3.0)


def test_tensor_memory_moves_a_warp_s_words_through_its_port() -> None:
    load = one("tmem", "tensor_load", amount=32)
    run = run_roles(kernel(RoleCode("both", 0, (), (product(), load, load))), COSTS)
    # 32 lanes of 32 words of 4 bytes, at a quarter of 512 bytes a cycle.
    assert run.busy["tmem"] == 2 * 32.0 and run.cycles == pytest.approx(64.0, abs=1.0)


def test_a_wait_under_a_branch_is_passed_over_where_the_first_iteration_has_nothing_to_wait_for() -> None:
    """Alternate key blocks: each group waits for the other's maximum of the iteration before."""
    mine, theirs = (Barrier(name, 1, False, ((role, "arrive", 1),)) for name, role in (("mine", 0), ("theirs", 1)))
    first = RoleCode("first", 0, (), (product(), *wait(1, guarded=True), one("shared", "arrive", 0)))
    second = RoleCode("second", 4, (), (*wait(0), one("shared", "arrive", 1)))
    assert run_roles(kernel(first, second, barriers=(mine, theirs)), COSTS).cycles == pytest.approx(
        2 * COSTS.handover, abs=6.0
    )
    stuck = RoleCode("first", 0, (), (product(), *wait(1), one("shared", "arrive", 0)))
    with pytest.raises(CodeError, match="hand-made: its roles wait for each other: first at theirs, second at mine"):
        run_roles(kernel(stuck, second, barriers=(mine, theirs)), COSTS)


def test_changed_facts_change_the_loop() -> None:
    loop = (product(), *(one("mufu"),) * 30)
    faster = role_costs(change_machine(B200, {"mufu.ex2_per_clk": 32.0}, {})[0])
    assert run_roles(kernel(RoleCode("both", 0, (), loop)), faster).cycles == pytest.approx(120.0, abs=1.0)


def test_a_named_barrier_of_unknown_threads_waits_for_all_its_roles() -> None:
    slow = RoleCode("slow", 0, (), (*(product(),) * 4, *(one("mufu"),) * 64, one("shared", "named_arrive", 0)))
    quick = RoleCode("quick", 4, (), (one("shared", "named_wait", 0), *wait(1)))
    meeting = Barrier("#1", 1, True, ((0, "named_arrive", 1), (1, "named_wait", 1)))
    told = [tuple(r._replace(shape=(32, 0, 0)) if r.kind.startswith("named") else r for r in role.loop) for role in (slow, quick)]  # fmt: skip
    barriers = (meeting, Barrier("free", 1, False, ()))
    unknown = run_roles(kernel(slow, quick, barriers=barriers), COSTS)
    known = run_roles(kernel(replace(slow, loop=told[0]), replace(quick, loop=told[1]), barriers=barriers), COSTS)
    assert unknown.waits == known.waits and unknown.busy == known.busy


H200 = role_costs(load_machine("h200"))


def wgmma(source: str = "smem", n: int = 64, commits: int = 1) -> RoleInstruction:
    return one("tensor", "wgmma", amount=commits, shape=(64, n, 16), source=source, dtype="bf16")


def test_stores_that_fill_the_port_slow_products_that_need_all_of_it() -> None:
    # 64 x 64 products read both operands: all of the port.  A store of 512 bytes a warp takes 16 cycles of it.
    products = (*(wgmma(commits=0),) * 7, wgmma(), one(kind="wgmma_wait"))
    stores = (one("shared", "shared_store", amount=4, shape=(4, 4, 0)),) * 4
    alone = run_roles(kernel(RoleCode("mma", 0, (), products)), H200)
    beside = run_roles(kernel(RoleCode("mma", 0, (), products), RoleCode("store", 4, (), stores)), H200)
    assert alone.busy["port"] == alone.busy["tensor"] == 8 * 32.0
    # The stores come by turns with products: 16 cycles of the port for every 32 of it.
    assert 1.2 * alone.cycles < beside.cycles < 1.6 * alone.cycles


def test_a_role_that_adds_tiles_by_the_copy_engine_holds_who_brings_them() -> None:
    """Tiles of 32 KB go out at 25.5 bytes a cycle; one slot for them, so that a lap is the addition and its hand-overs."""
    bring = RoleCode("bring", 0, (), (wgmma(), *wait(1, passes=1), one("shared", "arrive", 0)))
    add = RoleCode(
        "add", 4, (),
        (*wait(0), one("uniform", "copy_out", amount=32768, source="add"), one("uniform", "group"),
         one(kind="group_wait"), one("shared", "arrive", 1)),
    )  # fmt: skip
    barriers = (Barrier("tile", 1, False, ((0, "arrive", 1),)), Barrier("room", 1, False, ((1, "arrive", 1),)))
    found = run_roles(kernel(bring, add, barriers=barriers), H200)
    out = 32768 / H200.add_bytes + H200.out_latency
    assert out < found.cycles < out + 300
    stored = replace(
        add, loop=tuple(step._replace(source="") if step.kind == "copy_out" else step for step in add.loop)
    )
    assert run_roles(kernel(bring, stored, barriers=barriers), H200).cycles < found.cycles, "stores go out faster"


def test_roles_that_arrive_by_turns_complete_a_phase_each() -> None:
    """Two roles that each take two laps' time: together one phase a lap."""
    slow = (*(one(stall=15),) * 40,)
    taker = RoleCode("mma", 0, (), (product(), *wait(0)))
    first, second = (
        RoleCode(name, warp, (), (*slow, one("shared", "arrive", 0))) for name, warp in (("a", 1), ("b", 2))
    )
    parties = ((1, "arrive", 1), (2, "arrive", 1))
    each = run_roles(kernel(taker, first, second, barriers=(Barrier("all", 1, False, parties),)), COSTS)
    turns = run_roles(kernel(taker, first, second, barriers=(Barrier("any", 1, False, parties, 1),)), COSTS)
    assert each.cycles == pytest.approx(2 * turns.cycles, rel=0.05)
    doubled = replace(kernel(taker, first, second, barriers=(Barrier("any", 1, False, parties, 1),)), unrolled=2)
    assert run_roles(doubled, COSTS).cycles == pytest.approx(turns.cycles / 2), "a pass stands for two iterations"


def test_roles_apart_take_no_less_than_the_slowest_and_than_what_they_share() -> None:
    """Where no barrier is waited for: a role's own chain, a pipe that two fill, the products; not what no loop of products meets."""
    slow = RoleCode("slow", 0, (), (*wait(0), *(one(stall=10),) * 20))
    once = RoleCode("epilogue", 8, (), (*wait(1), *(one(stall=10),) * 99))
    stuck = kernel(
        RoleCode("mma", 4, (), (*wait(0), product())), slow, once,
        barriers=(Barrier("K", 1, False, ((1, "arrive", 1),)), Barrier("O", 1, False, ())),
    )  # fmt: skip
    with pytest.raises(CodeError):
        run_roles(stuck, COSTS)
    found = roles_apart(stuck, COSTS)
    assert found.cycles == pytest.approx(200 + COSTS.poll + 1, abs=2) and found.busy["tensor"] == 64.0
    both = kernel(*(RoleCode(name, warp, (), (one("mufu"),) * 30) for name, warp in (("a", 0), ("b", 4))))
    assert roles_apart(both, COSTS).cycles == pytest.approx(2 * 30 * 8.0)
    elsewhere = kernel(*(RoleCode(name, warp, (), (one("mufu"),) * 30) for name, warp in (("a", 0), ("b", 1))))
    assert roles_apart(elsewhere, COSTS).cycles == pytest.approx(30 * 8.0)
