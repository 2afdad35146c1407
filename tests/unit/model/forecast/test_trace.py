"""The Chrome trace of a forecast against the simulation that it draws."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise

import pytest

from tilecast.model.forecast.predict import predict
from tilecast.model.kernel.workload import Workload
from tilecast.model.sm.simulate import drawn


@pytest.mark.parametrize("machine", ["b200", "h200-sxm"])
def test_a_trace_holds_every_operation_at_its_time(machine: str) -> None:
    answer = predict(Workload(seqlen_q=8192), machine, interval=False)
    events = json.loads(answer.trace_json())["traceEvents"]
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 1}
    bars = {
        (lanes[e["tid"]], e["name"], e["args"]["block"]): (e["ts"], e["ts"] + e["dur"])
        for e in events
        if e["ph"] == "X"
    }
    ends = {(e["tid"], e["id"]): e["ts"] for e in events if e["ph"] == "e"}
    for event in events:
        if event["ph"] == "b":
            key = (lanes[event["tid"]], event["name"], event["args"]["block"])
            bars[key] = (event["ts"], ends[event["tid"], event["id"]])
    simulated = drawn(answer.trace).events
    assert len(bars) == len(simulated) > 50
    for event in simulated:
        assert bars[event.role, event.op, event.iteration] == pytest.approx((event.start, event.end))


def test_bars_of_one_role_do_not_overlap() -> None:
    events = json.loads(predict(Workload(seqlen_q=8192), "b200", interval=False).trace_json())["traceEvents"]
    lanes = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            lanes[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in lanes.values():
        spans.sort()
        assert all(end <= begin + 1e-6 for (_, end), (begin, _) in pairwise(spans))


def test_counters_stay_within_the_unit_and_add_up_to_the_work() -> None:
    answer = predict(Workload(seqlen_q=8192), "b200", interval=False)
    samples = defaultdict(list)
    for event in json.loads(answer.trace_json())["traceEvents"]:
        if event["ph"] == "C":
            samples[event["name"]].append((event["ts"], event["args"]["busy %"] / 100))
    work: dict[str, float] = defaultdict(float)
    for event in drawn(answer.trace).events:
        for unit, cycles in answer.pipeline.op(event.op).demand:
            work[unit] += cycles
    assert set(samples) == set(work)
    for unit, levels in samples.items():
        assert levels[-1][1] == 0.0
        assert all(0.0 <= share <= 1.0 for _, share in levels)
        busy = sum((after - at) * share for (at, share), (after, _) in pairwise(levels))
        assert busy == pytest.approx(work[unit], rel=2e-3)  # shares are rounded to a hundredth of a percent
