"""`validate ablations` from the command line, on a small table."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support import json_keys

from tilecast.base.data import MEASURED
from tilecast.cli import main
from tilecast.validation.ablations import run as running
from tilecast.validation.ablations.published import forecast_cases, load
from tilecast.validation.ablations.run import measured_again, run_ablations
from tilecast.validation.ablations.text import report_dict, report_text
from tilecast.validation.lab.measure.records import Measured, append, read


def rows() -> list[Measured]:
    """A kernel and its neighbours by one knob, at one short shape."""
    points = [
        r for r in read(MEASURED / "h200_points.csv") if r.seqlen_q == r.seqlen_k == 512 and r.kernel == "hopper_ws"
    ]
    return [r for r in points if (r.head_dim_qk, r.head_dim_v, r.mask) == (64, 64, "causal")][:5]


def run(*arguments: str) -> None:
    with pytest.raises(SystemExit) as end:
        main(["validate", "ablations", *arguments])
    assert end.value.code == 0


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "points.csv"
    append(path, rows())
    return path


def test_pairs_of_a_users_table_are_reported(table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "pairs.svg"
    run(str(table), "--json", "--picture", str(picture))
    report = json.loads(capsys.readouterr().out)
    assert picture.read_text().lstrip().startswith("<?xml")
    found = report["measured"]["pairs"]
    assert found and report["published"]["cases"] == []
    cycles = {row.variant: row.cycles for row in rows()}
    for pair in found:
        before, after = (dict(x.split("=") for x in pair[f"variant_{side}"].split(",")) for side in ("from", "to"))
        assert {k for k in before if before[k] != after[k]} == {pair["knob"]}
        assert pair["measured"] == pytest.approx(cycles[pair["variant_from"]] / cycles[pair["variant_to"]])
    for level, scores in report["measured"]["scores"].items():
        everything = scores.pop("all")
        assert everything["effects"] == len(found) == sum(one["effects"] for one in scores.values())
        clear = [p for p in found if abs(p["measured"] - 1) > 0.03]
        right = [p for p in clear if (p["measured"] > 1) == (p["forecast"][level] > 1)]
        assert (everything["clear"], everything["signs_right"]) == (len(clear), len(right))


def test_the_text_names_pairs_and_their_kernel(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(str(table), "--rows")
    out = capsys.readouterr().out
    assert out.startswith("Measured pairs: ") and "NVIDIA H200; points.csv" in out
    assert "Every pair, largest effects first" in out and ", of family=fa3" in out


def test_rows_with_unknown_variants_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "points.csv"
    first, *others = rows()
    append(path, [first, *others, replace(first, variant=first.variant.replace("tile_n=64", "tile_n=7"))])
    run(str(path))
    assert "1 rows without a forecast, for example: --variant: knob 'tile_n'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({}, "no two short runs of generated kernels at one shape differ in exactly one knob"),
        ({"cycles": 0.0}, "expected a number above 0, got 0"),
        ({"cycles": float("nan")}, "expected a number above 0, got nan"),
        ({"mode": "sustained"}, "no two short runs"),
    ],
)
def test_tables_without_pairs_are_refused(
    changed: dict[str, object], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "points.csv"
    append(path, [replace(rows()[0], **changed)])  # type: ignore[arg-type]
    with pytest.raises(SystemExit) as end:
        main(["validate", "ablations", str(path)])
    out, err = capsys.readouterr()
    assert end.value.code == 2 and not out
    assert told in err and err.count("\n") == 1


def test_the_keys_are_documented(table: Path) -> None:
    lines, excluded = load()
    report = replace(run_ablations(table), cases=forecast_cases(lines[:4]), excluded=tuple(excluded))
    printed = json.loads(json.dumps(report_dict(report)))
    assert json_keys.differences(json_keys.sections()["validate ablations"].keys, json_keys.paths(printed)) == []


def test_published_cases_are_printed_with_their_lines_and_what_is_left_out(table: Path) -> None:
    lines, excluded = load()
    report = replace(run_ablations(table), cases=forecast_cases(lines[:4]), excluded=tuple(excluded))
    text = report_text(report, rows=True)
    assert text.startswith("Published ablations: 1 forward cases, 13 more that cannot be forecast.")
    assert text.count("shape stated") == 4 and "backward: only the forward is forecast: fa4-bwd-2cta-full, " in text
    assert "\n\nMeasured pairs: " in text


def test_pairs_of_which_both_kernels_were_measured_again_are_of_today(table: Path, tmp_path: Path, monkeypatch) -> None:
    """Never one kernel of today beside one of before."""
    found = run_ablations(table).pairs
    one, other = found[0].row_from.point, found[0].row_to.point
    lonely = [
        p for p in found[1:] if one in (p.row_from.point, p.row_to.point) or other in (p.row_from.point, p.row_to.point)
    ]
    again = tmp_path / "again.csv"
    append(again, [replace(one, cycles=3000.0), replace(other, cycles=1000.0)])
    monkeypatch.setattr(running, "AGAIN", again)
    now = measured_again(found)
    assert now[0].effect.measured == pytest.approx(3.0)
    assert lonely and now[1:] == found[1:]
