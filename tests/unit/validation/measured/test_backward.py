"""Backward passes against measurements and publications: what is compared, at which clock, and how far off it is."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from support import json_keys
from support.whole import whole

from tilecast.model.machine.machine import load_machine
from tilecast.validation.measured.backward import H100_PASSES, LOOPS, PASSES, BackwardTableError, run_backward
from tilecast.validation.measured.backward_text import as_dict, as_text
from tilecast.validation.published import backward as published
from tilecast.validation.published.backward import by_machine, run_published_backward


def thinned(path: Path, folder: Path, every: int, first: int = 0) -> Path:
    """A table with every so many rows of another, from ``first`` on."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    out = folder / path.name
    with out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows[first::every])
    return out


@pytest.mark.parametrize(
    ("passes", "loops"), [(0, 0), pytest.param(7, 9, marks=whole), pytest.param(14, 5, marks=whole)]
)
def test_measured_passes_and_loops_are_near_their_forecasts(passes: int, loops: int, tmp_path: Path) -> None:
    report = run_backward(thinned(PASSES, tmp_path, 22, passes), thinned(LOOPS, tmp_path, 18, loops))
    assert report.of("pass").count > 12 and report.of("pass").mean < 0.08
    assert report.of("loop").count >= 5 and report.of("loop").mean < 0.16
    share = load_machine("h200").fact("power.tensor_clock_share").value
    assert all(row.clock_mhz <= 1980 * share + 1e-6 for row in report.rows)
    # Spills are counted, not compared.
    assert dict(report.left_out)["loops that spill"] > 0
    text = as_text(report, {}, rows=True)
    assert "Kendall's tau" in text and "fa3_bwd" in text


def test_published_shapes_by_their_fastest_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fastest = published.fastest_published()
    assert len(fastest) == 152
    assert all(
        min(row.workload.seqlen_q, row.workload.seqlen_k) >= 2048 and not row.kernel.endswith("-det") for row in fastest
    )
    few = tuple(sorted(fastest, key=str)[::9])
    monkeypatch.setattr(published, "fastest_published", lambda: few)
    rows = run_published_backward("short")
    found = by_machine(rows)
    assert found["Hopper"].mean < 0.16 and found["Blackwell"].mean < 0.18
    report = run_backward(thinned(PASSES, tmp_path, 60), thinned(LOOPS, tmp_path, 60))
    printed = json_keys.paths(as_dict(report, {"short": rows}))
    assert json_keys.differences(json_keys.sections()["validate backward"].keys, printed) == []


def test_passes_on_an_h100_are_as_far_off_as_the_page_says(tmp_path: Path) -> None:
    report = run_backward(H100_PASSES, thinned(LOOPS, tmp_path, 1000), "h100-sxm")
    found = {}
    assert dict(report.left_out)["passes whose products ran ahead"] == 6
    for family in ("fa3_bwd", "fa2_bwd"):
        errors = [100 * row.error for row in report.rows if row.kind == "pass" and row.name == family]
        found[family] = round(sum(map(abs, errors)) / len(errors), 1), round(abs(sum(errors) / len(errors)), 1)
    assert found == {"fa3_bwd": (3.8, 0.4), "fa2_bwd": (5.3, 3.6)}


def test_a_table_of_something_else_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.csv"
    other.write_text("a,b\n1,2\n", encoding="utf-8")
    with pytest.raises(BackwardTableError, match="not a table of backward passes: no column head_dim"):
        run_backward(other)
