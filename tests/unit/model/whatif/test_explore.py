"""Sensitivities, break-evens, the asymmetry map, natural experiments: what must hold, checked by other means."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import pytest

from tilecast.base.files import OutputError
from tilecast.cli import main
from tilecast.explore.map_picture import COLOURS, cell_style, draw, write_map
from tilecast.model.chip.evaluate import PredictError
from tilecast.model.families import build_pipeline, loop_shape
from tilecast.model.forecast.brief import brief
from tilecast.model.kernel.variants.fa4 import Fa4Variant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import MachineError, load_machine
from tilecast.model.whatif.asymmetry import asymmetry_map
from tilecast.model.whatif.break_even import break_evens
from tilecast.model.whatif.render_rows import break_evens_text, map_text, sensitivities_text
from tilecast.model.whatif.sensitivity import sensitivities
from tilecast.validation.experiments.run import (
    EXPERIMENTS,
    FORECASTS,
    RatioRow,
    cycle_ratios,
    matched,
    order,
    outcome,
    run_experiments,
    told_by_others,
)
from tilecast.validation.experiments.text import report_dict, report_text
from tilecast.validation.published.points import load_points

WORK = Workload(batch=4, heads_q=16, heads_kv=16, seqlen_q=8192, seqlen_k=8192)
PAIR = Fa4Variant(cta_group=2, scheduler="persistent", stats_slots=2)
B200 = load_machine("b200")


# --- sensitivities ----------------------------------------------------------------------------------------------


def test_compute_bound_at_one_clock_the_elasticities_sum_to_minus_one() -> None:
    """Rates, minus latencies, with nothing but the loop: scaling all of them by 1 % moves the time by 1 %.

    A matrix-bound machine (64 ex2 a clock); the tail's whole tiles and the few fixed instruction counts are the slack.
    """
    machine = B200.with_facts({"mufu.ex2_per_clk": 64})
    rows = sensitivities(replace(WORK, batch=8), machine, PAIR, clock=1500.0, reoptimised=False)
    inside = [r for r in rows if r.group == "rate"]
    times = [r for r in rows if r.group == "latency"]
    assert sum(r.fixed for r in inside) - sum(r.fixed for r in times) == pytest.approx(-1.0, abs=0.05)
    assert rows[0].fact == "chip.sm_count" or rows[0].fact == "tensor.bf16_flop_per_clk"
    tensor = next(r for r in rows if r.fact == "tensor.bf16_flop_per_clk")
    assert -1.0 < tensor.fixed < -0.7


def test_sensitivity_is_what_two_forecasts_give() -> None:
    rows = sensitivities(WORK, B200, PAIR, clock=1700.0, step=0.1)
    row = next(r for r in rows if r.fact == "mufu.ex2_per_clk")
    slow, fast = (brief(WORK, B200.with_facts({row.fact: x}), PAIR, 1700.0).seconds for x in (14.4, 17.6))
    assert (row.low, row.high) == pytest.approx((14.4, 17.6))
    assert row.fixed == pytest.approx(math.log(fast / slow) / math.log(17.6 / 14.4))
    assert row.low_ms == pytest.approx(slow * 1e3) and row.high_ms == pytest.approx(fast * 1e3)
    for one in rows:
        assert one.low_reoptimised_ms <= one.low_ms and one.high_reoptimised_ms <= one.high_ms
    sizes = [max(abs(r.fixed), abs(r.reoptimised)) for r in rows]
    assert sizes == sorted(sizes, reverse=True)
    assert "mufu.ex2_per_clk" in sensitivities_text(rows, B200, WORK, "1700 MHz")


def test_what_the_regime_makes_of_power_and_clock() -> None:
    held = {r.fact: r for r in sensitivities(WORK, B200, PAIR, clock="sustained", reoptimised=False)}
    fixed = {r.fact: r for r in sensitivities(WORK, B200, PAIR, clock=1200.0, reoptimised=False)}
    assert held["chip.tdp_w"].fixed < -0.5 and abs(held["chip.clock_max_mhz"].fixed) < 1e-9
    assert fixed["chip.tdp_w"].fixed == 0 and "power.idle_w" not in fixed
    # What a launch reads before its first product; the main units show however little.
    assert -0.02 < held["hbm.tbps_achieved"].fixed < 0
    with pytest.raises(PredictError, match="step"):
        sensitivities(WORK, B200, step=0.0)


# --- break-evens ------------------------------------------------------------------------------------------------


def demand(fact: str, x: float, variant: Fa4Variant = PAIR, work: Workload = WORK) -> dict[str, float]:
    return build_pipeline(loop_shape(work), variant, B200.with_facts({fact: x})).demand()


@pytest.mark.parametrize("share", [0.0, 0.25])
@pytest.mark.parametrize("fact", ["mufu.ex2", "fma.lanes", "alu", "tensor.bf16", "issue"])
def test_solved_value_is_where_the_busiest_unit_changes(fact: str, share: float) -> None:
    variant = replace(PAIR, emulated_share=share)
    (row,) = break_evens(WORK, B200, variant, facts=(fact,), clock=1500.0)
    solved = row.solved
    assert solved is not None
    here = demand(row.fact, solved.value, variant)
    if solved.other == "smem":
        # Operand fetch: still the matrix unit's time, but it no longer falls as the array gets faster.
        there = demand(row.fact, solved.value * 1.02, variant)
        assert solved.unit == "tensor" == max(here, key=lambda unit: here[unit])
        assert demand(row.fact, solved.value / 1.02, variant)["tensor"] == pytest.approx(here["tensor"] * 1.02)
        assert there["tensor"] > here["tensor"] / 1.02 * 1.005
        return
    assert here[solved.unit] == pytest.approx(here[solved.other], rel=1e-6)
    below, above = (demand(row.fact, solved.value * factor, variant) for factor in (0.999, 1.001))
    assert max(below, key=lambda unit: below[unit]) == solved.unit
    assert max(above, key=lambda unit: above[unit]) != solved.unit


def test_the_papers_break_even_of_exponentials_and_matrix_work() -> None:
    """128 x 128 x 128 on a B200: 1024 cycles each (FA4P), so 16 ex2 a clock; the loop's own row scale adds 1/128."""
    (row,) = break_evens(WORK, B200, PAIR, facts=("mufu.ex2",), clock=1500.0)
    assert row.solved is not None
    assert row.solved.value == pytest.approx(16 * 129 / 128, rel=1e-9)
    assert row.solved.formula == "E = F*(1 - f)/(2*(d + v))" and row.solved.equation == "33024/x = 2048"


def test_operand_fetch_is_the_ports_break_even() -> None:
    """One CTA, 128 x 128: Q and K from shared memory take 64 cycles an instruction at 128 B/clk, as long as the array."""
    single = replace(PAIR, cta_group=1, emulated_share=0.25)
    (row,) = break_evens(WORK, B200, single, facts=("smem",), clock=1500.0)
    assert row.solved is not None and (row.solved.unit, row.solved.other) == ("smem", "tensor")
    assert row.solved.value == pytest.approx(128.0)
    assert demand("smem.bytes_per_clk", 120.0, single)["tensor"] > demand("smem.bytes_per_clk", 128.0, single)["tensor"]


def test_bisection_separates_what_the_simulation_says() -> None:
    rows = break_evens(WORK, B200, PAIR, facts=("mufu.ex2", "tensor.bf16", "l2"), clock=1500.0)
    for row in rows:
        found = row.simulated
        assert found is not None and found.below != found.above
        below, above = (
            brief(WORK, B200.with_facts({row.fact: found.value * factor}), PAIR, 1500.0).bound_by
            for factor in (0.998, 1.002)
        )
        assert (below, above) == (found.below, found.above)
    l2 = rows[2]
    assert l2.solved is not None and l2.simulated is not None
    assert l2.solved.value == pytest.approx(l2.simulated.value, rel=2e-3)


def test_useful_until_leaves_one_percent() -> None:
    mufu, hbm, latency = break_evens(
        WORK, B200, PAIR, facts=("mufu.ex2", "hbm.tbps_achieved", "tmem.load_latency"), clock=1500.0
    )
    assert mufu.useful_until is not None and mufu.useful_until > 16
    best = brief(WORK, B200.with_facts({"mufu.ex2_per_clk": 1024}), PAIR, 1500.0).seconds
    there = brief(WORK, B200.with_facts({"mufu.ex2_per_clk": mufu.useful_until}), PAIR, 1500.0).seconds
    assert there == pytest.approx(best * 1.01, rel=2e-3)
    assert hbm.useful_until == hbm.value and hbm.at_most_percent < 1
    assert latency.solved is None and latency.at_most_percent >= 0
    text = break_evens_text((mufu, hbm, latency), B200, WORK, "1500 MHz")
    assert "33024/x = 2048" in text and "not beyond today's" in text
    json.dumps([row.to_dict() for row in (mufu, hbm, latency)])


# --- the map ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_map():
    return asymmetry_map(WORK, B200, grid=5)


def test_cells_are_forecasts(small_map) -> None:
    assert small_map.x == pytest.approx((2048, 4096, 8192, 16384, 32768))
    assert small_map.y == pytest.approx((4, 8, 16, 32, 64))
    for j, i in ((0, 0), (2, 2), (3, 2), (4, 4)):
        machine = B200.with_facts({small_map.x_fact: small_map.x[i], small_map.y_fact: small_map.y[j]})
        variant = _variant(small_map.variants[j][i])
        assert variant.emulated_share == small_map.emulated_share[j][i]
        found = brief(WORK, machine, variant, small_map.clock_mhz)
        assert (found.tflops, found.bound_by) == (small_map.tflops[j][i], small_map.bound_by[j][i])
    assert small_map.tflops[2][2] == pytest.approx(small_map.base_tflops, rel=5e-3)


def _variant(text: str) -> Fa4Variant:
    from tilecast.model.families import parse_variant

    variant = parse_variant(text)
    assert isinstance(variant, Fa4Variant)
    return variant


def test_the_map_shows_asymmetry(small_map) -> None:
    """Slow matrix units with many ex2 are matrix-bound; fast ones with few wait for exponentials; more never hurts."""
    assert small_map.bound_by[4][0] == "tensor" and small_map.lap[0][4] == "mufu"
    for row in small_map.tflops:
        assert all(b >= a * 0.99 for a, b in pairwise(row))
    for low, high in pairwise(small_map.tflops):
        assert all(b >= a * 0.99 for a, b in zip(low, high, strict=True))


def test_gpus_are_placed_by_their_files_and_citations(small_map) -> None:
    places = {point.name: point for point in small_map.points}
    assert (places["h100-sxm"].x, places["h100-sxm"].y) == (4096, 16)
    assert (places["b300"].x, places["b300"].y) == (8192, 32)
    rubin = places["rubin"]
    assert (rubin.x, rubin.y, rubin.kind) == (8192, 32, "inferred") and "CF1178" in rubin.source
    assert all(point.source for point in small_map.points)
    text = map_text(small_map)
    assert "not forecasts for them" in text and "Rubin" in text and f"{small_map.tflops[2][2]:.0f}" in text


def test_other_axes_and_refusals() -> None:
    found = asymmetry_map(WORK, B200, axes=("smem", "tmem.read"), grid=3, span=2.0, clock=1500.0)
    assert found.x_fact == "smem.bytes_per_clk" and found.y == pytest.approx((256, 512, 1024))
    assert found.clock_mhz == 1500 and "rubin" not in {point.name for point in found.points}
    with pytest.raises(MachineError, match="names 2 rates"):
        asymmetry_map(WORK, B200, axes=("tmem", "mufu"), grid=3)


def test_picture_is_written_whole_and_says_everything(small_map, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    target = tmp_path / "map.svg"
    write_map(small_map, target)
    first = target.read_bytes()
    write_map(small_map, target)
    assert target.read_bytes() == first
    text = first.decode()
    for word in ("B200", "H100", "tensor full", small_map.x_fact, small_map.y_fact):
        assert word in text
    assert [p.name for p in tmp_path.iterdir()] == ["map.svg"]
    with pytest.raises(OutputError, match=r"\.svg or \.png"):
        write_map(small_map, tmp_path / "map.pdf")


def test_names_and_numbers_of_a_picture_cover_neither_each_other_nor_markers(small_map) -> None:
    pytest.importorskip("matplotlib")
    figure = draw(small_map)
    (axes,) = figure.axes
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in axes.texts]
    assert len(boxes) > 3 and not any(a.overlaps(b) for a, b in combinations(boxes, 2))
    markers = [axes.transData.transform((point.x, point.y)) for point in small_map.points]
    assert not any(box.padded(2).contains(*marker) for box in boxes for marker in markers)


def test_every_look_of_a_cell_is_its_own_colour() -> None:
    styles = [cell_style(unit, "") for unit in COLOURS] + [cell_style("recurrence", unit) for unit in COLOURS]
    assert len({colour for _, colour in styles}) == len({label for label, _ in styles}) == 2 * len(COLOURS)


def test_command_line_of_the_map(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    target = tmp_path / "m.png"
    with pytest.raises(SystemExit) as end:
        main(["map", "--machine", "b200", "--seqlen", "2048", "--grid", "3", "--json", "-o", str(target)])
    assert not end.value.code
    data = json.loads(capsys.readouterr().out)
    assert len(data["tflops"]) == len(data["y"]) == 3 and target.read_bytes().startswith(b"\x89PNG")


# --- natural experiments ----------------------------------------------------------------------------------------


def test_pairs_differ_in_the_gpu_and_nothing_else() -> None:
    points = load_points()[0]
    pairs = matched(EXPERIMENTS[0], points)
    assert len(pairs) > 150
    for old, new in pairs:
        assert (old.machine, new.machine) == ("gb200", "gb300")
        assert (old.kernel, old.version, old.dtype_class, old.workload) == (
            new.kernel,
            new.version,
            new.dtype_class,
            new.workload,
        )
        assert old.workload.seqlen_q >= 2048 and old.clock_mhz is None and new.clock_mhz is None
    loose = matched(EXPERIMENTS[2], points)
    assert {old.kernel for old, _ in loose} == {"cudnn", "fa2"}
    assert all(replace(a.workload, dtype="bf16") == replace(b.workload, dtype="bf16") for a, b in loose)


def ratio(measured: float, forecast: float, dtype: str = "16 bit", version: str = "1", seqlen: int = 4096) -> RatioRow:
    work = Workload(seqlen_q=seqlen, seqlen_k=seqlen, dtype="fp8" if dtype == "fp8" else "bf16")
    return RatioRow("x", "k", version, dtype, work, measured, forecast, forecast, forecast, forecast, 1500, 1600)


def test_a_row_is_foretold_by_the_measured_ratios_of_its_like() -> None:
    rows = [ratio(1.20, 9.0), ratio(1.24, 9.0), ratio(1.27, 9.0), ratio(1.50, 9.0), ratio(1.30, 9.0, dtype="fp8")]
    # Medians of the others: 1.27, 1.27, 1.24 and 1.24; the fp8 row has no like.
    assert told_by_others(rows) == (2, 4)
    assert told_by_others([]) == (0, 0)


def test_outcomes_and_order_by_hand() -> None:
    rows = [
        ratio(1.20, 1.25),
        ratio(1.20, 1.30, seqlen=8192),
        ratio(1.01, 0.9, version="2"),
        ratio(0.9, 1.0, version="3"),
    ]
    found = outcome(rows, "only_facts")
    assert (found.rows, found.within, found.sign_rows) == (4, 0.25, 3)
    assert found.median_error == pytest.approx(10) and found.bias == pytest.approx((5 + 10 - 11 + 10) / 4)
    assert found.sign == pytest.approx(2 / 3)
    pairs = order([*rows, ratio(1.4, 1.35, "fp8"), ratio(1.1, 1.4, "fp8", seqlen=8192), ratio(1.015, 1.0, "fp8", "2")])
    assert pairs is not None and (pairs.pairs, pairs.clear) == (3, 2)
    assert pairs.agree["whole_file"] == 0.5
    assert order(rows) is None and outcome([], "only_facts").rows == 0


def test_counters_free_of_the_clock_are_forecast() -> None:
    """bf16 within 2 points both ways; fp8 has the right sign and order, and its error is reported, not hidden."""
    bf16, fp8 = cycle_ratios()
    assert (bf16.dtype, fp8.dtype) == ("bf16", "fp8")
    assert bf16.only_facts == pytest.approx(bf16.measured, abs=0.02)
    assert bf16.whole_file == pytest.approx(bf16.measured, abs=0.02)
    assert fp8.only_facts > bf16.only_facts > 1 and fp8.whole_file > bf16.whole_file > 1
    assert fp8.measured > bf16.measured > 1


def test_report_of_a_few_rows_has_sign_and_every_number() -> None:
    points = [p for p in load_points()[0] if p.machine in ("gb200", "gb300") and p.version == "cudnn 9.27.0"]
    reports = run_experiments("short", points)
    first = reports[0]
    assert len(first.rows) == 32 and not reports[1].rows and first.spread_shapes == 0
    for row in first.rows:
        # Only the ex2 rate, under the old limit, gains least; the newer board's power adds to it.
        assert 0.99 < row.only_facts < row.with_power and row.measured > 1
    for name in FORECASTS:
        assert outcome(first.rows, name).sign == 1.0
    text = report_text(reports, cycle_ratios(), with_rows=True)
    data = json.loads(json.dumps(report_dict(reports, cycle_ratios())))
    assert f"{data['experiments'][0]['outcomes']['whole_file']['all']['within']:.0%}" in text
    assert len(data["experiments"][0]["rows"]) == 32 and "no kernel, version and shape" in text
