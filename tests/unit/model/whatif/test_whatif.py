"""What-if: names of facts, the three forecasts, and what must hold whatever the machine."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilecast.cli import main
from tilecast.model.forecast.brief import brief
from tilecast.model.forecast.level import at_hand
from tilecast.model.forecast.predict import predict
from tilecast.model.kernel.variants.fa4 import Fa4Variant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.changes import change_machine, facts_named, is_latency, is_rate, parse_changes
from tilecast.model.machine.machine import MachineError, load_machine
from tilecast.model.search.best import best, search_space
from tilecast.model.sm.timeline import side_by_side
from tilecast.model.whatif.what_if import what_if

WORK = Workload(batch=4, heads_q=16, heads_kv=16, seqlen_q=8192, seqlen_k=8192)
B200 = load_machine("b200")


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("mufu.ex2_per_clk", ("mufu.ex2_per_clk",)),
        ("mufu.ex2", ("mufu.ex2_per_clk",)),
        ("MUFU.EX2", ("mufu.ex2_per_clk",)),
        ("tensor.bf16", ("tensor.bf16_flop_per_clk",)),
        ("smem", ("smem.bytes_per_clk",)),
        ("tmem", ("tmem.read_bytes_per_clk", "tmem.write_bytes_per_clk")),
        ("tmem.load-lat", ("tmem.load_latency_cycles",)),
        ("hbm", ("hbm.tbps_spec", "hbm.tbps_achieved")),
        ("clock", ("chip.clock_max_mhz",)),
        ("tdp", ("chip.tdp_w", "power.short_run_w")),
    ],
)
def test_names_people_use(name: str, facts: tuple[str, ...]) -> None:
    assert facts_named(name, B200) == facts


def test_latency_names_every_time_in_cycles_and_no_rate() -> None:
    found = facts_named("latency", B200)
    assert "tmem.load_latency_cycles" in found and "tma.issue_cycles" in found
    assert all(is_latency(key) and not is_rate(key) for key in found)


@pytest.mark.parametrize(
    ("changes", "scales", "parts"),
    [
        ({"mufu.exp2": 32}, {}, ("unknown fact 'mufu.exp2'", "mufu.ex2_per_clk")),
        ({"ex2_per_clk": 32}, {}, ("unknown fact", "mufu.ex2_per_clk")),
        ({"zzzz": 1}, {}, ("unknown fact 'zzzz'", "sections", "machine show b200")),
        ({"tensor": 1}, {}, ("names", "tensor.bf16_flop_per_clk", "scale them together")),
        ({"power": 1}, {}, ("no rates", "power.idle_w")),
        ({}, {"tensor.mma_latency": 2.0}, ("could be", "tensor.mma_latency_cycles", "name one")),
        ({"mufu.ex2": -3}, {}, ("mufu.ex2_per_clk", "1 to 1024", "-3")),
        ({"mufu.ex2": float("nan")}, {}, ("finite", "nan")),
        ({"mufu.ex2": float("inf")}, {}, ("finite", "inf")),
        ({"mufu.ex2": 1e9}, {}, ("1 to 1024", "1e+09")),
        ({}, {"smem": 0.0}, ("factor above 0", "0")),
        ({}, {"smem": -2.0}, ("factor above 0", "-2")),
        ({"mufu.ex2": 32}, {"mufu": 2}, ("mufu.ex2_per_clk", "twice")),
        ({"chip.sm_count": 150.5}, {}, ("whole", "150.5")),
        ({}, {}, ("nothing to change",)),
    ],
)
def test_wrong_changes_are_one_sentence(
    changes: dict[str, float], scales: dict[str, float], parts: tuple[str, ...]
) -> None:
    with pytest.raises(MachineError) as refused:
        change_machine(B200, changes, scales)
    sentence = str(refused.value)
    assert "\n" not in sentence and "b200" in sentence
    assert not [part for part in parts if part not in sentence], sentence


def test_a_fact_the_machine_does_not_have_is_not_invented() -> None:
    with pytest.raises(MachineError, match=r"a100: the machine has no tmem\.columns"):
        change_machine(load_machine("a100"), {"tmem.columns": 512})


def test_changes_are_marked_and_the_machine_stays() -> None:
    before = dict(B200.facts)
    changed, moved = change_machine(B200, {"mufu.ex2": 32}, {"smem": 1.5})
    assert dict(B200.facts) == before and changed is not B200
    assert [(c.fact, c.before, c.after) for c in moved] == [
        ("mufu.ex2_per_clk", 16, 32),
        ("smem.bytes_per_clk", 128, 192),
    ]
    assert {key for key, fact in changed.facts.items() if fact.kind == "what-if"} == {c.fact for c in moved}
    assert changed.fact("mufu.ex2_per_clk").source == "changed from 16"


def test_command_line_pairs() -> None:
    assert parse_changes("--set", ["mufu.ex2=32", " smem = 1e2"]) == {"mufu.ex2": 32.0, "smem": 100.0}
    for text in ("mufu.ex2", "=3", "mufu.ex2=", "mufu.ex2=many"):
        with pytest.raises(MachineError, match="--set"):
            parse_changes("--set", [text])
    with pytest.raises(MachineError, match="given twice"):
        parse_changes("--set", ["a=1", "a=2"])


def test_a_faster_array_that_starves_burns_no_more_power() -> None:
    """One CTA's operands come through the port: twice the matrix rate alone brings nothing and costs nothing."""
    found = what_if(WORK, B200, scales={"tensor.bf16": 2.0}, variant=Fa4Variant(stats_slots=2), clock=1500.0)
    assert found.kept is not None
    assert found.kept.clock.power_w * found.kept.time_ms == pytest.approx(
        found.before.clock.power_w * found.before.time_ms, rel=0.1
    )


def test_the_kernels_of_a_what_if_are_those_of_the_one_search() -> None:
    answer = what_if(WORK, B200, {"mufu.ex2": 32}, clock="short")
    first, again = best(WORK, B200, "fa4", "short"), best(WORK, answer.changed, "fa4", "short")
    assert (answer.before.variant, answer.after.variant) == (first.variant, again.variant)
    assert answer.before.time_ms == pytest.approx(first.seconds * 1e3, abs=1e-6)
    assert first.variant not in first.near


def test_a_kernel_given_by_hand_that_the_search_does_not_beat_is_kept() -> None:
    # Outside the space: the template writes no tile of 96 keys.
    given = replace(best(WORK, B200, "fa4", 1500.0).variant, tile_n=96)
    assert given not in search_space(WORK, B200, "fa4").variants
    answer = what_if(WORK, B200, {"mufu.ex2": 32}, variant=given, clock=1500.0)
    assert answer.kept is None or answer.after.time_ms <= answer.kept.time_ms


@settings(max_examples=5, deadline=None)
@given(
    st.sampled_from(["mufu.ex2", "smem", "fma", "tensor.bf16", "tmem.read", "latency"]),
    st.floats(0.5, 3.0),
    st.sampled_from(["b200", "b200", "h100-sxm"]),
    st.sampled_from(["none", "causal"]),
)
def test_chosen_again_is_never_slower_than_kept(name: str, factor: float, machine: str, mask: str) -> None:
    if name == "tmem.read" and machine == "h100-sxm":
        name = "alu"
    found = what_if(
        replace(WORK, mask=mask, seqlen_q=4096, seqlen_k=4096), machine, scales={name: factor}, clock=1500.0
    )
    assert found.kept is not None
    assert found.after.time_ms <= found.kept.time_ms * (1 + 1e-12)
    assert found.speedup >= found.speedup_kept
    for answer in (found.before, found.kept, found.after):
        cycles = sum(step.cycles for step in answer.waterfall)
        assert cycles / answer.clock_mhz / 1e3 == pytest.approx(answer.time_ms)


def test_everything_twice_as_fast_takes_half_the_cycles() -> None:
    """All rates doubled, all latencies and per-instruction times halved: the loop runs in half the cycles.

    What stays are counts of instructions that issue one a cycle whatever the machine (2 %).
    """
    rates = {key: 2.0 for key in B200 if is_rate(key)}
    times = {key: 0.5 for key in B200 if is_latency(key)}
    variant = Fa4Variant(cta_group=2, scheduler="persistent", stats_slots=2)
    found = what_if(WORK, B200, scales={**rates, **times}, variant=variant, clock=1500.0)
    assert found.kept is not None
    assert found.kept.ii_cycles == pytest.approx(found.before.ii_cycles / 2, rel=0.02)
    assert found.speedup_kept == pytest.approx(2.0, rel=0.03)


def test_a_unit_that_nobody_uses_changes_nothing() -> None:
    found = what_if(WORK, B200, scales={"tensor.fp4": 2.0, "tensor.fp8": 1.5, "cvt.f32x2_to_fp8x2": 3.0}, clock="short")
    assert found.speedup == 1.0 and found.knob_changes == ()
    assert found.kept is not None and found.kept.trace.events == found.before.trace.events


def test_faster_exponentials_end_their_emulation() -> None:
    found = what_if(replace(WORK, dtype="fp8"), B200, {"mufu.ex2": 32}, clock="short")
    assert found.before.variant.emulated_share > 0 == found.after.variant.emulated_share  # type: ignore[union-attr]
    assert [change.knob for change in found.knob_changes if change.knob == "emulated_share"]
    assert found.speedup > found.speedup_kept > 1


def test_a_kernel_that_no_longer_fits_is_a_result() -> None:
    found = what_if(WORK, B200, {"tmem.columns": 384}, variant=Fa4Variant(stats_slots=2), clock="short")
    assert found.kept is None and found.speedup_kept == 0
    assert "tensor memory" in found.kept_refused and "over by 128" in found.kept_refused
    # The kernel after is the best of the smaller memory: it may beat the one given, not the best of the larger.
    assert found.after.time_ms >= predict(WORK, B200, clock="short", interval=False).time_ms
    assert "not legal any more" in found.text() and found.to_dict()["kept"] is None


def test_before_is_as_good_as_anything_the_second_search_finds() -> None:
    found = what_if(replace(WORK, mask="causal"), "h100-sxm", {"mufu.ex2": 32}, clock="short")
    here = brief(found.workload, found.machine, found.after.variant, "short", at_hand).seconds
    assert here >= found.before.time_ms / 1e3 * (1 - 1e-12)


def test_text_and_json_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["whatif", "--machine", "b200", "--set", "mufu.ex2=32", "--scale", "smem=1.5", "--batch", "4", "--seqlen", "8192",
                 "--dtype", "fp8", "--clock", "short"]  # fmt: skip
    with pytest.raises(SystemExit) as end:
        main([*arguments, "--json"])
    assert not end.value.code
    data = json.loads(capsys.readouterr().out)
    with pytest.raises(SystemExit):
        main(arguments)
    text = capsys.readouterr().out
    assert data["changes"][0] == {"fact": "mufu.ex2_per_clk", "unit": "op/clk/SM", "before": 16.0, "after": 32.0}
    assert data["speedup"] == pytest.approx(data["before"]["time_ms"] / data["after"]["time_ms"])
    for part in ("before", "kept", "after"):
        assert f"{data[part]['time_ms']:.4g}" in text and f"{data[part]['tflops']:.0f}" in text
    assert {"machine changed by what-if" in reason for reason in data["after"]["outside_calibrated_range"]} == {True}
    assert data["before"]["outside_calibrated_range"] == []
    for change in data["knob_changes"]:
        assert change["knob"] in text
    rows = [line for line in text.splitlines() if line.startswith("  time   ")]
    assert f"{data['after']['time_ms'] * 1e3 - data['before']['time_ms'] * 1e3:+.1f}" in rows[-1]


def test_small_launches_keep_their_digits_and_their_columns_apart() -> None:
    """A kernel of microseconds that its tiles' starts bind: 1.12 TFLOP/s is not 1, and no cell runs into the next."""
    small = Workload(heads_q=16, heads_kv=16, seqlen_q=64, seqlen_k=64, head_dim_qk=64, head_dim_v=64, mask="causal")
    found = what_if(small, load_machine("gb10"), {"chip.sm_count": 96}, clock=1000.0)
    lines = {line[:34].strip(): line[34:].split("  ") for line in found.text(80).splitlines()}
    assert [cell.strip() for cell in lines["bound by"] if cell.strip()] == ["tile starts"] * 3
    assert len({cell.strip() for cell in lines["TFLOP/s"] if cell.strip()}) == 1
    assert float(lines["TFLOP/s"][-1]) == pytest.approx(found.after.tflops, rel=5e-3)
    assert "  as fast, the kernel chosen again; +0.0% with the kernel of before" in found.text(80).splitlines()
    assert max(map(len, found.text(80).splitlines())) <= 80


def test_timelines_share_one_scale() -> None:
    slow = predict(WORK, B200, Fa4Variant(), clock="short", interval=False).trace
    fast = predict(WORK, change_machine(B200, {"mufu.ex2": 64})[0], Fa4Variant(), clock="short", interval=False).trace
    lines = side_by_side(slow, fast, ("slow", "fast"), 140)
    lane = next(line for line in lines if line.startswith("softmax0"))
    left, right = (part.strip("|") for part in lane.removeprefix("softmax0").strip().split("|   |"))

    def longest_exp(row: str) -> int:
        return max(len(bar) for bar in row.replace("[", " [").replace("]", "] ").split() if "exp" in bar)

    assert max(map(len, lines)) <= 140
    assert longest_exp(left) > longest_exp(right)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["whatif", "--machine", "b200"], ("nothing to change",)),
        (["whatif", "--machine", "b200", "--set", "mufu.exp2=32"], ("unknown fact 'mufu.exp2'", "mufu.ex2")),
        (["whatif", "--machine", "b200", "--set", "mufu.ex2"], ("--set", "fact=number")),
        (["whatif", "--machine", "b200", "--set", "mufu.ex2=0"], ("1 to 1024", "got 0")),
        (["whatif", "--machine", "b200", "--scale", "smem=-1"], ("factor above 0",)),
        (["whatif", "--machine", "b200", "--set", "mufu.ex2=32", "--clock", "fast"], ("clock", "'fast'")),
        (["whatif", "--machine", "a100", "--set", "mufu.ex2=32", "--dtype", "fp8"], ("a100", "fp8")),
        (["whatif", "--machine", "b200", "--set", "mufu.ex2=32", "--head-dim", "512"], ("tensor memory", "512")),
        (["sensitivity", "--machine", "b200", "--step", "0"], ("step", "1e-06 to 0.5")),
        (["breakeven", "--machine", "b200", "--fact", "chip.tdp_w"], ("neither a rate nor a latency",)),
        (["map", "--machine", "b200", "--grid", "4"], ("odd", "4")),
        (["map", "--machine", "b200", "--span", "1"], ("span", "above 1")),
        (["map", "--machine", "b200", "--axes", "mufu.ex2"], ("--axes", "comma")),
        (["map", "--machine", "b200", "--axes", "mufu.ex2,mufu"], ("both axes",)),
        (["map", "--machine", "b200", "--axes", "chip.tdp_w,mufu"], ("no rate",)),
        (["map", "--machine", "b200", "--show", "b2000"], ("no machine 'b2000'", "rubin")),
        (["map", "--machine", "b200", "-o", "x.gif"], (".svg", "x.gif")),
        (["map", "--machine", "b200", "-o", "/none/x.svg"], ("does not exist",)),
        (["validate", "experiments", "--clock", "fast"], ("--clock", "sustained")),
    ],
    ids=lambda v: " ".join(v[-2:]) if isinstance(v, list) else "",
)
def test_wrong_input_is_one_sentence(
    arguments: list[str], parts: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    out, err = capsys.readouterr()
    assert end.value.code == 2 and out == "" and err.count("\n") == 1
    assert not [part for part in parts if part not in err], err
