"""The power balance: energies by hand, and clocks that meet their limit."""

from __future__ import annotations

import csv
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilecast.base.data import MEASURED
from tilecast.model.chip.evaluate import PredictError
from tilecast.model.chip.power import (
    Activity,
    Clock,
    busy_share,
    energy_joule_at_1ghz,
    fixed_clock,
    length,
    power_at,
    settle,
    settle_clock,
    settled_mhz,
)
from tilecast.model.forecast.predict import predict
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import MachineError, load_machine

#: About a millisecond of attention on a B200: 1.5e6 cycles of 148 SMs, tensor cores busy for 80 % of them.
BUSY = 1.5e6
WORK = Activity(0.8 * BUSY * 148 * 8192, "bf16", (("mufu", 0.7 * BUSY * 148), ("fma", 3e7)), 3e9, 5e8)


def test_energy_is_operations_times_energy_each() -> None:
    machine = load_machine("b200")
    found = energy_joule_at_1ghz(machine, WORK)
    assert found["tensor"] == pytest.approx(WORK.tensor_flop * machine["power.tensor_pj_per_flop_bf16"] * 1e-12)
    assert found["mufu"] == pytest.approx(0.7 * BUSY * 148 * 16 * machine["power.mufu_pj_per_op"] * 1e-12)
    assert found["alu"] == 0.0
    assert found["l2"] == pytest.approx(3e9 * machine["power.l2_pj_per_byte"] * 1e-12)


@pytest.mark.parametrize("name", ["b200", "h200-sxm", "rtx-5090"])
def test_power_adds_up(name: str) -> None:
    """Idle, the clock tree, energies at the voltage of the set clock, and memory, over the kernel's time."""
    machine = load_machine(name)
    ghz, seconds = 1.2, BUSY / 1.2e9
    at = ghz / machine["power.tensor_clock_share"]
    exponent = machine["power.energy_exponent"]
    energy = energy_joule_at_1ghz(machine, WORK)
    l2 = energy.pop("l2") * at ** machine.get("power.l2_energy_exponent", exponent)
    chip = sum(energy.values()) * at**exponent
    hbm = 5e8 * machine["power.hbm_pj_per_byte"] * 1e-12
    expected = (
        machine["power.idle_w"] + machine["power.active_w_at_1ghz"] * at ** (1 + exponent) + (chip + l2 + hbm) / seconds
    )
    assert power_at(machine, WORK, BUSY, 0.0, ghz) == pytest.approx(expected, rel=1e-12)


@settings(max_examples=60)
@given(load=st.floats(0.01, 3.0), memory_s=st.floats(0.0, 3e-3), regime=st.sampled_from(("sustained", "short")))
def test_a_settled_clock_is_the_highest_within_the_limit(load: float, memory_s: float, regime: str) -> None:
    machine = load_machine("b200")
    work = Activity(WORK.tensor_flop * load, "bf16", WORK.unit_cycles, WORK.l2_bytes, WORK.hbm_bytes)
    clock = settle_clock(machine, work, BUSY, memory_s, regime)
    limit = machine["chip.tdp_w"] if regime == "sustained" else machine["power.short_run_w"]
    assert clock.limit_w == limit
    top = machine["chip.clock_max_mhz"] * machine["power.tensor_clock_share"]
    if clock.bound == "boost":
        assert clock.mhz == top and clock.power_w <= limit
    else:
        assert clock.power_w == pytest.approx(limit, rel=1e-9)
        assert power_at(machine, work, BUSY, memory_s, clock.mhz * 1.001 / 1e3) > limit
    many = settled_mhz(machine, work, np.full(3, BUSY), np.full(3, memory_s), regime)
    assert many == pytest.approx(clock.mhz, abs=1e-6)


def test_more_work_settles_lower_and_a_short_run_higher() -> None:
    machine = load_machine("b200")
    more = Activity(WORK.tensor_flop * 1.2, "bf16", WORK.unit_cycles, WORK.l2_bytes, WORK.hbm_bytes)
    clock = settle_clock(machine, WORK, BUSY, 0.0, "sustained")
    assert clock.bound == "power"
    assert settle_clock(machine, more, BUSY, 0.0, "sustained").mhz < clock.mhz
    assert settle_clock(machine, WORK, BUSY, 0.0, "short").mhz > clock.mhz


def test_work_that_lasts_is_between_a_short_and_a_settled_run() -> None:
    machine = load_machine("h200-sxm")
    heavy = Activity(5.5e11, "bf16", WORK.unit_cycles, WORK.l2_bytes, WORK.hbm_bytes)
    short, settled = (settle_clock(machine, heavy, BUSY, 0.0, regime) for regime in ("short", "sustained"))
    assert short.mhz > 1.05 * settled.mhz
    reacts = machine["power.reaction_s"]
    assert settle_clock(machine, heavy, BUSY, 0.0, f"{500 * reacts:g}ms").mhz == short.mhz
    clocks = [settle_clock(machine, heavy, BUSY, 0.0, f"{times * reacts:g}s") for times in (1, 2, 4, 1000)]
    assert clocks[0].mhz == short.mhz
    assert clocks[1].mhz == pytest.approx((short.mhz + settled.mhz) / 2)
    assert clocks[2].mhz == pytest.approx((short.mhz + 3 * settled.mhz) / 4)
    assert clocks[3].mhz == pytest.approx(settled.mhz, rel=1e-3)
    assert {clock.limit_w for clock in clocks} == {machine["chip.tdp_w"]}
    many = settled_mhz(machine, heavy, np.full(2, BUSY), np.zeros(2), f"{2 * reacts:g}s")
    assert many == pytest.approx(clocks[1].mhz, abs=1e-6)


def test_the_reaction_is_that_of_the_measured_launches() -> None:
    """Work beyond the settled rate over the excess of the rate at first, from the times of equal launches."""
    runs: dict[tuple[str, str], list[tuple[float, int, float]]] = {}
    with (MEASURED / "h200_settling.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            held = runs.setdefault((row["load"], row["repetition"]), [])
            held.append((float(row["from_s"]), int(row["launches"]), float(row["ms_per_launch"]) / 1e3))
    reactions = []
    for rows in runs.values():
        first = [seconds for begins, _, seconds in rows if 0.004 <= begins < 0.028]
        late = [(count, count * seconds) for begins, count, seconds in rows if begins >= 0.25]
        settled = sum(count for count, _ in late) / sum(seconds for _, seconds in late)
        more = sum(count - count * seconds * settled for begins, count, seconds in rows if begins < 0.25)
        reactions.append(more / (len(first) / sum(first) - settled))
    fact = load_machine("h200-sxm").fact("power.reaction_s")
    assert len(reactions) == 4
    assert fact.value == pytest.approx(sum(reactions) / 4, abs=0.001)
    assert (fact.low, fact.high) == (pytest.approx(min(reactions), abs=0.001), pytest.approx(max(reactions), abs=0.001))


def test_how_long_work_lasts_reaches_forecasts_and_searches() -> None:
    work = Workload(batch=4, seqlen_q=4096)
    found = {clock: predict(work, "h200-sxm", clock=clock, interval=False) for clock in ("short", "300ms", "sustained")}
    assert found["short"].time_ms < found["300ms"].time_ms < found["sustained"].time_ms
    assert found["300ms"].regime == "300ms"
    assert "on average of 300ms: held by the 700 W limit once the limiter reacts, after 82 ms" in found["300ms"].text()
    assert [name for name, *_ in found["300ms"].other_regimes] == ["sustained", "short"]
    with pytest.raises(PredictError, match=r"clock 1s: a100 has no fact power\.reaction_s"):
        predict(work, "a100", clock="1s")
    for text in ("0ms", "-1s", "1 s", "1m"):
        with pytest.raises(PredictError, match="how long the work lasts"):
            predict(work, "h200-sxm", clock=text)


def test_a_locked_clock_says_what_it_would_draw() -> None:
    machine = load_machine("b200")
    clock = fixed_clock(machine, WORK, BUSY, 0.0, 1900.0)
    assert (clock.mhz, clock.bound) == (1900.0, "fixed")
    assert clock.power_w == power_at(machine, WORK, BUSY, 0.0, 1.9) > clock.limit_w == machine["chip.tdp_w"]


def test_a_board_of_less_power_settles_at_its_own_limit() -> None:
    b200 = load_machine("b200")
    board = b200.at_power(750)
    # Idle and clock tree do not shrink with the limit: three quarters of the power are less than three quarters of the work.
    full, less = (settle_clock(m, WORK, BUSY, 0.0, "sustained") for m in (b200, board))
    assert less.power_w == pytest.approx(750, rel=1e-9) and less.mhz < 0.8 * full.mhz
    short = settle_clock(board, WORK, BUSY, 0.0, "short")
    assert short.limit_w == pytest.approx(0.75 * b200["power.short_run_w"])
    # The limit is known now; what short runs draw is as uncertain as before.
    given, before = board.fact("power.short_run_w"), b200.fact("power.short_run_w")
    assert (board.fact("chip.tdp_w").kind, board.fact("chip.tdp_w").low) == ("given", None)
    assert (given.low, given.high) == (0.75 * before.low, 0.75 * before.high)  # type: ignore[operator]
    assert (b200.given_power_w, board.given_power_w) == (None, 750)


def test_power_reaches_the_forecast_and_the_search_and_is_no_what_if() -> None:
    work = Workload(batch=4, seqlen_q=8192, mask="causal")
    at_750, at_1000, rated = (predict(work, "b200", power=power, interval=False) for power in (750, 1000, None))
    assert at_750.tflops < 0.8 * at_1000.tflops
    assert (at_1000.tflops, at_1000.variant) == (rated.tflops, rated.variant)
    assert at_750.outside_calibrated_range == rated.outside_calibrated_range == ()
    assert predict(work, load_machine("b200").at_power(750), interval=False).tflops == at_750.tflops
    assert predict(work, "b200", power=4000, interval=False).clock.bound == "boost"


@pytest.mark.parametrize("watts", [245, -1, float("nan"), float("inf"), 5001])
def test_a_power_limit_that_no_board_has_is_refused(watts: float) -> None:
    with pytest.raises(
        MachineError, match="power: expected more than the 245 W that b200 draws when idle and at most 5000 W"
    ):
        load_machine("b200").at_power(watts)


def test_short_clocks_go_by_what_is_drawn_while_all_sms_work() -> None:
    """Measured within launches on an H200: 1,680 MHz while all SMs multiply, more where a last wave leaves some idle, whatever a launch's mean."""
    chip = load_machine("h200-sxm")
    full = Activity(8e12, "bf16", (), 0.0, 0.0)
    takes = length(16e6, 0.0)
    whole = settle(chip, full, takes, "short")
    assert whole.bound == "power"
    # Half of the launch with half of the SMs: three quarters of the work in the same time.
    parted = Activity(6e12, "bf16", (), 0.0, 0.0, busy=0.75)
    mean = settle(chip, replace(parted, busy=1.0), takes, "short")
    found = settle(chip, parted, takes, "short")
    assert whole.mhz < found.mhz < mean.mhz
    top = chip["chip.clock_max_mhz"] * chip["power.tensor_clock_share"]
    assert found.mhz == pytest.approx(2.0 / (1.0 / whole.mhz + 1.0 / top), rel=1e-6)
    # Sustained limits go by the mean, and what no limit holds keeps the top clock.
    assert settle(chip, parted, takes, "sustained") == settle(chip, replace(parted, busy=1.0), takes, "sustained")
    assert settle(chip, Activity(1e12, "bf16", (), 0.0, 0.0, busy=0.6), takes, "short").bound == "boost"
    # Slots that never get a tile are not idle by a last wave: a tenth of the SMs at work from begin to end.
    assert busy_share(100.0, 1000.0, 13, 130) == 1.0 and busy_share(1500.0, 2000.0, 195, 130) == 0.75
    many = Activity(np.array([8e12, 6e12]), "bf16", (), np.zeros(2), np.zeros(2), busy=np.array([1.0, 0.75]))  # type: ignore[arg-type]
    assert settled_mhz(chip, many, np.full(2, 16e6), np.zeros(2), "short") == pytest.approx([whole.mhz, found.mhz])


def test_a_b200_reacts_as_a_loop_of_flash_attention_shows() -> None:
    """FlashInfer's pull request 2899: TFLOP/s of four of eight tens of launches back to back, lines between their middles."""
    flop = Workload(4, 16, 16, 8192, 8192).flops / 1e12
    rates = np.interp(np.arange(80) + 0.5, [5, 15, 35, 75], [1425, 1450, 1373, 1237])
    seconds = flop / rates
    first = flop * 20 / seconds[:20].sum()
    beyond = float(((rates - rates[-1]) * seconds).sum())
    fact = load_machine("b200").fact("power.reaction_s")
    assert fact.value == pytest.approx(beyond / (first - rates[-1]), abs=0.001)
    # The source does not say whether a mask halves the work.
    assert fact.low == pytest.approx(fact.value / 2, abs=0.001) and fact.high > fact.value


def test_a_clock_says_why_it_is_what_it_is() -> None:
    h200, b200 = load_machine("h200"), load_machine("b200")
    beside, alone = Clock(1790.3, 366, 700, "boost"), Clock(1965, 366, 1000, "boost")
    assert beside.words(h200, "sustained") == "top clock beside matrix products (1980 MHz without), 366 W of 700 W"
    assert alone.words(b200, "sustained") == "top clock, 366 W of 1000 W"
    held = Clock(1400, 860, 860, "power")
    assert held.words(h200, "short") == "held by the 860 W that short runs draw"
    assert held.words(h200, "sustained") == "held by the 860 W limit"
    assert Clock(1900, 950, 700, "fixed").words(h200, "fixed").endswith("would draw 950 W, above the 700 W limit")
