"""The clock of a published row by how long its harness keeps launching."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tilecast.model.machine.machine import load_machine
from tilecast.validation.published.harness import RUN, clock_of, harness_of
from tilecast.validation.published.points import load_points
from tilecast.validation.published.run import default_predictor

H200, A100 = load_machine("h200-sxm"), load_machine("a100")
POINTS, _ = load_points()
TIMEIT = "benchmark/benchmark_results.csv@7606332572"


@pytest.mark.parametrize(
    ("source", "launch_ms", "clock"),
    [
        (TIMEIT, 2.5, "short"),  # 32 launches fit into the time that the limiter takes to react
        (TIMEIT, 13.5, "432ms"),
        ("benchmark/attention_training/results/wan22/h200/wan22.csv@d6d35d69", 13.5, "short"),
        ("benchmark/attention_training/results/wan22/h200/wan22.csv@d6d35d69", 173.4, "173ms"),
        ("meta-pytorch/tritonbench PR: #1254 (2026-09-03)", 0.7, "125ms"),
        ("somebody's blog", 40.0, "short"),
        ("somebody's blog", 400.0, "400ms"),  # one launch at least
    ],
)
def test_launches_that_go_on_beyond_the_limiters_reaction_have_the_clock_of_that_time(
    source: str, launch_ms: float, clock: str
) -> None:
    assert clock_of(source, H200, launch_ms * 1e-3) == clock
    # Where nothing is known of the limiter there is no clock between the two.
    assert clock_of(source, A100, launch_ms * 1e-3) == "short"


def test_a_row_of_long_launches_lies_between_its_short_and_its_settled_forecast() -> None:
    bf16 = [
        p
        for p in POINTS
        if TIMEIT in p.source and p.machine == "h200-sxm" and p.kernel == "cudnn" and p.dtype_class == "16 bit"
    ]
    row = max(bf16, key=lambda p: p.flop / p.tflops)
    short, run, settled = (default_predictor(row, regime).clock_mhz for regime in ("short", RUN, "sustained"))
    assert settled < run < short and run - settled < 0.1 * (short - settled)
    brief = min(bf16, key=lambda p: p.flop / p.tflops)
    assert default_predictor(brief, RUN) == default_predictor(brief, "short")
    unknown = replace(row, source="nobody says")
    assert default_predictor(unknown, RUN) == default_predictor(unknown, "short")


def test_every_harness_stands_behind_rows_of_the_table() -> None:
    found = {harness_of(p.source) for p in POINTS}
    assert len(found - {None}) == 3
