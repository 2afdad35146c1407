"""The comparison with published rows, driven by predictors whose errors are known beforehand."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tilecast.model.chip.evaluate import PredictError
from tilecast.validation.published.points import PublishedPoint, load_points
from tilecast.validation.published.run import (
    EXAMPLES,
    PublishedReport,
    default_predictor,
    headline_points,
    length_bucket,
    run_published,
    share_within,
)
from tilecast.validation.published.text import report_dict, report_text, write_scatter


@dataclass(frozen=True)
class FakePipeline:
    name: str = "fake"


@dataclass(frozen=True)
class FakeAnswer:
    time_ms: float
    clock_mhz: float = 1000.0
    pipeline: FakePipeline = FakePipeline()


def oracle(point: PublishedPoint, regime: str, factor: float = 1.0) -> FakeAnswer:
    """The measured time, or ``factor`` times the measured throughput."""
    return FakeAnswer(point.flop / (point.tflops * factor) / 1e9)


@cache
def perfect() -> PublishedReport:
    return run_published("sustained", oracle)


@cache
def ten_percent_high() -> PublishedReport:
    return run_published("sustained", lambda p, r: oracle(p, r, 1.1))


def test_a_perfect_predictor_has_no_error_anywhere() -> None:
    report = perfect()
    assert max(abs(row.error) for row in report.rows) < 1e-12
    summaries = [*report.headline.values(), *(s for group in report.groups.values() for s in group.values())]
    assert all(s.worst < 1e-12 and abs(s.bias) < 1e-12 for s in summaries)


def test_a_predictor_ten_percent_high_has_ten_percent_bias_everywhere() -> None:
    report = ten_percent_high()
    for group in (report.headline, *report.groups.values()):
        for s in group.values():
            if s.count:
                values = (s.mean, s.median, s.p90, s.worst, s.bias)
                assert values == pytest.approx((0.1,) * 5, abs=1e-9)


def test_the_sign_of_the_error_is_that_of_the_throughput() -> None:
    report = run_published("sustained", lambda p, r: oracle(p, r, 0.8))
    assert all(row.error == pytest.approx(-0.2) for row in report.rows)


def test_every_forward_row_is_predicted_or_accounted_for() -> None:
    report = perfect()
    assert len(report.rows) + len(report.refused) + len(report.excluded) == 1199
    assert (len(report.rows), len(report.refused), len(report.excluded)) == (1159, 0, 40)


def test_every_group_partitions_the_rows() -> None:
    report = perfect()
    assert set(report.groups) == {"GPU", "kernel", "dtype", "mask", "head_dim", "seqlen"}
    for group in report.groups.values():
        assert sum(s.count for s in group.values()) == len(report.rows)


def test_rows_per_group() -> None:
    groups = perfect().groups
    count = {title: {name.strip(): s.count for name, s in group.items()} for title, group in groups.items()}
    assert count["GPU"]["gb200"] == 235
    assert count["mask"] == {"causal": 543, "none": 616}
    assert count["dtype"] == {"bf16": 622, "fp16": 124, "fp16/bf16": 12, "fp8": 301, "mxfp8": 100}
    assert count["head_dim"] == {"64/64": 145, "128/128": 734, "192/128": 201, "256/256": 79}


def test_headline_sets_add_up() -> None:
    count = {name.strip(): s.count for name, s in perfect().headline.items()}
    whole = count["Blackwell, best kernel per shape, 16 bit and fp8, seqlen >= 2048"]
    assert whole == count["gb200"] + count["gb300"] + count["b200"] == count["16 bit"] + count["fp8"]
    assert count["H100 and H200, best of peers per shape"] == count["h100-sxm"] + count["h200-sxm"]
    assert min(count.values()) > 0


def test_headline_points_are_long_fast_and_one_per_shape() -> None:
    points, _ = load_points()
    chosen = headline_points(points, ("gb200", "gb300", "b200"), ("16 bit", "fp8"))
    assert len({p.shape for p in chosen}) == len(chosen)
    for p in chosen:
        rivals = [q.tflops for q in points if q.shape == p.shape and q.kernel not in EXAMPLES]
        assert p.tflops == max(rivals)
        assert p.workload.seqlen_q >= 2048


def test_speed_ups_of_a_perfect_predictor_are_the_measured_ones() -> None:
    report = perfect()
    assert len(report.speed_ups) > 50
    assert all(s.predicted == pytest.approx(s.measured, rel=1e-12) for s in report.speed_ups)
    assert share_within(report.speed_ups, 0.001) == 1.0
    # A common factor cancels.
    assert share_within(ten_percent_high().speed_ups, 0.001) == 1.0


def test_a_machine_specific_error_shows_in_the_speed_ups() -> None:
    report = run_published("sustained", lambda p, r: oracle(p, r, 1.2 if p.machine == "gb300" else 1.0))
    assert all(s.predicted == pytest.approx(1.2 * s.measured) for s in report.speed_ups)
    assert share_within(report.speed_ups, 6.0) == 0.0
    assert share_within((), 6.0) == 0.0


def test_a_refusal_is_a_row_with_its_sentence() -> None:
    def refuses_fp8(point: PublishedPoint, regime: str) -> FakeAnswer:
        if point.workload.dtype == "fp8":
            raise PredictError("no fp8 today")
        return oracle(point, regime)

    report = run_published("sustained", refuses_fp8)
    assert (len(report.refused), len(report.rows)) == (401, 758)
    assert {row.refused for row in report.refused} == {"no fp8 today"}
    assert "401  no fp8 today" in report_text(report)
    assert len(report_dict(report)["refused"]) == 401


def test_the_predictor_hears_the_regime() -> None:
    heard: set[str] = set()

    def listens(point: PublishedPoint, regime: str) -> FakeAnswer:
        heard.add(regime)
        return oracle(point, regime)

    assert run_published("short", listens).regime == "short"
    assert heard == {"short"}


def test_predicted_throughput_uses_the_convention_of_the_row() -> None:
    report = run_published("sustained", lambda p, r: FakeAnswer(1.0))
    for row in report.rows:
        assert row.tflops == pytest.approx(row.point.flop / 1e9)
    causal = [r for r in report.rows if r.point.workload.mask == "causal"]
    for row in causal:
        length = row.point.workload.seqlen_q
        ratio = row.point.flop / row.point.workload.flops
        assert ratio == pytest.approx(1 + 1 / length if row.point.convention == "exact" else 1.0, rel=1e-12)


def test_rank_correlation_of_a_perfect_predictor() -> None:
    # Rows with equal measured throughput are ties and count neither way.
    assert perfect().tau > 0.999


def test_length_buckets_do_not_overlap() -> None:
    assert [length_bucket(n).strip() for n in (512, 1024, 1025, 4096, 75600)] == [
        "1024 or less", "1024 or less", "4096 or less", "4096 or less", "above 65536",
    ]  # fmt: skip


def test_cycle_rows_are_independent_of_the_predictor() -> None:
    cycles = perfect().cycles
    assert [c.point.cycles for c in cycles] == [1168, 1174, 1025, 928, 1487, 2165]
    for c in cycles:
        assert math.isfinite(c.error) and c.cycles > 0
        assert set(c.share_differences) == set(c.point.shares)


def test_text_has_every_group_and_the_reasons() -> None:
    text = report_text(perfect())
    for piece in ("Headline, sustained clock", "All rows by GPU", "All rows by seqlen", "Not predicted: 40 rows",
                  "12  no machine file for 'H800'", "GB300 over GB200", "In cycles"):  # fmt: skip
        assert piece in text
    assert len(report_text(perfect(), with_rows=True).splitlines()) > 1159 + len(text.splitlines())
    assert "Headline, short clock" in report_text(perfect(), False, run_published("short", oracle))


def test_dictionary_survives_json() -> None:
    data = json.loads(json.dumps(report_dict(perfect())))
    assert len(data["rows"]) == 1159
    assert sum(data["excluded"].values()) == 40
    assert data["speed_up_gb300_over_gb200"]["share_within_6_points"] == 1.0
    assert {"machine", "measured", "predicted", "error"} <= set(data["cycles"][0])


@pytest.mark.parametrize(("ending", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_scatter_is_a_picture(tmp_path: Path, ending: str, magic: bytes) -> None:
    pytest.importorskip("matplotlib")
    target = tmp_path / f"scatter.{ending}"
    write_scatter(perfect(), target)
    assert target.read_bytes().startswith(magic)


def test_scatter_names_its_axes_and_machines(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    target = tmp_path / "scatter.svg"
    write_scatter(perfect(), target)
    text = target.read_text(encoding="utf-8")
    # Matplotlib keeps each text as a comment beside its outlines.
    for piece in ("measured TFLOP/s", "predicted TFLOP/s", "gb300 (293)", "h100-sxm (211)"):
        assert piece in text


def test_flash_attention_2s_own_kernels_multiply_by_mma_sync_on_hopper() -> None:
    points = load_points()[0]

    def ran_on(family: str) -> str:
        mine = next(p for p in points if p.machine == "h100-sxm" and p.family == family)
        return str(default_predictor(mine, "short", code=False).pipeline.machine)

    assert (ran_on("fa2"), ran_on("fa3")) == ("h100-sxm, mma.sync", "h100-sxm")
