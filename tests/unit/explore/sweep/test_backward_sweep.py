"""Sweeps of backward passes: what a specification crosses to, what its items give, what is refused."""

from __future__ import annotations

import json

import pytest

from tilecast.explore.sweep.api import sweep
from tilecast.explore.sweep.errors import SpecError
from tilecast.explore.sweep.spec.items import run_item
from tilecast.explore.sweep.spec.spec import load_spec, plan_forecasts
from tilecast.model.backward import BACKWARD_FAMILIES, HOPPER_BACKWARD, parse_backward
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine
from tilecast.model.training.forecast import predict_backward

H200 = load_machine("h200")
WORK = {"seqlen": 1024, "heads": 8, "head_dim": 256}


def planned(**raw: object) -> list[dict]:  # type: ignore[type-arg]
    spec = load_spec({"machines": ["h200"], "workload": [WORK], "pass": "bwd", **raw})
    return [json.loads(item.text) for item in plan_forecasts(spec).items]


def test_an_item_is_the_forecast_of_the_whole_pass() -> None:
    (item,) = planned(clocks=[1500])
    assert item["pass"] == "bwd" and item["variant"] == "best:fa3_bwd_apart" and "level" not in item
    found = run_item(json.dumps(item), {"h200-sxm": H200})
    p = predict_backward(Workload(1, 8, 8, 1024, head_dim_qk=256), H200, clock=1500.0)
    assert (found["status"], found["time_ms"], found["tflops"]) == ("ok", p.time_ms, p.tflops)
    assert found["hbm_bytes"] == p.run.hbm_bytes and found["ii_cycles"] == p.main.trace.ii_cycles
    assert found["pipeline"] == "; ".join(kernel.pipeline.name for kernel in p.kernels)


def test_rules_and_knobs_are_those_of_backward_classes() -> None:
    work = {"seqlen": 1024, "heads": 8}
    listed = planned(workload=[work], variants=["all:hopper_bwd"])
    space = set(HOPPER_BACKWARD.space(Workload(1, 8, 8, 1024), H200))
    assert {parse_backward(i["variant"], HOPPER_BACKWARD.variant()) for i in listed} == space
    crossed = planned(workload=[work], variant=[{"family": "fa3_bwd", "adders": [1, 2], "dq_slots": [1, 2]}])
    assert len(crossed) == 4 and all(i["variant"].startswith("family=fa3_bwd,") for i in crossed)


def test_a_table_names_the_pass_and_keeps_refusals() -> None:
    table = sweep({"machines": ["h200", "a100"], "workload": [WORK], "pass": "bwd", "variants": ["best:fa3_bwd_apart"]}, store=None, engine="local", workers=1)  # fmt: skip
    assert [row["pass"] for row in table] == ["bwd", "bwd"]
    assert [row["status"] for row in table] == ["ok", "infeasible"] and "wgmma" in table[1]["reason"]


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"pass": "both"}, "pass takes fwd or bwd, got 'both'"),
        ({"variants": ["published"]}, "of pass 'bwd' there is no published: expected best, all or a variant"),
        ({"variants": ["fa5"]}, "unknown family 'fa5'"),
        ({"variants": ["fa3_bwd:dq_slot=1"]}, "no knob 'dq_slot'"),
        ({"level": "kept"}, "backward passes are forecast before compilation"),
        ({"do": "measure"}, "measuring times forward kernels: tools/sweep_backward.py"),
    ],
)
def test_refusals_are_one_sentence(raw: dict[str, object], words: str) -> None:
    with pytest.raises(SpecError, match=words.replace("(", "\\(")) as error:
        planned(**raw)
    assert "\n" not in str(error.value)


def test_every_class_has_a_family_name() -> None:
    for family in BACKWARD_FAMILIES:
        assert load_spec({"machines": ["h200"], "workload": [{}], "pass": "bwd", "variants": [f"best:{family.template}"]}).choices[0].family == family.name  # fmt: skip
