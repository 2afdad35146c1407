"""`validate tuner`: the tuner replayed on measured rows, the shares checked against the table by hand."""

from __future__ import annotations

from dataclasses import replace
from math import log2

import pytest

from tilecast.model.chip.evaluate import evaluate_seconds
from tilecast.model.compiled.code import dump_codes, load_codes
from tilecast.model.compiled.forecast import forecast
from tilecast.model.families import parse_variant
from tilecast.model.forecast.predict import predict
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine
from tilecast.validation.lab.measure.records import RecordError, append, read
from tilecast.validation.measured.run import CODES, TABLE
from tilecast.validation.measured.tuner import report_dict, report_text, run_tuner

SHAPE = Workload(8, 16, 16, 2048, 2048, 128, 128)


@pytest.fixture(scope="module")
def rows():
    return [r for r in read(TABLE) if r.kernel == "triton" and r.workload() == SHAPE and r.mode == "short"]


@pytest.fixture(scope="module")
def codes():
    return [
        c for c in load_codes(CODES.read_text()) if c.family == "triton" and c.head_dim_qk == 128 and c.mask == "none"
    ]


def write(tmp_path, rows, codes):
    table, profiles = tmp_path / "t.csv", tmp_path / "c.txt"
    append(table, rows)
    profiles.write_text(dump_codes(codes))
    return table, profiles


def test_shares_are_best_time_over_best_of_those_timed(tmp_path, rows, codes) -> None:
    report = run_tuner(*write(tmp_path, rows, codes), least=5)
    (shape,) = report.shapes
    assert (shape.kernel, shape.workload, shape.variants, shape.without_code) == ("triton", SHAPE, len(rows), 0)
    machine = load_machine("h200-sxm")
    best = min(r.cycles for r in rows)
    first = min(rows, key=lambda r: evaluate_seconds(SHAPE, machine, parse_variant(r.variant)))
    assert shape.shares["before compilation", 1] == pytest.approx(best / first.cycles)
    mhz = predict(SHAPE, machine, parse_variant(first.variant), interval=False, compiler=None).clock_mhz
    by_key = {c.variant: c for c in codes}
    coded = sorted(rows, key=lambda r: forecast(by_key[r.variant], SHAPE, machine, mhz).cycles)
    assert shape.shares["from machine code", 1] == pytest.approx(best / coded[0].cycles)
    # No structure has more than two variants here, so three are simply the first three.
    assert shape.shares["from machine code", 3] == pytest.approx(best / min(r.cycles for r in coded[:3]))
    assert all(0 < share <= 1 for share in shape.shares.values())
    assert report_dict(report)["shapes"][0]["best_ms"] == pytest.approx(min(r.ms for r in rows))
    assert "7 measured variants" in report_text(report, rows=True)


def test_measured_times_do_not_change_what_is_chosen(tmp_path, rows, codes) -> None:
    """Shares computed from times of 1, 2, 3, ...: the choice behind them is the same whatever is measured."""
    fake = [replace(r, cycles=float(2**n), cycles_low=float(2**n), cycles_high=float(2**n)) for n, r in enumerate(rows)]
    other = [replace(r, cycles=float(2 ** (20 - n)), cycles_low=1.0, cycles_high=1.0) for n, r in enumerate(rows)]
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one = run_tuner(*write(tmp_path / "a", fake, codes), least=5).shapes[0].shares["before compilation", 1]
    two = run_tuner(*write(tmp_path / "b", other, codes), least=5).shapes[0].shares["before compilation", 1]
    n = round(-log2(one))
    assert two == pytest.approx(2.0 ** (20 - len(rows) + 1) / 2.0 ** (20 - n), rel=1e-4)


def test_variants_without_a_profile_are_counted_and_come_last(tmp_path, rows, codes) -> None:
    fastest = min(rows, key=lambda r: r.cycles)
    report = run_tuner(*write(tmp_path, rows, [c for c in codes if c.variant != fastest.variant]), least=5)
    assert report.shapes[0].without_code == 1
    assert report.shapes[0].shares["from machine code", 1] < 1
    assert "1 variants have no profile" in report_text(report, rows=False)


def test_a_table_with_too_few_variants_is_refused(tmp_path, rows, codes) -> None:
    with pytest.raises(RecordError, match="no shape has 50 measured variants"):
        run_tuner(*write(tmp_path, rows, codes), least=50)
