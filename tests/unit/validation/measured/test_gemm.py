"""GEMM forecasts against the recorded kernels of an H200: gates, and what a table must be."""

from __future__ import annotations

import csv
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from support.whole import is_whole

from tilecast.codegen.gemm.ship import read_gemm_list
from tilecast.model.gemm.evaluate import evaluate_gemm
from tilecast.model.gemm.render import (
    MEASURED_CODE_ERROR,
    MEASURED_ERROR,
    MEASURED_KERNELS,
    PARTED_ERROR,
    PARTED_KERNELS,
)
from tilecast.model.gemm.variant import GemmVariant
from tilecast.model.gemm.workload import Gemm
from tilecast.model.kernel.verdict import VariantError
from tilecast.model.machine.machine import load_machine
from tilecast.validation.measured.gemm import (
    BEFORE,
    COMPILED,
    EMPTY_US,
    TABLE,
    GemmShape,
    report_dict,
    report_text,
    run_gemm,
)
from tilecast.validation.statistics import summarise


@pytest.fixture(scope="module")
def sample() -> list[GemmShape]:
    """Every third recorded kernel: all take half a minute."""
    return run_gemm(every=2 if is_whole() else 3)


def test_forecasts_hold(sample: list[GemmShape]) -> None:
    for level in (COMPILED, BEFORE):
        every = summarise(row.error(level) for shape in sample for row in shape.rows)
        assert every.mean <= 0.06 and abs(every.bias) <= 0.03
        # Where products are long the SMs' own pace counts, and is known better.
        long = summarise(row.error(level) for shape in sample for row in shape.rows if shape.gemm.k >= 1024)
        assert long.mean <= 0.06
    assert all(row.code_us is not None for shape in sample for row in shape.rows)


def test_another_card_s_kernels_at_the_clock_they_ran_at() -> None:
    """An H100, by its own calibration: no constant is from these rows."""
    found = run_gemm(TABLE.with_name("h100_gemm_variants.csv"), every=6)
    for level in (COMPILED, BEFORE):
        every = summarise(row.error(level) for shape in found for row in shape.rows)
        assert every.mean <= 0.07 and abs(every.bias) <= 0.03


def test_what_forecasts_quote_is_what_is_found(sample: list[GemmShape]) -> None:
    with TABLE.open(newline="", encoding="utf-8") as file:
        assert sum(bool(row["variant"]) for row in csv.DictReader(file)) == MEASURED_KERNELS
    for level, quoted in ((BEFORE, MEASURED_ERROR), (COMPILED, MEASURED_CODE_ERROR)):
        found = summarise(row.error(level) for shape in sample for row in shape.rows)
        assert found.mean == pytest.approx(quoted, abs=0.01)


def test_the_gain_of_the_second_accumulator_is_forecast_within_five_points(tmp_path: Path) -> None:
    """The knob alone, of the kernel that is fastest in the middle, at every k from 64 to 4096; before compilation within six."""
    with TABLE.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        rows = [row for row in reader if "tile_m=128,tile_n=128,tile_k=64,stages=5" in row["variant"] and "c_stages=4,c_parts=2" in row["variant"]]  # fmt: skip
    pair = tmp_path / "pair.csv"
    with pair.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(row for row in rows if (row["m"], row["n"]) == ("8192", "8192"))
    shapes = run_gemm(pair)
    for level, most in ((COMPILED, 0.05), (BEFORE, 0.06)):
        gains = {shape.gemm.k: gain for shape in shapes for gain in shape.buffer_gains(level)}
        assert sorted(gains) == [64, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096]
        assert all(abs(forecast - measured) <= most for _, forecast, measured in gains.values())
        # It pays in the middle, in both.
        for side in (1, 2):
            assert max(gains[k][side] for k in (384, 512, 768)) > 1.05 > max(gains[64][side], gains[4096][side])


def test_the_noise_of_the_measurements_is_told_beside_the_order(sample: list[GemmShape]) -> None:
    repeated = statistics.fmean(shape.tau_repeated() for shape in sample)
    # Orders are wrong beyond noise: more of what differs by more than it is right.
    assert 0.9 < repeated < 1.0
    for level in (COMPILED, BEFORE):
        tau = statistics.fmean(shape.tau(level) for shape in sample)
        assert tau < statistics.fmean(shape.tau_beyond_noise(level) for shape in sample) < repeated
    assert f"with the noise of their medians: {repeated:.2f}" in report_text(sample)


def test_first_picks(sample: list[GemmShape]) -> None:
    assert statistics.median(shape.first_pick() for shape in sample) <= 0.025


def test_a_table_of_one_s_own(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    head = "m,n,k,c_dtype,in_place,variant,us\n"
    one = '2048,2048,256,bf16,1,"family=gemm_hopper,tile_m=128,tile_n=128,tile_k=64,stages=4",20.0\n'
    table.write_text(head + one)
    (shape,) = run_gemm(table)
    # A table that does not say so is of kernels that order their first copies late.
    assert shape.rows[0].variant == GemmVariant(stages=4, early=0) and shape.rows[0].measured_us == 20.0 - EMPTY_US
    assert shape.first_pick() == 0.0 and shape.buffer_gains() == []
    assert "1 kernels on 1 problems" in report_text([shape]) and "noise" not in report_text([shape])
    assert report_dict([shape])["shapes"][0]["kernels"] == 1  # type: ignore[index]
    for broken, words in (
        ("a,b\n1,2\n", "not a table of GEMM kernels"), (head, "not a table of GEMM kernels"),
        (head + one.replace("stages=4", "stags=4"), "line 2: --variant: family gemm_hopper has no knob 'stags'"),
        (head + one.replace(",20.0", ",1.0"), "line 2: us: expected more than"), (head + one.replace("2048,2048", "x,2048"), "line 2: "),
    ):  # fmt: skip
        table.write_text(broken)
        with pytest.raises(VariantError, match=words):
            run_gemm(table)


def test_forecasts_of_parts_of_k_hold_and_pick_what_is_fast() -> None:
    """Every row of `gemm_hopper_parts` of several parts, none of which was looked at when the model learnt of them: how far off, and what
    the parts cost that the forecast would take (of the operator's rule: tests/unit/kernels/test_gemm_choice.py)."""
    kernel = next(kernel for kernel in read_gemm_list() if kernel.parted)
    chip = load_machine(kernel.machine)
    measured: dict[Gemm, dict[int, float]] = {}
    with (TABLE.parent / "h200_gemm_by_parts.csv").open(encoding="utf-8") as table:
        for row in csv.DictReader(table):
            if row["kernel"] == kernel.module and row["parts"].isdigit() and int(row["parts"]) > 1:
                gemm = Gemm(int(row["m"]), int(row["n"]), int(row["k"]))
                measured.setdefault(gemm, {})[int(row["parts"])] = float(row["us"])
    errors, costs = [], []
    for gemm, times in measured.items():
        # In the form that was measured, and the launch left out on both sides.
        runs = {n: evaluate_gemm(gemm, replace(kernel.variant, parts=n, early=0), chip, "short") for n in times}
        found = {n: (run.seconds - run.launch_seconds) * 1e6 for n, run in runs.items()}
        errors += [found[n] / (us - EMPTY_US) - 1 for n, us in times.items()]
        costs.append(times[min(found, key=lambda n: found[n])] / min(times.values()) - 1)
    assert len(errors) == PARTED_KERNELS and statistics.fmean(map(abs, errors)) == pytest.approx(PARTED_ERROR, abs=5e-4)
    assert -0.05 <= statistics.fmean(errors) <= 0.0
    assert len(costs) == 13 and statistics.fmean(costs) <= 0.03 and max(costs) <= 0.1
