"""Forecasts: invariants any user would rely on."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tilecast
from tilecast.model.chip.evaluate import PredictError
from tilecast.model.chip.power import Activity, fixed_clock, power_at, settle_clock
from tilecast.model.forecast.predict import predict
from tilecast.model.kernel.variants.fa3 import Fa3Variant
from tilecast.model.kernel.variants.fa4 import Fa4Variant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine, machine_names

W = Workload(batch=4, seqlen_q=8192, seqlen_k=8192)
KEYS = {
    "time_ms", "tflops", "tflops_interval", "clock_mhz", "binding", "units", "ii_cycles", "res_mii", "rec_mii", "waterfall",
    "variant", "assumed_facts",
}  # fmt: skip


@pytest.mark.parametrize("machine", machine_names())
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_every_machine_forecasts_and_accounts_for_all_its_time(machine: str, mask: str) -> None:
    p = predict(replace(W, mask=mask), machine)
    assert sum(step.share for step in p.waterfall) == pytest.approx(1.0, abs=1e-9)
    assert sum(step.cycles for step in p.waterfall) == pytest.approx(p.time_ms * 1e3 * p.clock_mhz, rel=1e-9)
    assert p.tflops * p.time_ms == pytest.approx(p.workload.flops / 1e9, rel=1e-9)
    low, high = p.tflops_interval
    assert low <= p.tflops <= high
    peak = p.machine["tensor.bf16_flop_per_clk"] * p.machine["chip.sm_count"] * p.machine["chip.clock_max_mhz"] / 1e6
    assert 0.2 * peak < p.tflops < peak
    assert all(0 < share <= 1.0 + 1e-9 for share in p.units.values())
    assert p.ii_cycles >= p.bounds.ii_lower * 0.999


def test_json_has_the_documented_keys_and_survives_json() -> None:
    data = json.loads(json.dumps(predict(W, "b200").to_dict()))
    assert set(data) >= KEYS
    assert data["variant"].startswith("family=fa4")
    assert data["binding"]["kind"] in ("unit", "recurrence", "memory")


def test_report_names_what_it_must() -> None:
    text = predict(W, "b200").text()
    for part in ("TFLOP/s", "sustained", "short", "What it waits for", "From peak to achieved", "Rests on", "MHz"):
        assert part in text


def test_notebook_shows_the_numbers_of_the_text_as_tables() -> None:
    answer = predict(W, "b200")
    page = ElementTree.fromstring(f"<div>{answer._repr_html_()}</div>")
    tables = [[[cell.text for cell in row] for row in table.iter("tr")] for table in page.iter("table")]
    assert [table[0][0] for table in tables] == ["clock", "operation", "unit", "cause"]
    assert [row[0] for row in tables[0][1:]] == ["sustained", "short"]
    for row in tables[3][1:]:
        assert re.search(rf"{re.escape(str(row[0]))} +{row[1]} +{row[2]}", answer.text())
    words = " ".join(paragraph.text or "" for paragraph in page.iter("p"))
    assert answer.model_error.sentence() in words and answer.pipeline.name in words


def test_more_special_function_units_help_only_where_they_bind() -> None:
    b200 = load_machine("b200")
    double = b200.with_facts({"mufu.ex2_per_clk": 32})
    narrow = replace(W, head_dim_qk=64, head_dim_v=64)
    assert predict(narrow, double, clock=1500.0).tflops > 1.2 * predict(narrow, b200, clock=1500.0).tflops
    wide = replace(W, head_dim_qk=256, head_dim_v=256)
    assert predict(wide, double, clock=1500.0).tflops < 1.05 * predict(wide, b200, clock=1500.0).tflops


def test_b300_beats_b200_and_short_beats_sustained() -> None:
    assert predict(W, "gb300").tflops > predict(W, "gb200").tflops
    assert predict(W, "b200", clock="short").tflops > predict(W, "b200").tflops


def test_a_million_keys_take_their_time_in_proportion() -> None:
    eight = predict(replace(W, batch=1, seqlen_q=65536, seqlen_k=65536), "b200", clock=1500.0)
    million = predict(replace(W, batch=1, seqlen_q=1 << 20, seqlen_k=1 << 20), "b200", clock=1500.0)
    assert million.time_ms / eight.time_ms == pytest.approx(256, rel=0.05)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from([512, 1024, 2048, 4096]), st.sampled_from([1, 2, 8]), st.sampled_from(["none", "causal"]))
def test_twice_the_batch_is_never_faster(seqlen: int, batch: int, mask: str) -> None:
    one = predict(Workload(batch, 16, 16, seqlen, seqlen, mask=mask), "b200", clock=1500.0, interval=False)
    two = predict(Workload(2 * batch, 16, 16, seqlen, seqlen, mask=mask), "b200", clock=1500.0, interval=False)
    assert two.time_ms >= one.time_ms * 0.999


def test_causal_saves_time_but_not_half() -> None:
    full = predict(W, "b200", clock=1500.0)
    causal = predict(replace(W, mask="causal"), "b200", clock=1500.0)
    assert 0.5 * full.time_ms < causal.time_ms < 0.7 * full.time_ms


@pytest.mark.parametrize("lengths", [(4096, 1), (1, 4096), (1, 1), (100, 77), (300, 5000)])
@pytest.mark.parametrize("machine", ["b200", "h200-sxm", "a100"])
def test_odd_shapes_have_a_waterfall_without_negative_causes(lengths: tuple[int, int], machine: str) -> None:
    p = predict(Workload(seqlen_q=lengths[0], seqlen_k=lengths[1], mask="causal"), machine)
    assert all(step.share >= -1e-9 for step in p.waterfall), p.text()


def test_window_is_cheaper_than_causal() -> None:
    causal = predict(replace(W, mask="causal"), "h200-sxm", clock=1500.0)
    window = predict(replace(W, mask="window", window=(511, 0)), "h200-sxm", clock=1500.0)
    assert window.time_ms < 0.3 * causal.time_ms


def test_unfused_is_bound_by_memory_and_far_slower() -> None:
    unfused = predict(W, "b200", family="unfused", clock=1900.0)
    fused = predict(W, "b200", clock=1900.0)
    assert unfused.binding.kind == "memory"
    assert unfused.time_ms > 2.5 * fused.time_ms


def test_given_variant_is_used_and_marked() -> None:
    p = predict(W, "b200", Fa4Variant(emulated_share=0.25))
    assert p.variant_origin == "as given"
    assert p.variant == Fa4Variant(emulated_share=0.25)
    best = predict(W, "b200", clock=1500.0)
    assert best.variant_origin.startswith("best of the ")
    assert best.time_ms <= predict(W, "b200", Fa4Variant(emulated_share=0.25), clock=1500.0).time_ms


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: predict(W, "b200", clock="turbo"),
            r"clock: expected sustained, short, how long the work lasts \(300ms, 2s\) or a number of MHz, got 'turbo'",
        ),
        (lambda: predict(W, "b200", clock=5.0), "expected 50 to 1965 MHz"),
        (lambda: predict(replace(W, dtype="fp8"), "a100"), "a100 has no fp8 matrix rate"),
        (lambda: predict("b200", W), "workload: expected a tilecast.Workload, the machine second, got str"),
        (
            lambda: predict(W, "b200", "cta_group=1"),
            r"variant: expected tilecast.parse_variant\(.*, got the text 'cta_group=1'",
        ),
        (lambda: predict(W, "b200", Fa3Variant()), "fa3 cannot run .* on b200: family fa3"),
        (
            lambda: predict(replace(W, head_dim_qk=512, head_dim_v=512), "b200"),
            r"tensor memory .*over by 768.*head_dim_v of at most 256",
        ),
        (lambda: predict(replace(W, head_dim_qk=512, head_dim_v=512), "h200-sxm"), r"registers|shared memory"),
    ],
)
def test_refusals_say_what_and_why(call, message: str) -> None:
    with pytest.raises(PredictError, match=message):
        call()


def test_outside_the_checked_range_is_flagged() -> None:
    assert predict(W, "b200").outside_calibrated_range == ()
    assert "seqlen 128" in predict(replace(W, seqlen_q=128, seqlen_k=128), "b200").outside_calibrated_range[0]
    changed = load_machine("b200").with_facts({"mufu.ex2_per_clk": 32})
    assert "what-if" in predict(W, changed).outside_calibrated_range[0]


def test_public_names_load() -> None:
    assert {"predict", "Workload", "load_machine"} <= set(dir(tilecast))
    assert tilecast.predict(tilecast.Workload(), "b200").tflops > 0
    with pytest.raises(AttributeError, match="no attribute 'forecast'"):
        _ = tilecast.forecast


# --- the clock ----------------------------------------------------------------------------------------------


def gemm(flop: float) -> Activity:
    return Activity(flop, "bf16", (), 0.0, 0.0)


def test_settled_matmul_clock_of_the_h200_is_reproduced() -> None:
    """668 TFLOP/s at 692 W and 1342 MHz, matrix unit 92 % busy (data/measured/h200_power.csv)."""
    h200 = load_machine("h200-sxm")
    flop = 2.0 * 8192**3
    cycles = flop / (132 * 4096 * 0.92)
    # Tiles of 128 x 256 feed from L2; the tensor term holds the array and its operands in shared memory only.
    feed = flop * (1 / 128 + 1 / 256)
    matmul = Activity(flop, "bf16", (), feed, 3 * 2 * 8192.0**2)
    clock = settle_clock(h200, matmul, cycles, 0.0, "sustained")
    assert clock.bound == "power"
    assert clock.mhz == pytest.approx(1342, rel=0.05)


def test_energy_follows_the_set_clock_and_l2_its_own_exponent() -> None:
    facts = {
        "power.idle_w": 100, "power.active_w_at_1ghz": 0, "power.energy_exponent": 2, "power.l2_energy_exponent": 1,
        "power.tensor_clock_share": 0.8, "power.tensor_pj_per_flop_bf16": 0.5, "power.l2_pj_per_byte": 10,
        "power.hbm_pj_per_byte": 50,
    }  # fmt: skip
    machine = load_machine("h200-sxm").with_facts(facts)
    # A second at 1.2 GHz executed, which is 1.5 GHz set: 100 + 100 J x 1.5^2 + 20 J x 1.5 + 5 J.
    work = Activity(2e14, "bf16", (), 2e12, 1e11)
    assert power_at(machine, work, 1.2e9, 0.0, 1.2) == pytest.approx(100 + 225 + 30 + 5)
    one = load_machine("b200").with_facts({**{k: v for k, v in facts.items() if "l2_energy" not in k}})
    assert power_at(one, work, 1.2e9, 0.0, 1.2) == pytest.approx(100 + 225 + 20 * 2.25 + 5)


def test_settled_fp16_matmul_of_the_b200_is_reproduced() -> None:
    """1317 TFLOP/s fp16 at 984 W and 1232 MHz, 88 % busy (EAI); the file's bf16 energy is 0.93 of fp16."""
    b200 = load_machine("b200").with_facts({"power.tensor_pj_per_flop_bf16": 0.446, "chip.tdp_w": 984})
    flop = 2.0 * 8192**3
    clock = settle_clock(b200, gemm(flop), flop / (148 * 8192 * 0.88), 0.0, "sustained")
    assert clock.mhz == pytest.approx(1232, rel=0.03)


def test_light_work_runs_at_the_top_clock_and_power_grows_with_it() -> None:
    b200 = load_machine("b200")
    clock = settle_clock(b200, gemm(1e12), 1e8, 0.0, "sustained")
    assert clock.bound == "boost"
    assert clock.mhz == 1965
    heavy = gemm(1e15)
    watts = [power_at(b200, heavy, 1e9, 0.0, ghz) for ghz in (0.5, 1.0, 1.5, 2.0)]
    assert watts == sorted(watts)
    assert fixed_clock(b200, heavy, 1e9, 0.0, 1234.0).mhz == 1234.0


@settings(max_examples=50, deadline=None)
@given(st.floats(1e12, 1e16), st.floats(1e6, 1e10))
def test_settled_power_never_exceeds_the_limit(flop: float, cycles: float) -> None:
    b200 = load_machine("b200")
    clock = settle_clock(b200, gemm(flop), cycles, 0.0, "sustained")
    assert clock.power_w <= 1000.5 or clock.mhz <= 101


def test_a_loop_of_one_consumer_that_ends_with_its_producer_is_explained() -> None:
    variant = Fa3Variant(warpgroups=1, ping_pong=False, scheduler="persistent")
    p = predict(Workload(32, 32, 32, 512, 512, 64, 64), "h200-sxm", variant, clock=1700.0, interval=False)
    assert p.binding.name in p.text()


@pytest.mark.parametrize(
    ("machine", "keys", "words"), [("h200-sxm", 16384, "instead of the"), ("b200", 4096, "and not the kernel of the")]
)
def test_few_queries_say_what_the_operator_launches_be_it_faster_or_slower(machine: str, keys: int, words: str) -> None:
    """On a B200 only portable kernels serve five queries of eight heads a key head: slower than what Blackwell's own would be."""
    work = Workload(heads_q=16, heads_kv=2, seqlen_q=5, seqlen_k=keys)
    found = predict(work, machine)
    note = next(note for note in found.notes if note.startswith("5 queries a head"))
    assert f"ms by its forecast {words} {found.time_ms:.4g} ms above" in note
    assert (float(note.split("launches one here: ")[1].split()[0]) < found.time_ms) == (machine == "h200-sxm")
