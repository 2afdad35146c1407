"""Specifications of sweeps: what they cross to, what makes two items the same, and what is refused."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.paths import ROOT

from tilecast.explore.sweep.errors import SpecError
from tilecast.explore.sweep.spec import items as work_items
from tilecast.explore.sweep.spec.items import (
    canonical,
    content_key,
    forecast_item,
    machine_document,
    machine_from,
    machine_hash,
    run_item,
    source_hash,
)
from tilecast.explore.sweep.spec.spec import Bench, Plan, at_level, load_spec, plan_forecasts, plan_measurements
from tilecast.model.compiled.loops.shelf import loops_digest
from tilecast.model.families import parse_variant
from tilecast.model.forecast.predict import predict
from tilecast.model.kernel.variant import variant_text
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine

B200 = load_machine("b200")
EXAMPLES = ROOT / "explore" / "sweep" / "examples"


def planned(**raw: object) -> Plan:
    return plan_forecasts(load_spec({"machines": ["b200"], "workload": [{}], **raw}))


def values(plan: Plan) -> list[dict]:
    return [json.loads(item.text) for item in plan.items]


def several(*choices: object) -> st.SearchStrategy:
    return st.lists(st.sampled_from(choices), min_size=1, max_size=3, unique=True)


@settings(max_examples=60, deadline=None)
@given(
    table=st.fixed_dictionaries(
        {},
        optional={
            "batch": several(1, 2, 5),
            "heads": several(8, 16, 32),
            "seqlen": several(512, 1000, 4096),
            "seqlen_k": several(512, 8192),
            "head_dim": several(64, 96, 128),
            "dtype": several("bf16", "fp16", "fp8"),
            "mask": several("none", "causal"),
        },
    ),
    machines=several("b200", "h200-sxm", "a100"),
    clocks=several("sustained", "short", 1500, 1200.5),
    seed=st.integers(0, 99),
)
def test_every_combination_is_one_item_whatever_order_the_fields_are_written_in(
    table: dict, machines: list, clocks: list, seed: int
) -> None:
    plan = planned(machines=machines, clocks=clocks, workload=[table])
    expected = len(machines) * len(clocks)
    for listed in table.values():
        expected *= len(listed)
    assert len(plan.items) == len({item.key for item in plan.items}) == expected
    fields = list(table.items())
    random.Random(seed).shuffle(fields)
    again = planned(clocks=clocks, workload=[dict(fields)], machines=machines)
    assert {item.key for item in again.items} == {item.key for item in plan.items}
    for item in values(plan):
        assert item["machine"] in machines and item["clock"] in clocks
        for field, name in {"batch": "batch", "seqlen": "seqlen_q", "mask": "mask", "dtype": "dtype"}.items():
            assert field not in table or item["workload"][name] in table[field]


def test_shapes_presets_windows_and_tokens_become_the_workloads_they_say(tmp_path: Path) -> None:
    (tmp_path / "shapes.csv").write_text("seqlen,heads,head_dim,causal\n2048,8,64,1\n", encoding="utf-8")
    (tmp_path / "spec.toml").write_text(
        'machines = ["b200"]\n'
        '[[workload]]\nshapes = "shapes.csv"\n'
        '[[workload]]\npreset = "llama3-8b"\ntokens = 32768\nseqlen = [1024, 65536]\n'
        '[[workload]]\nheads = 8\nmask = ["none", "window"]\nwindow = "512,0"\n'
        "[[workload]]\nheads = 8\nwindow = 512\n",
        encoding="utf-8",
    )
    found = [Workload.from_dict(v["workload"]) for v in values(plan_forecasts(load_spec(tmp_path / "spec.toml")))]
    assert found == [
        Workload(1, 8, 8, 2048, 2048, 64, 64, "causal"),
        Workload(32, 32, 8, 1024, 1024, 128, 128, "causal"),
        Workload(1, 32, 8, 65536, 65536, 128, 128, "causal"),
        Workload(1, 8, 8, 4096, 4096, 128, 128, "none"),
        Workload(1, 8, 8, 4096, 4096, 128, 128, "window", (512, 0)),
    ]  # the last table says the same as the one before, and the same work is done once


def test_what_if_lists_cross_and_name_themselves(tmp_path: Path) -> None:
    table = {"name": "b200", "set": {"mufu": {"ex2_per_clk": [16, 32]}}, "scale": {"smem.bytes_per_clk": [1, 2.0]}}
    spec = load_spec({"machine": [table, {"name": "b200", "label": "as is"}], "workload": [{}]})
    assert [m.name for m in spec.machines] == [
        "b200 mufu.ex2_per_clk=16 smem.bytes_per_clk*1", "b200 mufu.ex2_per_clk=16 smem.bytes_per_clk*2",
        "b200 mufu.ex2_per_clk=32 smem.bytes_per_clk*1", "b200 mufu.ex2_per_clk=32 smem.bytes_per_clk*2", "as is",
    ]  # fmt: skip
    last = spec.machines[3]
    assert last["mufu.ex2_per_clk"] == 32 and last["smem.bytes_per_clk"] == 2 * B200["smem.bytes_per_clk"]
    assert last.fact("mufu.ex2_per_clk").kind == "what-if"
    boards = load_spec({"machine": [{"name": "b200", "power": [750, 1000]}], "workload": [{}]}).machines
    assert [(m.name, m["chip.tdp_w"]) for m in boards] == [("b200 power=750", 750), ("b200 power=1000", 1000)]
    own = tmp_path / "mine.toml"
    own.write_text('name = "mine"\ninherits = "b200"\n', encoding="utf-8")
    (tmp_path / "spec.toml").write_text('machines = ["mine.toml"]\n[[workload]]\n', encoding="utf-8")
    assert load_spec(tmp_path / "spec.toml").machines[0].name == "mine"


def test_variants_cross_and_all_is_the_space_the_generator_searches() -> None:
    from tilecast.model.search.best import search_space

    plan = planned(
        variants=["best", "published:fa2", "fa4:cta_group=2", "family=fa4,cta_group=2", "all:triton"],
        variant=[{"family": "blackwell_ws", "cta_group": [1, 2], "load_max": False, "emulated_share": [0, 0.25]}],
    )
    found = [value["variant"] for value in values(plan)]
    space = [variant_text(v) for v in search_space(Workload(), B200, "fa2").variants]
    crossed = [
        variant_text(parse_variant(f"family=fa4,cta_group={group},emulated_share={share}"))
        for group in (1, 2) for share in (0, 0.25)
    ]  # fmt: skip
    pair = variant_text(parse_variant("family=fa4,cta_group=2"))
    # The pair with no emulation was there before it was crossed to.
    assert found == ["best:fa4", "published:fa2", pair, *space, *(text for text in crossed if text != pair)]


def test_a_rule_that_finds_nothing_is_left_out_with_its_reason() -> None:
    plan = planned(machines=["h200-sxm"], variants=["best", "all:blackwell_ws"])
    assert len(plan.items) == 1
    assert "h200-sxm" in plan.left_out[0] and "tcgen05" in plan.left_out[0]


def test_the_key_is_that_of_the_content() -> None:
    work = Workload(seqlen_q=1024, seqlen_k=1024)
    item = forecast_item(work, B200, "best:fa4", "short", True)
    text = canonical(item)
    assert canonical(dict(reversed(item.items()))) == text
    assert json.loads(text) == item
    others = [
        forecast_item(replace(work, batch=2), B200, "best:fa4", "short", True),
        forecast_item(work, B200, "published:fa4", "short", True),
        forecast_item(work, B200, "best:fa4", "sustained", True),
        forecast_item(work, B200, "best:fa4", 1500, True),
        forecast_item(work, B200, "best:fa4", "short", False),
        forecast_item(work, B200.with_facts({"mufu.ex2_per_clk": 17}), "best:fa4", "short", True),
        forecast_item(work, load_machine("gb200"), "best:fa4", "short", True),
    ]
    keys = [content_key(canonical(value), "forecast") for value in (item, *others)]
    assert len(set(keys)) == len(keys)
    # An unchanged value that is now called a what-if shows in the result, so it is another item.
    same = B200.with_facts({"mufu.ex2_per_clk": B200["mufu.ex2_per_clk"]})
    assert machine_hash(same) != machine_hash(B200)


def test_the_key_is_that_of_the_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert source_hash("forecast") != source_hash("measure")
    before = content_key("{}", "forecast")
    root = tmp_path / "explore" / "sweep" / "spec"
    root.mkdir(parents=True)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "a.py").write_text("x = 1\n", encoding="utf-8")
    monkeypatch.setattr(work_items, "__file__", str(root / "items.py"))

    def now() -> str:
        source_hash.cache_clear()
        return content_key("{}", "forecast")

    try:
        first = now()
        assert first not in (before, "") and now() == first
        (tmp_path / "model" / "a.py").write_text("x = 2\n", encoding="utf-8")
        second = now()
        (tmp_path / "model" / "notes.md").write_text("not a source\n", encoding="utf-8")
        assert second != first and now() == second
    finally:
        monkeypatch.undo()
        source_hash.cache_clear()
    assert content_key("{}", "forecast") == before


def test_a_machine_travels_whole_and_is_known_by_what_forecasts_read() -> None:
    machine = replace(B200.with_facts({"fma.lanes": 96}), name="other")
    document = json.loads(json.dumps(machine_document(machine)))
    assert machine_from(document) == machine
    document["facts"]["fma.lanes"]["source"] = "somebody said so"
    assert machine_hash(machine_from(document)) == machine_hash(machine)
    document["facts"]["fma.lanes"]["high"] = 128.0
    assert machine_hash(machine_from(document)) != machine_hash(machine)


def test_an_item_gives_what_predict_gives_and_refusals_are_results() -> None:
    work = Workload(batch=2, seqlen_q=2048, seqlen_k=2048, mask="causal")
    known = {"b200": B200}
    text = canonical(forecast_item(work, B200, "best:fa4", "short", True))
    result, answer = run_item(text, known), predict(work, B200, clock="short")
    assert result["status"] == "ok"
    assert (result["time_ms"], result["tflops_low"]) == (answer.time_ms, answer.tflops_interval[0])
    assert result["variant"] == variant_text(answer.variant)
    assert json.loads(json.dumps(result)) == run_item(text, known)
    wrong = run_item(canonical(forecast_item(work, B200, "family=fa3,tile_n=64", "short", True)), known)
    assert wrong["status"] == "infeasible" and "fa3" in wrong["reason"]
    changed = run_item(text, {"b200": B200.with_facts({"fma.lanes": 96})})
    assert changed["status"] == "failed" and "changed" in changed["reason"]


def test_measured_items_are_those_the_family_can_write() -> None:
    spec = load_spec(EXAMPLES / "gpus.toml")
    plan = plan_measurements(spec, "h200-sxm", load_machine("h200-sxm"), Bench("NVIDIA H200", "2.11.0", "3.6.0"))
    assert len(plan.items) == 12 and not plan.left_out
    assert {v["kernel"] for v in values(plan)} == {"hopper_ws", "triton"}
    other = plan_measurements(spec, "h200-sxm", load_machine("h200-sxm"), Bench("NVIDIA H200", "2.11.0", "3.9.0"))
    assert not {item.key for item in plan.items} & {item.key for item in other.items}
    spec = load_spec(
        {"do": "measure", "kernels": ["cudnn"], "workload": [{}], "variants": ["best:triton", "blackwell_ws"]}
    )
    plan = plan_measurements(spec, "h200-sxm", load_machine("h200-sxm"), Bench("NVIDIA H200", "2.11.0", "3.6.0"))
    assert [v["kernel"] for v in values(plan)] == ["cudnn", "triton"] and len(plan.left_out) == 1


@pytest.mark.parametrize(
    ("raw", "parts"),
    [
        ({"machines": ["b2000"]}, ("machines", "unknown machine 'b2000'", "b200")),
        ({"machines": "b200"}, ("machines takes a list", "'b200'")),
        ({"machines": []}, ("expected machines",)),
        ({"machine": [{"name": "b200", "set": {"mufu.ex2": 32}}]}, ("machine 1", "mufu.ex2", "mufu.ex2_per_clk")),
        ({"machine": [{"name": "b200", "set": {"mufu.ex2_per_clk": 1e9}}]}, ("machine 1", "1 to 1024", "1e+09")),
        ({"machine": [{"name": "b200", "scale": {"mufu.ex2": 2}}]}, ("machine 1", "mufu.ex2", "mufu.ex2_per_clk")),
        ({"machine": [{"name": "b200", "set": {"mufu.ex2_per_clk": "x"}}]}, ("set", "takes a number", "'x'")),
        ({"machine": [{"name": "b200", "sett": {}}]}, ("machine 1", "unknown field 'sett'", "set")),
        ({"machine": [{"label": "x"}]}, ("machine 1", "name is missing")),
        ({"machine": [{"name": "b200", "power": [750, 100]}]}, ("machine 1: power", "more than the 245 W", "got 100")),
        ({"machine": [{"name": "b200", "power": "750"}]}, ("machine 1", "'power' takes a number", "'750'")),
        ({"machine": [{"name": "gb200", "label": "b200"}]}, ("two different machines are called 'b200'",)),
        ({"workload": []}, ("at least one [[workload]]",)),
        ({"workload": [{"seqln": 4096}]}, ("workload 1", "unknown field 'seqln'", "seqlen")),
        ({"workload": [{"causal": True}]}, ("workload 1", "unknown field 'causal'", 'mask = "causal"')),
        ({"workload": [{}, {"seqlen": "4096"}]}, ("workload 2", "seqlen takes whole numbers", "'4096'")),
        ({"workload": [{"seqlen": []}]}, ("seqlen", "empty list")),
        ({"workload": [{"mask": "casual"}]}, ("mask takes none, causal, window", "'casual'", "causal")),
        ({"workload": [{"mask": "window"}]}, ("'window'", "go together")),
        ({"workload": [{"heads": 16, "heads_kv": 3}]}, ("workload 1", "16 query heads", "3 key/value")),
        ({"workload": [{"preset": "llama3-8"}]}, ("unknown preset 'llama3-8'", "llama3-8b")),
        ({"workload": [{"tokens": 4096, "batch": 1}]}, ("tokens", "drop batch")),
        ({"workload": [{"shapes": "none.csv"}]}, ("workload 1", "none.csv", "cannot read")),
        ({"workload": [{"shapes": "a.csv", "batch": 2}]}, ("shapes takes one CSV file",)),
        ({"workload": [{"seqlen": list(range(512, 2512)), "batch": list(range(1, 1002))}]}, ("2002000", "1000000")),
        ({"variants": ["bst"]}, ("variants: 'bst'", "unknown family 'bst'", "best")),
        ({"variants": ["best:fa5"]}, ("unknown family 'fa5'", "fa4")),
        ({"variants": ["fa4:tile=3"]}, ("variants: 'fa4:tile=3'", "no knob 'tile'", "tile_m")),
        ({"variants": ["cta_group=2"]}, ("expected a family first",)),
        ({"variant": [{"family": "fa4", "cta_group": [1, 3]}]}, ("variant 1", "'cta_group' takes one of 1, 2", "'3'")),
        ({"variant": [{"cta_group": 1}]}, ("variant 1", "expected a family")),
        ({"clocks": ["shrt"]}, ("clocks takes sustained, short", "'shrt'", "did you mean short")),
        ({"clocks": [10]}, ("50 to 5000 MHz", "10")),
        ({"interval": 1}, ("interval takes true or false", "1")),
        ({"do": "guess"}, ("do takes forecast or measure", "'guess'")),
        ({"rounds": 9}, ("unknown field 'rounds'",)),
        ({"do": "measure", "rounds": 1}, ("rounds takes a whole number from 3", "1")),
        ({"do": "measure", "kernels": ["cuddn"]}, ("unknown kernel 'cuddn'", "cudnn")),
        ({"do": "measure", "machines": ["b200", "a100"]}, ("at most one machine",)),
        ({"title": 3}, ("title takes text", "3")),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else "",
)
def test_a_wrong_specification_is_refused_in_one_sentence(raw: dict, parts: tuple[str, ...]) -> None:
    base = {"workload": [{}], **({"machines": ["b200"]} if "do" not in raw else {})}
    with pytest.raises(SpecError) as caught:
        planned_or_loaded({**base, **raw})
    sentence = str(caught.value)
    assert sentence.startswith("specification: ") and "\n" not in sentence
    for part in parts:
        assert part in sentence


def planned_or_loaded(raw: dict) -> None:
    spec = load_spec(raw)
    if spec.do == "forecast":
        plan_forecasts(spec)


def test_a_file_that_is_no_specification_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"none.toml: cannot read the specification: No such file"):
        load_spec(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("machines = [", encoding="utf-8")
    with pytest.raises(SpecError, match=r"bad.toml: not valid TOML"):
        load_spec(tmp_path / "bad.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(SpecError, match=r"bytes.toml: not valid TOML"):
        load_spec(tmp_path / "bytes.toml")


@pytest.mark.parametrize("name", ["attention.toml"])
def test_the_shipped_examples_are_valid(name: str) -> None:
    assert len(plan_forecasts(load_spec(EXAMPLES / name)).items) == 352


def test_the_level_is_part_of_what_is_asked() -> None:
    raw = {"machines": ["h200-sxm"], "level": "kept", "workload": [{"seqlen": 2048}]}
    spec = load_spec(raw)
    assert spec.level == "kept" and load_spec({**raw, "level": "fluid"}).level == "fluid"
    item = json.loads(plan_forecasts(spec).items[0].text)
    assert item["level"] == "kept" and item["loops"] == loops_digest()
    plain = json.loads(plan_forecasts(at_level(spec, "fluid")).items[0].text)
    assert "level" not in plain and "loops" not in plain
    assert at_level(spec, None) is spec
    known = {"h200-sxm": load_machine("h200-sxm")}
    assert run_item(canonical(item), known)["level"] == "from machine code"
    assert run_item(canonical(plain), known)["level"] == "before compilation"
    b200 = json.loads(plan_forecasts(load_spec({**raw, "machines": ["b200"]})).items[0].text)
    refused = run_item(canonical(b200), {"b200": B200})
    assert refused["status"] == "infeasible" and "is at hand: use --level auto or fluid" in refused["reason"]
    with pytest.raises(SpecError, match="level takes auto, fluid or kept, got 'code'"):
        load_spec({**raw, "level": "code"})
    measuring = load_spec({"do": "measure", "workload": [{"seqlen": 2048}]})
    with pytest.raises(SpecError, match='level goes with do = "forecast", this one has do = "measure"'):
        at_level(measuring, "kept")
