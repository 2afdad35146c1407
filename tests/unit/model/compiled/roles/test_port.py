"""Accesses to shared memory in line for its port: bursts as measured beside wgmma, what their warps wait for meanwhile."""

from __future__ import annotations

import csv
from dataclasses import replace
from functools import lru_cache
from statistics import fmean

import pytest

from tilecast.base.data import MEASURED
from tilecast.model.compiled.roles.code import KernelRoles, RoleCode, RoleInstruction
from tilecast.model.compiled.roles.costs import role_costs
from tilecast.model.compiled.roles.run import pass_cycles, step
from tilecast.model.compiled.roles.state import State
from tilecast.model.machine.machine import load_machine

COSTS = role_costs(load_machine("h200-sxm"))
#: Rounds of bursts, each at another place of the products' groups.
_ROUNDS = 12


def one(pipe: str = "other", kind: str = "plain", amount: int = 0, **more) -> RoleInstruction:
    return RoleInstruction(
        pipe, more.pop("stall", 1), more.pop("waits", 0), more.pop("write_counter", 7), 7, more.pop("latency", "fixed"),
        kind, -1, amount, **more,
    )  # fmt: skip


def access(kind: str, registers: int = 2, wavefronts: int = 2) -> RoleInstruction:
    counter = 0 if kind == "load" else 7
    return one("shared", f"shared_{kind}", registers, shape=(wavefronts, 4, 0), latency="shared", write_counter=counter)


def multiplying(n: int, home: str) -> RoleCode:
    """Groups of eight products, two under way, as the benchmark has them: it notes the clock after each."""
    products = [one("tensor", "wgmma", int(i == 7), shape=(64, n, 16), source=home, dtype="bf16") for i in range(8)]
    note = one("shared", "shared_store", 1, shape=(1, 1, 0))
    return RoleCode("mma", 0, (), (*products, one(kind="wgmma_wait", amount=1), note))


def simulated(kind: str, burst: int, mma: int, streams: int, n: int, home: str) -> tuple[float, float]:
    """(cycles until a burst is issued, until it is through) of the simulation."""
    tail = () if kind == "load" else (access("load", 1, 1),)
    rounds: list[RoleInstruction] = []
    for r in range(_ROUNDS):
        rounds += [one(stall=1500 + 48 * r), *[access(kind)] * burst, one(), *tail, one(waits=1)]
    roles = [multiplying(n, home)] * mma + [RoleCode("burst", 4, (), tuple(rounds))] * streams
    state = State(KernelRoles("bursts", "sm_90a", tuple(roles), ()), COSTS)
    warps = state.warps[mma:]
    seen: list[list[float]] = [[] for _ in warps]
    while min(map(len, seen)) < len(rounds):
        at = [warp.pc for warp in warps]
        step(state)
        for warp, before, times in zip(warps, at, seen, strict=True):
            if warp.pc != before:
                times.append(warp.free)
    length = len(rounds) // _ROUNDS
    # Several are in step in the first round, as the benchmark's barrier has them.
    told = range(_ROUNDS if streams == 1 else 1)
    found = [times[r * length : (r + 1) * length] for times in seen for r in told]
    return fmean(here[burst] - here[0] for here in found), fmean(here[-1] - here[0] for here in found)


@lru_cache
def measured() -> dict[tuple[str, int, int, int, int, str], tuple[float, float]]:
    with (MEASURED / "h200_smem_bursts.csv").open(encoding="utf-8") as file:
        return {
            (row["kind"], int(row["burst"]), int(row["mma_warpgroups"]), int(row["stream_warpgroups"]), int(row["n"]), row["a"]):
            (float(row["issued_cycles"]), float(row["through_cycles"]))
            for row in csv.DictReader(file) if row["pattern"] == "plain"
        }  # fmt: skip


@pytest.mark.parametrize(("kind", "off"), [("load", 0.1), ("store", 0.2)])
def test_an_access_more_takes_as_long_as_measured_beside_products_of_registers(kind: str, off: float) -> None:
    """Beside a product that leaves half of the port: what 8 and 16 take more than one."""
    for burst in (8, 16):
        found, seen = (
            of[1] - first[1]
            for of, first in (
                (simulated(kind, burst, 1, 1, 128, "register"), simulated(kind, 1, 1, 1, 128, "register")),
                (measured()[kind, burst, 1, 1, 128, "register"], measured()[kind, 1, 1, 1, 128, "register"]),
            )
        )
        assert found == pytest.approx(seen, rel=off)


@pytest.mark.parametrize("kind", ["load", "store"])
@pytest.mark.parametrize("mma", [1, 2])
def test_long_bursts_take_turns_with_products_that_read_all_of_the_port(kind: str, mma: int) -> None:
    """Short ones take three times as long as is charged (a load 170 cycles; docs/notes/forecast-accuracy.md)."""
    for burst in (12, 16):
        # The benchmark's code between the clocks, without products.
        around = measured()[kind, 1, 0, 1, 64, "smem"][1] - simulated(kind, 1, 0, 1, 64, "smem")[1]
        found = simulated(kind, burst, mma, 1, 64, "smem")[1] + around
        assert found == pytest.approx(measured()[kind, burst, mma, 1, 64, "smem"][1], rel=0.25)


@pytest.mark.parametrize(("kind", "off"), [("load", 0.3), ("store", 0.3)])
def test_a_warp_goes_on_until_the_line_is_full(kind: str, off: float) -> None:
    # Eight do not hold it, whatever passes: 4 cycles each, as without products.
    issued, through = simulated(kind, 8, 1, 1, 128, "register")
    assert issued == pytest.approx(8 * 4.0, abs=8.0) and through > 150.0
    # Two warps of a sub-partition with sixteen each stand until all but a line of them are through.
    found, alone = (simulated(kind, 16, 1, 2, 128, "register")[0], measured()[kind, 1, 0, 1, 64, "smem"][0])
    assert found + alone == pytest.approx(measured()[kind, 16, 1, 2, 128, "register"][0], rel=off)


def test_without_a_line_every_access_holds_its_warp() -> None:
    """Eight accesses of 64 cycles each, and 500 cycles that need none of them."""
    code = (*[access("load", 4, 16)] * 8, one(stall=500), one())
    line, none = (pass_cycles(code, replace(COSTS, line_least=depth, line_most=depth)) for depth in (13, 1))
    assert line == pytest.approx(500.0 + 8 * 4, abs=8.0)
    # The third is issued when the port takes up the second.
    assert none == pytest.approx(500.0 + 6 * 64, abs=8.0)


def test_a_fence_waits_for_stores_in_line() -> None:
    """Eight stores of 16 wavefronts: 512 cycles of the port, however early the fence comes."""
    fence = one("other", "fence", write_counter=1)
    stores = [access("store", 4, 16)] * 8
    assert pass_cycles((*stores, one(waits=2)), COSTS) < 100.0
    assert pass_cycles((*stores, fence, one(waits=2)), COSTS) >= 512.0


def test_a_counter_is_clear_when_the_last_access_that_raises_it_is_through() -> None:
    loads = [access("load", 4, 16)] * 3
    found = pass_cycles((*loads, one(waits=1)), COSTS)
    assert found == pytest.approx(3 * 64.0 + COSTS.latency["shared"], abs=8.0)
