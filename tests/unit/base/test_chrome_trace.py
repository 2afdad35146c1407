"""Chrome traces hold what viewers need: lanes with names, bars with times in cycles."""

from __future__ import annotations

import json

from tilecast.base.chrome_trace import Lane, bar, busy_share, lane_name, overlapping_bar, process_name, trace_text

LANE = Lane(1, 2)


def test_a_trace_is_json_with_its_clock() -> None:
    made = json.loads(trace_text([process_name(1, "SM"), lane_name(LANE, "softmax")]))
    assert made["otherData"] == {"clock": "1 us = 1 SM cycle"}
    assert made["traceEvents"] == [
        {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "SM"}},
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": 2, "args": {"name": "softmax"}},
    ]


def test_bars() -> None:
    (plain,) = bar(LANE, "exp", "exp0", 10.0, 14.5, {"block": 3})
    assert plain == {"cat": "exp", "name": "exp0", "pid": 1, "tid": 2, "ph": "X", "ts": 10.0, "dur": 4.5, "args": {"block": 3}}  # fmt: skip
    begin, end = overlapping_bar(LANE, "mma", "qk", 1.0, 9.0, {"block": 3}, "qk.3")
    shared = {"cat": "mma", "name": "qk", "pid": 1, "tid": 2, "id": "qk.3"}
    assert begin == {**shared, "ph": "b", "ts": 1.0, "args": {"block": 3}}
    assert end == {**shared, "ph": "e", "ts": 9.0}


def test_the_busy_share_has_one_sample_a_moment() -> None:
    """Half busy from 0 to 4, all of it from 2 to 4 by a second operation, a quarter from 4 on."""
    samples = busy_share(LANE, "mufu", [(4, -0.5), (0, 0.5), (2, 0.5), (4, -0.5), (4, 0.25), (8, -0.25)])
    assert [(s["ts"], s["args"]["busy %"]) for s in samples] == [(0, 50), (2, 100), (4, 25), (8, 0)]
    assert all(s["ph"] == "C" and (s["pid"], s["tid"]) == LANE for s in samples)
