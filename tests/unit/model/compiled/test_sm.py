"""The simulator of compiled warps on programs small enough to follow by hand: every expected cycle is worked out."""

from __future__ import annotations

import csv
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.sm_runs import run_both

from tilecast.model.compiled.code import LATENCIES, PIPES, CodeError, WarpInstruction
from tilecast.model.compiled.costs import WarpCosts, mma_cycles, warp_costs
from tilecast.model.compiled.sm import MARK, Cta, SmRun, Step, Tag
from tilecast.model.machine.machine import load_machine

ROOT = Path(__file__).resolve().parents[4]

COSTS = WarpCosts(
    pipe={**dict.fromkeys(PIPES, 1.0), "alu": 2.0, "mufu": 8.0},
    pipe_under_mma={**dict.fromkeys(PIPES, 1.0), "alu": 4.0, "mufu": 8.0},
    slot_under_mma=dict.fromkeys(PIPES, 0.0), least_stall=dict.fromkeys(PIPES, 1),
    smem_port={"row": 0.25, "word": 4.0},
    port_hold={"arrive": 0.0, "access": 0.0, "shuffle": 0.0},
    latency={**dict.fromkeys(LATENCIES, 4.0), "mufu": 20.0, "poll": 2.0}, operand_release=5.0, barrier=10.0,
    barrier_spread=0.0,
    handover=30.0, one_way=30.0, mma_latency=50.0, mma_fetch=0.0, mma_beside_copy=0.0, mma_queue=6, tma_latency=100.0,
    tma_latency_hbm=200.0, tma_issue=3.0, store_queue_bytes=0.0, spill_words=1000, reload_latency=80.0,
    fetch_lines=1e9, fetch_near_lines=1e9, fetch_cycles=0.0, fetch_full_cycles=0.0, fetch_far_cycles=0.0,
    tma_bytes_per_clk=16.0, memory_bytes_per_clk=4.0, store_bytes_per_clk=8.0, barrier_setup=40.0, cta_setup=0.0,
)  # fmt: skip
MMA = {(64, False): 32.0, (64, True): 40.0}
#: A mark that waits for counter 0, and a barrier poll that raises it.
GATE = WarpInstruction("other", 1, 0b1, 7, 7, "fixed", "mark")
POLL = WarpInstruction("shared", 1, 0, 0, 7, "poll", "wait")
ARRIVE = WarpInstruction("shared", 1, 0b1, 7, 7, "fixed", "arrive")
TURN: Tag = ("turn", 0)


def op(
    pipe: str = "alu", stall: int = 1, waits: int = 0, writes: int = 7, reads: int = 7, latency: str = "fixed"
) -> WarpInstruction:
    return WarpInstruction(pipe, stall, waits, writes, reads, latency, "plain")


def mma(commits: bool = True, from_registers: bool = False) -> WarpInstruction:
    return WarpInstruction("tensor", 1, 0, 7, 7, "fixed", "mma", 64, from_registers, commits)


def mma_wait(in_flight: int) -> WarpInstruction:
    return WarpInstruction("other", 1, 0, 7, 7, "fixed", "mma_wait", in_flight)


def steps(*code: WarpInstruction | Step) -> tuple[Step, ...]:
    return tuple((i, None) if isinstance(i, WarpInstruction) else i for i in code)


def run(*warps: tuple[Step, ...], costs: WarpCosts = COSTS, **cta: object) -> SmRun:
    return run_both([Cta(warps, cta.pop("copies", ()), **cta)], costs, MMA)  # type: ignore[arg-type]


def test_stall_counts_space_a_warps_instructions() -> None:
    found = run(steps(op("fma", 4), op("fma", 7), MARK))
    assert found.marks == ((11.0,),)
    assert found.instructions == 3


def test_a_pipe_takes_one_instruction_at_a_time_from_all_warps() -> None:
    assert run(steps(op("mufu"), op("mufu"), MARK)).marks == ((9.0,),)
    found = run(steps(op("mufu"), MARK), steps(op("mufu"), MARK))
    assert found.marks == ((1.0,), (9.0,))
    assert found.busy["mufu"] == 16.0


def test_one_instruction_issues_a_cycle() -> None:
    assert run(steps(op("fma"), MARK), steps(op("uniform"), MARK)).marks == ((2.0,), (3.0,))


def test_counters_hold_back_until_results_and_operands_are_done() -> None:
    assert run(steps(op("mufu", writes=0, latency="mufu"), GATE)).marks == ((20.0,),)
    assert run(steps(op("mufu", reads=0), GATE)).marks == ((5.0,),)  # operands only
    assert run(steps(op("mufu", writes=1, latency="mufu"), GATE)).marks == ((1.0,),)  # another counter
    both = steps(op("mufu", writes=1, latency="mufu"), op("fma", writes=3), op("fma", 1, 0b1010), MARK)
    assert run(both).marks == ((21.0,),)


def test_a_counter_raised_twice_waits_for_the_later() -> None:
    assert run(steps(op("mufu", writes=0, latency="mufu"), op("fma", writes=0), GATE)).marks == ((20.0,),)


def test_mma_wait_lets_the_newest_groups_fly() -> None:
    # 0 to 32 and 32 to 64 on the tensor core, each 50 more until it is seen.
    program = (mma(), mma())
    assert run(steps(*program, mma_wait(0), MARK)).marks == ((115.0,),)
    assert run(steps(*program, mma_wait(1), MARK)).marks == ((83.0,),)
    assert run(steps(*program, mma_wait(2), MARK)).marks == ((3.0,),)


def test_a_group_ends_with_its_last_instruction_and_operands_from_registers_cost_their_own() -> None:
    found = run(steps(mma(commits=False), mma(from_registers=True), mma_wait(0), MARK))
    assert found.marks == ((32 + 40 + 50 + 1.0,),)
    shared = run(steps(mma(commits=False, from_registers=True), mma(), mma_wait(0), MARK))
    assert shared.marks == ((40 + 32 + 50 + 1.0,),)
    assert found.tensor_cycles == found.busy["tensor"] == 72.0


def test_a_full_queue_stops_the_warp_until_an_instruction_has_ended() -> None:
    program = steps(*[i for _ in range(5) for i in (mma(), MARK)])
    # Two under way: the third goes when the first ends at 32, the next every 32 cycles.
    assert run(program, costs=replace(COSTS, mma_queue=2)).marks == ((1.0, 3.0, 33.0, 65.0, 97.0),)
    assert run(program, costs=replace(COSTS, mma_queue=4)).marks == ((1.0, 3.0, 5.0, 7.0, 33.0),)
    assert run(program, costs=replace(COSTS, mma_queue=5)).marks == ((1.0, 3.0, 5.0, 7.0, 9.0),)


def test_the_queue_is_shared_by_warps() -> None:
    costs = replace(COSTS, mma_queue=2)
    first, second = run(steps(mma(), MARK, mma(), MARK), steps(mma(), MARK, mma(), MARK), costs=costs).marks
    # One each goes at once; the other two wait for the ends at 32 and 64.
    assert sorted([first[1], second[1]]) == [33.0, 65.0]


def test_the_tensor_core_serves_warps_in_turns() -> None:
    program = steps(*[mma()] * 3, mma_wait(2), MARK, mma_wait(1), MARK, mma_wait(0), MARK)
    first, second = run(program, program).marks
    assert first == (32 + 51.0, 96 + 51.0, 160 + 51.0)
    assert second == (64 + 51.0, 128 + 51.0, 192 + 51.0)


def test_arithmetic_is_slower_while_the_tensor_core_runs() -> None:
    arithmetic = (op(), op(), op(), MARK)
    assert run(steps(*arithmetic)).marks == ((5.0,),)
    assert run(steps(mma(), *arithmetic)).marks == ((10.0,),)  # at 1, 5, 9
    # Its end at 32 frees the pipe for the usual rate.
    assert run(steps(mma(), op(stall=31), *arithmetic)).marks == ((37.0,),)


#: FMA and ALU instructions one in four cycles while a product runs.
SLOTS = replace(COSTS, slot_under_mma={**COSTS.slot_under_mma, "alu": 4.0, "fma": 4.0}, pipe_under_mma=COSTS.pipe)


def test_fma_and_alu_of_all_warps_share_a_slot_while_a_product_runs() -> None:
    product = steps(mma(), mma_wait(0), MARK)
    found = run(
        product, steps(op("uniform"), op("fma"), op("alu"), MARK), steps(op("uniform"), op("fma"), MARK), costs=SLOTS
    )
    # At 3, 11 and 7, where alone they would be at 2, 4 and 3.
    assert found.marks == ((83.0,), (12.0,), (8.0,))
    assert run(steps(op("uniform"), op("fma"), op("alu"), MARK), costs=SLOTS).marks == ((3.0,),)
    # Others do not stand in that line.
    assert run(product, steps(op("uniform", 2), op("fma"), op("mufu"), op("uniform"), MARK), costs=SLOTS).marks[1] == (
        6.0,
    )


def test_a_slot_is_free_again_when_the_last_product_ends() -> None:
    late = steps(op("uniform", 30), op("fma"), op("fma"), op("fma"), MARK)
    assert run(steps(mma(), MARK), late, costs=SLOTS).marks[1] == (34.0,)  # at 31, 32 (the end) and 33
    # Not where another product follows.
    assert run(steps(mma(False), mma(), MARK), late, costs=SLOTS).marks[1] == (40.0,)  # at 31, 35 and 39


@given(st.integers(0, 9), st.sampled_from(["fma", "alu", "mufu"]))
def test_arithmetic_does_not_delay_a_product_under_way(count: int, pipe: str) -> None:
    assert run(steps(mma(), mma_wait(0), MARK), steps(*[op(pipe)] * count, MARK), costs=SLOTS).marks[0] == (83.0,)


def test_a_pipe_may_hold_a_warp_longer_than_its_stall_count() -> None:
    costs = replace(COSTS, least_stall={**COSTS.least_stall, "mufu": 2})
    assert run(steps(op("mufu"), op("fma"), MARK), costs=costs).marks == ((3.0,),)
    assert run(steps(op("mufu", 5), op("fma"), MARK), costs=costs).marks == ((6.0,),)
    # Its neighbour goes on.
    assert run(steps(op("mufu"), MARK), steps(op("fma"), MARK), costs=costs).marks == ((2.0,), (3.0,))


def test_a_product_with_a_in_shared_memory_begins_when_that_is_fetched() -> None:
    costs = replace(COSTS, mma_fetch=16.0)
    wait = (mma_wait(0), MARK)
    assert run(steps(mma(), *wait), costs=costs).marks == ((16.0 + 83.0,),)
    assert run(steps(mma(from_registers=True), *wait), costs=costs).marks == ((91.0,),)
    # Behind another it is hidden, and one with A in registers behind it does not go before it.
    assert run(steps(mma(False), mma(), *wait), costs=costs).marks == ((16.0 + 32.0 + 83.0,),)
    assert run(steps(mma(False), mma(from_registers=True), *wait), costs=costs).marks == ((16.0 + 32.0 + 91.0,),)


def test_fma_beside_anothers_products_are_as_slow_as_measured_and_cost_them_nothing() -> None:
    """data/measured/h200_two_warpgroups.csv, paced laps of head_dim 128: 32 FMA after the products, and 64."""
    with (ROOT / "data" / "measured" / "h200_two_warpgroups.csv").open(encoding="utf-8", newline="") as file:
        rows = [
            row
            for row in csv.DictReader(file)
            if (row["mode"], row["head_dim"], row["distance"]) == ("paced", "128", "200")
        ]
    of = {(row["stream"], row["repeats"], row["warpgroups"]): row for row in rows}
    measured = [float(of["ffma_3src", str(repeats), "2"]["softmax_cycles_0"]) for repeats in (1, 2)]
    machine = load_machine("h200-sxm")
    costs = warp_costs(machine, 1980.0)
    products = {(128, True): mma_cycles(machine, 128, True, "bf16")}
    product = mma(from_registers=True)._replace(amount=128)

    def beside(count: int) -> SmRun:
        warps = steps(*[product] * 8, mma_wait(0), MARK), steps(op("uniform", 80), *[op("fma")] * count, MARK)
        return run_both([Cta(warps, ())], costs, products)

    fewer, more = beside(32), beside(64)
    assert more.marks[1][0] - fewer.marks[1][0] == pytest.approx(measured[1] - measured[0], rel=0.05)
    assert more.marks[0] == fewer.marks[0] == beside(0).marks[0]


@pytest.mark.parametrize("from_registers", [False, True])
@pytest.mark.parametrize(
    ("kind", "pipe", "n", "fewer", "more"),
    # FMA until the six products under way are through; max for ever.
    [
        ("ffma_3src", "fma", 128, 32, 64),
        ("ffma_3src", "fma", 256, 32, 64),
        *(("max", "alu", n, 128, 384) for n in (64, 128, 256)),
    ],
)
def test_bursts_beside_anothers_products_are_as_slow_as_measured_and_cost_them_nothing(
    kind: str, pipe: str, n: int, fewer: int, more: int, from_registers: bool
) -> None:
    """data/measured/h200_fma_bursts.csv, one warp of a sub-partition."""
    with (ROOT / "data" / "measured" / "h200_fma_bursts.csv").open(encoding="utf-8", newline="") as file:
        of = {
            int(row["burst"]): row for row in csv.DictReader(file)
            if (row["mode"], row["kind"], row["n"], row["a"]) == ("steady", kind, str(n), "register" if from_registers else "smem")
            and (row["mma_warpgroups"], row["stream_warpgroups"], row["run"]) == ("1", "1", "")
        }  # fmt: skip
    measured = float(of[more]["round_cycles"]) - float(of[fewer]["round_cycles"])
    assert float(of[more]["product_cycles"]) < 1.02 * float(of[fewer]["product_cycles"])
    costs = warp_costs(load_machine("h200-sxm"), 1980.0)
    products = {(n, from_registers): mma_cycles(load_machine("h200-sxm"), n, from_registers, "bf16")}
    product = mma(from_registers=from_registers)._replace(amount=n)

    def beside(count: int) -> SmRun:
        warps = (
            steps(*[product] * (10 * more // n + 20), mma_wait(0), MARK),
            steps(op("uniform", 80), *[op(pipe)] * count, MARK),
        )
        return run_both([Cta(warps, ())], costs, products)

    assert beside(more).marks[1][0] - beside(fewer).marks[1][0] == pytest.approx(measured, rel=0.09)
    assert beside(more).marks[0] == beside(fewer).marks[0]


@pytest.mark.parametrize("distance", [200, 300, 400])
def test_a_warpgroup_whose_products_are_under_way_is_not_held_up_by_anothers(distance: int) -> None:
    """data/measured/h200_two_warpgroups.csv, paced laps of products alone: Q K^T (A in shared memory) and P V of head_dim 128."""
    with (ROOT / "data" / "measured" / "h200_two_warpgroups.csv").open(encoding="utf-8", newline="") as file:
        rows = [
            row for row in csv.DictReader(file)
            if (row["mode"], row["stream"], row["head_dim"]) == ("paced", "none", "128")
        ]  # fmt: skip
    measured_alone = next(float(row["products_cycles_0"]) for row in rows if row["warpgroups"] == "1")
    row = next(row for row in rows if (row["warpgroups"], row["distance"]) == ("2", str(distance)))
    machine = load_machine("h200-sxm")
    products = {(n, home): mma_cycles(machine, n, home, "bf16") for n, home in ((64, False), (128, True))}
    lap = (
        *[mma(commits=step == 7)._replace(amount=64) for step in range(8)],
        *[mma(commits=step == 3, from_registers=True)._replace(amount=128) for step in range(4)],
        mma_wait(0),
    )
    # Between the benchmark's clocks and its first product are 45 cycles.
    delayed = steps(op("uniform", distance + 45), MARK, *lap, MARK)
    costs = warp_costs(machine, 1980.0)
    (alone,) = run_both([Cta((steps(MARK, *lap, MARK),), ())], costs, products).marks
    found = run_both([Cta((steps(MARK, *lap, MARK), delayed), ())], costs, products)
    for group, (begin, end) in enumerate(found.marks):
        held = float(row[f"products_cycles_{group}"]) - measured_alone
        # In turns the first would be held up for 128, 64 and 32 cycles.
        assert (end - begin) - (alone[1] - alone[0]) == pytest.approx(held, abs=20.0)


def test_products_beside_copies_take_longer() -> None:
    """Tiles come in for four cycles each, the first until 104."""
    product = steps(op("uniform", 99), mma(), mma_wait(0), MARK)
    costs = replace(COSTS, mma_beside_copy=0.5)
    copies = tuple((tag, size, 2, latency, share) for tag, size, _, latency, share in K)
    took = [run(product, copies=copies[:count], costs=costs).marks[0][0] for count in (0, 1, 2)]
    assert took == [99 + 32 + 50 + 1.0, took[0] + 0.5 * 4.0, took[0] + 0.5 * 8.0]


def shuffles(number: int) -> tuple[WarpInstruction, ...]:
    return (op("shared", 8, latency="shuffle"),) * number


@pytest.mark.parametrize(
    ("from_registers", "seen"),
    [
        # A and B of 64 rows and columns take all 32 cycles of the port: each of four shuffles costs the product four.
        (False, 32.0 + 4 * 4.0 + 50.0),
        # B alone takes 16 of 40: what is left is more than four shuffles take.
        (True, 40.0 + 50.0),
    ],
)
def test_shuffles_take_from_a_product_what_it_does_not_leave_of_the_shared_memory_port(
    from_registers: bool, seen: float
) -> None:
    product = steps(mma(from_registers=from_registers), mma_wait(0), MARK)
    assert run(product, steps(*shuffles(4), MARK)).marks[0] == (seen + 1.0,)
    # Other instructions of that pipe leave the port alone.
    other = (op("shared", 8),) * 4
    assert run(product, steps(*other, MARK)).marks[0] == ((40.0 if from_registers else 32.0) + 50.0 + 1.0,)


def test_a_shuffle_before_a_product_still_holds_the_port() -> None:
    late = steps(op("uniform", 2), mma(), mma_wait(0), MARK)
    # Issued at 0, through at 4; the product that begins at 2 waits for the rest.
    assert run(steps(*shuffles(1), MARK), late).marks[1] == (2.0 + 2.0 + 32.0 + 50.0 + 1.0,)


@pytest.mark.parametrize(("from_registers", "after"), [(False, 41.0), (True, 9.0)])
def test_accesses_hold_their_warps_beside_a_product_that_leaves_nothing_of_the_port(
    from_registers: bool, after: float
) -> None:
    costs = replace(COSTS, port_hold={"arrive": 40.0, "access": 30.0, "shuffle": 20.0})
    product = steps(mma(from_registers=from_registers), mma_wait(0), MARK)
    arrive = WarpInstruction("shared", 8, 0, 7, 7, "fixed", "arrive", 0)
    assert run(product, steps(arrive, MARK), costs=costs).marks[1] == (after,)
    assert run(product, steps(*shuffles(1), MARK), costs=costs).marks[1] == (after - 20.0 if after > 20.0 else after,)
    # Several in a row hold it as long as one.
    reload = WarpInstruction("shared", 4, 0, 7, 7, "local", "reload", 4, word=0)
    several = run(product, steps(reload, reload, reload, MARK), costs=costs).marks[1][0]
    assert several == (31.0 if not from_registers else run(product, steps(reload, reload, reload, MARK)).marks[1][0])
    # Alone nothing does, nor what does not go through the port.
    assert run(steps(arrive, MARK), costs=costs).marks == ((8.0,),)
    assert run(product, steps(op("shared", 8), MARK), costs=costs).marks[1] == (9.0,)


def test_spilled_words_go_through_the_port_by_their_bytes() -> None:
    product = steps(mma(), mma_wait(0), MARK)
    reload = WarpInstruction("shared", 8, 0, 7, 7, "local", "reload", 16, word=0)
    assert run(product, steps(reload, MARK)).marks[0] == (83.0 + 16.0,)


def test_a_barrier_holds_warpgroups_until_the_last_is_there() -> None:
    meet = WarpInstruction("control", 1, 0, 7, 7, "fixed", "barrier", 2)
    found = run(steps(op("fma", 20), meet, MARK), steps(op("fma", 3), meet, MARK))
    assert sorted(found.marks) == [(30.0,), (31.0,)]  # both from 20 on, one a cycle
    own = meet._replace(amount=0)
    assert run(steps(op("fma", 20), own, MARK), steps(op("fma", 3), own, MARK)).marks == ((30.0,), (14.0,))


def test_barriers_of_different_rounds_do_not_mix() -> None:
    meet = WarpInstruction("control", 1, 0, 7, 7, "fixed", "barrier", 2)
    found = run(steps(meet, op("fma", 40), meet, MARK), steps(meet, meet, MARK))
    assert min(found.marks[0][0], found.marks[1][0]) >= 10 + 40 + 10


def test_the_spread_of_barriers_is_bounded_and_repeats() -> None:
    own = WarpInstruction("control", 1, 0, 7, 7, "fixed", "barrier", 0)
    costs = replace(COSTS, barrier_spread=8.0)
    first, again = (run(steps(*[own, MARK] * 50), costs=costs) for _ in range(2))
    assert first == again
    marks = first.marks[0]
    gaps = [b - a - 1 for a, b in pairwise(marks)]
    assert all(10 <= gap <= 18 for gap in gaps)
    assert max(gaps) - min(gaps) > 4


K = [(("K", n), 64.0, 1, 100.0, 0.0) for n in range(3)]


def eat(n: int) -> tuple[Step, ...]:
    return ((POLL, ("K", n)), (ARRIVE, ("K", n)))


def test_a_ring_of_one_slot_waits_for_its_release() -> None:
    # 4 cycles of copying and 100 of latency; the slot is handed back 30 after it was let go.
    found = run(steps(*eat(0), *eat(1), *eat(2), MARK), copies=tuple(K))
    assert found.marks == ((104 + 2 * (30 + 4 + 100) + 1.0,),)


def test_a_second_slot_hides_the_copy() -> None:
    copies = tuple((tag, size, 2, latency, share) for tag, size, _, latency, share in K)
    # K1 is asked for at 3 and copied from 4 to 8; K2 waits for K0's slot.
    assert run(steps(*eat(0), *eat(1), MARK), copies=copies).marks == ((109.0,),)
    assert run(steps(*eat(0), *eat(1), *eat(2), MARK), copies=copies).marks == ((104 + 30 + 4 + 100 + 1.0,),)


def test_a_slot_is_free_when_every_warpgroup_has_let_it_go() -> None:
    late = steps((POLL, ("K", 0)), op("fma", 200, 0b1), (ARRIVE, ("K", 0)), *eat(1), MARK)
    found = run(steps(*eat(0), *eat(1), MARK), late, copies=tuple(K[:2]))
    released = 104 + 1 + 200  # the late one issues after the other, or before it
    assert all(marks[0] == pytest.approx(released + 30 + 4 + 100 + 1, abs=2) for marks in found.marks)


def test_copies_from_memory_share_one_path() -> None:
    for share, landed in ((0.0, 4.0), (0.5, 8.0), (1.0, 16.0)):
        copies = ((("K", 0), 64.0, 1, 100.0, share),)
        assert run(steps(*eat(0), MARK), copies=copies).marks == ((landed + 100 + 1,),)
    two = ((("Q0", 0), 64.0, 1, 100.0, 1.0), (("K", 0), 64.0, 1, 100.0, 1.0))
    assert run(steps(*eat(0), MARK), copies=two).marks == ((32 + 100 + 1.0,),)


def test_consumers_that_issue_their_own_copies() -> None:
    load = WarpInstruction("other", 1, 0, 7, 7, "fixed", "load")
    program = steps(op("fma", 10), (load, ("K", 0)), (POLL, ("K", 0)), GATE)
    other = steps((POLL, ("K", 0)), GATE)
    found = run(program, other, own_copies={"K": (64.0, 100.0, 0.0)})
    assert sorted(found.marks) == [(114.0,), (115.0,)]  # copied from 10 to 14


def test_stores_leave_at_their_rate() -> None:
    store = WarpInstruction("shared", 1, 0, 7, 7, "fixed", "store", 16)
    # 128 lanes of 16 bytes at 8 bytes a cycle: 256 cycles before the next can go.
    assert run(steps(store, MARK, store, MARK)).marks == ((1.0, 257.0),)


def test_stores_get_half_of_the_memory_beside_reads() -> None:
    store = WarpInstruction("shared", 1, 0, 7, 7, "fixed", "store", 16)
    reading = ((("Q0", 0), 64.0, 1, 100.0, 1.0),)  # 16 cycles at 4 bytes a cycle
    # 2048 bytes at 2 bytes a cycle, where they have the store's own 8 when nothing is read.
    assert run(steps(store, MARK, store, MARK), copies=reading).marks == ((1.0, 1025.0),)
    late = steps(op("uniform", 15), op("uniform", 15), store, MARK, store, MARK)
    assert run(late, copies=reading).marks == ((31.0, 287.0),)


SPILL = WarpInstruction("shared", 1, 0, 7, 7, "fixed", "spill", 4, word=0)
RELOAD = WarpInstruction("shared", 1, 0, 0, 7, "shared", "reload", 4, word=0)


def test_spilled_registers_leave_through_a_queue() -> None:
    three = steps(SPILL, MARK, SPILL, MARK, SPILL, MARK)
    assert run(three).marks == ((1.0, 65.0, 129.0),)  # 512 bytes of a warpgroup at 8 a cycle
    assert run(three, costs=replace(COSTS, store_queue_bytes=512.0)).marks == ((1.0, 3.0, 65.0),)


def test_reloads_find_what_was_used_last() -> None:
    costs = replace(COSTS, store_queue_bytes=1e6, spill_words=2)
    other, third = (RELOAD._replace(word=n) for n in (1, 2))
    assert run(steps(SPILL, RELOAD, GATE), costs=costs).marks == ((5.0,),)
    assert run(steps(SPILL, other, GATE), costs=costs).marks == ((81.0,),)
    again = steps(SPILL, op("other"), other, third, RELOAD, GATE)
    assert run(again, costs=costs).marks == ((84.0,),)  # two others came between
    assert run(again, costs=replace(costs, spill_words=3)).marks == ((83.0,),)  # only the third was missing, asked at 3


def test_warpgroups_take_turns() -> None:
    block = ((POLL, TURN), (GATE, None), (op("fma", 10), None), (ARRIVE._replace(waits=0), TURN))
    found = run(steps(*block, *block), steps(*block, *block))
    # 0 may begin; each hands over 10 + 1 after its mark, and 30 later the other goes on.
    assert found.marks == ((2.0, 84.0), (43.0, 125.0))


def test_ctas_are_independent_but_share_the_pipes() -> None:
    program = steps(op("mufu"), MARK)
    found = run_both([Cta((program,), ()), Cta((program,), (), begins=3.0)], COSTS, MMA)
    assert found.marks == ((1.0,), (9.0,))
    meet = WarpInstruction("control", 1, 0, 7, 7, "fixed", "barrier", 2)
    pair = (steps(meet, MARK), steps(meet, MARK))
    late = run_both([Cta(pair, ()), Cta(pair, (), begins=500.0)], COSTS, MMA)
    assert max(late.marks[0] + late.marks[1]) < 20
    assert min(late.marks[2] + late.marks[3]) >= 510


@pytest.mark.parametrize(
    "warps",
    [
        (steps((POLL, ("K", 0)), GATE),),
        (steps((POLL, ("K", 1)), GATE), steps(*eat(0))),
        (steps(WarpInstruction("control", 1, 0, 7, 7, "fixed", "barrier", 2)),),
        (steps(MARK), steps((POLL, TURN), GATE)),
        (steps(mma_wait(0), mma(commits=False), (POLL, ("V", 0)), GATE),),
    ],
)
def test_warps_that_wait_forever_are_an_error_not_a_hang(warps: tuple[tuple[Step, ...], ...]) -> None:
    with pytest.raises(CodeError, match="wait for each other"):
        run(*warps)


PLAIN = st.builds(op, st.sampled_from(PIPES[:6]), st.integers(1, 15), st.integers(0, 63), st.integers(0, 7),
                  st.integers(0, 7),
                  st.sampled_from(LATENCIES))  # fmt: skip
ANY = st.one_of(PLAIN, st.builds(mma, st.booleans()), st.builds(mma_wait, st.integers(0, 3)))


@given(st.lists(st.lists(ANY, min_size=1, max_size=25), min_size=1, max_size=3), st.integers(2, 6))
def test_no_run_beats_its_stalls_pipes_or_tensor_core(warps: list[list[WarpInstruction]], queue: int) -> None:
    found = run(*[steps(*code, MARK) for code in warps], costs=replace(COSTS, mma_queue=queue))
    assert found.instructions == sum(map(len, warps)) + len(warps)
    for code, marks in zip(warps, found.marks, strict=True):
        assert marks[0] >= sum(i.stall for i in code)
        matrix = [i for i in code if i.kind == "mma"]
        if len(matrix) > queue and code[-1].kind == "mma":
            assert marks[0] >= 32.0 * (len(matrix) - queue)  # all but a queue full have ended
    for pipe in ("alu", "mufu"):
        last = {"alu": 4.0, "mufu": 8.0}[pipe]
        assert found.end >= found.busy[pipe] - last
    assert found.end >= found.instructions - 1
