"""The accuracy that the README claims, computed again from the recorded tables: it cannot get worse unseen.

The limits are what the project promises, with the little that rounding between platforms takes; a better forecast
lowers them.
"""

from __future__ import annotations

import functools

import pytest

from tilecast.validation.measured.levels import COMPILED
from tilecast.validation.measured.run import MeasuredReport, run_measured
from tilecast.validation.published.run import PublishedReport, run_regimes
from tilecast.validation.statistics import summarise


@pytest.fixture(autouse=True)
def asked_for(request: pytest.FixtureRequest) -> None:
    """The tables take minutes: `make accuracy` computes them."""
    if not request.config.getoption("--accuracy"):
        pytest.skip("takes minutes: make accuracy")


@functools.cache
def measured() -> MeasuredReport:
    """All short runs of generated kernels on H200s, forecast from machine code."""
    return run_measured()


@functools.cache
def published() -> dict[str, PublishedReport]:
    return {report.regime: report for report in run_regimes()}


# One worker computes each table once.
@pytest.mark.xdist_group("measured table")
def test_forecasts_from_machine_code_hold_on_the_820_recorded_runs() -> None:
    report = measured()
    assert len(report.rows) == 820 and not report.refused
    error = summarise(row.compiled_error for row in report.rows)
    assert error.mean <= 0.045
    assert error.p90 <= 0.095
    assert error.worst <= 0.20


@pytest.mark.xdist_group("measured table")
@pytest.mark.parametrize("role", ["build", "held-out"])
def test_the_order_of_variants_holds_on_recorded_shapes(role: str) -> None:
    report = measured()
    roles = report.choices[COMPILED]
    assert role in roles, sorted(roles)
    assert roles[role].median_tau >= 0.8
    assert roles[role].median_regret <= 0.02
    assert roles[role].worst_regret <= 0.06


@pytest.mark.xdist_group("published table")
@pytest.mark.parametrize(
    ("regime", "name", "mean", "p90"),
    [
        ("short", "Blackwell, best kernel per shape, 16 bit and fp8, seqlen >= 2048", 0.080, 0.185),
        ("short", "H100 and H200, best of peers per shape", 0.118, 0.215),
        ("sustained", "Blackwell, best kernel per shape, 16 bit and fp8, seqlen >= 2048", 0.118, 0.195),
        ("sustained", "H100 and H200, best of peers per shape", 0.101, 0.161),
    ],
)
def test_the_published_headline_holds(regime: str, name: str, mean: float, p90: float) -> None:
    summary = published()[regime].headline[name]
    assert summary.count >= 100
    assert summary.mean <= mean
    assert summary.p90 <= p90
