"""Launches of short sequences: which kernel the forecast takes is the one that runs, and how long it takes is near what was measured.

What the forecast knows of the kernels' code: tests/unit/codegen/test_short_kernels.py.
"""

from __future__ import annotations

import csv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tilecast
from tilecast.kernels.registry import candidates, reduce_mask, shipped_short
from tilecast.kernels.serving import few_rows
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine
from tilecast.model.step import short
from tilecast.model.step.short import short_run

H200 = load_machine("h200-sxm")
TABLE = Path(__file__).parents[4] / "data" / "measured" / "h200_short_sequences.csv"
#: The first problem of a seed that was measured with the kernels of now (data/README.md); of seed 3 by the rule and the list of before.
FIRST = {"3": 50, "4": 0, "13": 0}


class Tensor(SimpleNamespace):
    """What `few_rows.attend` asks of one before it launches a kernel of short sequences."""

    shape: tuple[int, ...]
    dtype = "bf16"

    def get_device(self) -> str:
        return "none"


def runs(work: Workload, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """The module that `tilecast.attention` takes: `few_rows.attend` itself, of the files that ship, which note their names in place of running."""
    taken: list[str] = []

    def launch(module: str) -> Any:
        def noted(*_arguments: Any) -> None:
            taken.append(module)

        noted.started = "started"  # type: ignore[attr-defined]
        return noted

    dims = work.head_dim_qk, work.head_dim_v
    kind = ("none", "bf16", *dims)
    found = candidates((9, 0), "bf16", *dims, "window", shipped_short())
    launches = tuple((e.seqlen_q_min, e.seqlen_q_max, e.seqlen_k_max, launch(e.module)) for e in found)
    q, k, v = (
        Tensor(shape=(work.batch, heads, length, dim))
        for heads, length, dim in (
            (work.heads_q, work.seqlen_q, dims[0]), (work.heads_kv, work.seqlen_k, dims[0]), (work.heads_kv, work.seqlen_k, dims[1])
        )
    )  # fmt: skip
    _, left, right = reduce_mask(*work.limits, work.seqlen_q, work.seqlen_k)
    with monkeypatch.context() as patch:
        patch.setitem(few_rows._short_kernels, kind, launches)
        patch.setattr(few_rows, "_without", {kind})  # no serving kernel, which would want tensors
        started = few_rows.attend(q, k, v, q, None, 1.0, left, right)
    assert (started is not None) == bool(taken)
    return taken[0] if taken else None


@given(
    st.integers(1, 700), st.integers(1, 300) | st.integers(1, 16), st.integers(1, 2100) | st.integers(1, 70),
    st.sampled_from([(1, 1), (8, 1), (28, 4), (64, 64), (9, 3), (40, 8)]),
    st.sampled_from([(64, 64), (128, 128), (192, 128), (256, 256), (80, 80), (40, 40), (136, 136), (200, 200), (192, 192), (64, 128), (256, 64)]),
    st.sampled_from([("none", None), ("causal", None), ("window", (100, 0)), ("window", (1600, 20)), ("window", (-1, 3))]),
)  # fmt: skip
def test_what_is_forecast_is_what_runs(batch, queries, keys, heads, dims, mask) -> None:
    work = Workload(batch, *heads, queries, keys, *dims, *mask)
    run = short_run(work, H200)
    with pytest.MonkeyPatch.context() as patch:
        assert (None if run is None else run.kernel) == runs(work, patch)


def test_limits_of_the_rule_are_those_of_the_kernels() -> None:
    """Drawn problems rarely lie between two limits that differ by little."""
    assert short.MORE_TILES == few_rows.MORE_TILES and short.OWN_WIDTHS == few_rows.OWN_WIDTHS
    assert (short.FULL_QUERIES, short.SHORT_KEYS, short.DENSE_ROWS, short.SHORT_TILE) == (
        few_rows.FULL_QUERIES, few_rows.SHORT_KEYS, few_rows.DENSE_TILE, few_rows.SHORT_TILE,
    )  # fmt: skip
    assert (short.DECODED_QUERIES, short.DECODED_ROWS, short.DECODED_KEYS) == (
        few_rows.QUERIES,
        few_rows.ROWS,
        few_rows.KEYS,
    )
    assert (short.DECODED_TILE, short.PARTED_COLUMNS, short.FEW_AS_KEYS) == (
        few_rows.DECODED_ROWS,
        few_rows.PARTED_COLUMNS,
        few_rows.FEW_AS_KEYS,
    )


def measured() -> list[tuple[str, Workload, dict[str, str]]]:
    """(seed, problem, row) of what was measured with the kernels of now."""
    found = []
    with TABLE.open(newline="") as file:
        for row in csv.DictReader(file):
            if int(row["number"]) >= FIRST.get(row["seed"], 1 << 31):
                numbers = (
                    int(row[name])
                    for name in ("batch", "heads_q", "heads_kv", "queries", "keys", "head_dim", "head_dim_v")
                )
                found.append((row["seed"], Workload(*numbers, "causal" if row["causal"] == "1" else "none"), row))
    return found


@pytest.mark.parametrize(
    ("seed", "rows", "mean", "p90"), [("3", 105, 0.12, 0.22), ("4", 31, 0.13, 0.23), ("13", 28, 0.085, 0.16)]
)
def test_launches_take_as_long_as_forecast(seed: str, rows: int, mean: float, p90: float) -> None:
    """Gates are what came out, rounded up; no number of the forecast is from these rows, nor was one changed since they were seen.

    Seeds 4 and 13 as `tilecast.attention` chose; seed 3 in the column of the kernel that it takes now, of which those for up to 32 keys had
    none then.  Forms for many programs, and files for several blocks and for parts, came after all of these.
    """
    errors = []
    for _, work, row in (one for one in measured() if one[0] == seed):
        run = short_run(work, H200)
        if run is not None and (run.many or run.kernel.endswith(("_blocks", "_parts"))):
            continue
        if run is not None and seed == "3" and not run.kernel.endswith("_32"):
            errors.append(run.seconds * 1e6 / float(row["few_us" if run.kernel.endswith("few") else "short_us"]) - 1)
        elif run is not None and seed != "3":
            errors.append(run.seconds * 1e6 / float(row["us"]) - 1)
    assert len(errors) == rows
    off = sorted(map(abs, errors))
    assert sum(off) / rows < mean and off[int(0.9 * rows)] < p90


def test_wide_heads_take_as_long_as_forecast() -> None:
    """Forms for many programs and files for several blocks, by the column of the form that runs now; gates as above."""
    errors = []
    with (TABLE.parent / "h200_short_wide_forms.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            numbers = (int(row[name]) for name in ("batch", "heads_q", "heads_kv", "queries", "keys", "head_dim", "head_dim_v"))  # fmt: skip
            run = short_run(Workload(*numbers, "causal" if row["causal"] == "1" else "none"), H200)
            if run is None or run.kernel.endswith("_parts") or not (run.many or run.kernel.endswith("_blocks")):
                continue
            if run.kernel.endswith("_blocks"):
                form = "keys32" if run.many else "keys32_stages3"
            else:
                form = "halves_keys32" if run.kernel.endswith("_32") else "halves"
            errors.append(abs(run.seconds * 1e6 / float(row[f"{form}_us"]) - 1))
    errors.sort()
    assert len(errors) == 31
    assert sum(errors) / len(errors) < 0.13 and errors[int(0.9 * len(errors))] < 0.23


@pytest.mark.parametrize(
    ("table", "column", "count", "mean", "p90"),
    [
        ("h200_short_parts", "apart256_us", 50, 0.08, 0.17),
        ("h200_short_parts_in_turn", "apart_us", 13, 0.09, 0.19),
        ("h200_short_parts_in_turn", "turn_us", 18, 0.2, 0.34),
    ],
)
def test_parts_take_as_long_as_forecast(table: str, column: str, count: int, mean: float, p90: float) -> None:
    """By programs of their own and in turn, by the column of the form that runs now; gates as above, no number from these rows."""
    errors = []
    with (TABLE.parent / f"{table}.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            numbers = [
                int(row[name]) for name in ("batch", "heads_q", "heads_kv", "queries", "keys", "head_dim", "head_dim_v")
            ]
            run = short_run(Workload(*numbers, "causal" if row["causal"] == "1" else "none"), H200)
            if run is None or not run.kernel.endswith("_parts") or not row[column]:
                continue
            tiles = -(-numbers[3] * (numbers[1] // numbers[2]) // short.SHORT_TILE) * numbers[0] * numbers[2]
            if run.programs == tiles if column == "turn_us" else not run.many:
                errors.append(abs(run.seconds * 1e6 / float(row[column]) - 1))
    errors.sort()
    assert len(errors) == count
    assert sum(errors) / count < mean and errors[int(0.9 * count)] < p90


def test_parts_of_more_keys_take_as_long_as_forecast() -> None:
    """As above, by the column of the form and of the keys of a part that run now: apart, in turn, and in full rounds with what is left apart."""
    errors: dict[str, list[float]] = {"apart": [], "turn": [], "rounds": []}
    with (TABLE.parent / "h200_short_parts_lengths.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            numbers = [int(row[name]) for name in ("batch", "heads_q", "heads_kv", "queries", "keys", "head_dim", "head_dim_v")]  # fmt: skip
            work = Workload(*numbers, "causal" if row["causal"] == "1" else "none")
            run = short_run(work, H200)
            if run is None or not run.kernel.endswith("_parts"):
                continue
            kernel = next(one for one in short.short_kernels() if one.module == run.kernel)
            tiles = -(-work.seqlen_q * work.group_size // short.SHORT_TILE) * work.batch * work.heads_kv
            form = "turn" if run.programs == tiles else "rounds" if run.many else "apart"
            if taken := row[f"{form}{kernel.part(work)[1]}_us"]:
                errors[form].append(abs(run.seconds * 1e6 / float(taken) - 1))
    assert {form: len(found) for form, found in errors.items()} == {"apart": 79, "turn": 59, "rounds": 16}
    for form, mean, p90 in (("apart", 0.11, 0.26), ("turn", 0.21, 0.44), ("rounds", 0.2, 0.28)):
        off = sorted(errors[form])
        assert sum(off) / len(off) < mean and off[int(0.9 * len(off))] < p90


def test_keys_that_no_row_sees_cost_nothing() -> None:
    whole, window = (
        short_run(Workload(500, 8, 8, 32, 2000, 64, 64, *mask), H200) for mask in (("none", None), ("window", (64, 0)))
    )
    fewer = short_run(Workload(500, 8, 8, 32, 96, 64, 64), H200)
    assert whole is not None and window is not None and fewer is not None
    assert fewer.seconds <= window.seconds < 0.2 * whole.seconds


def test_predict_says_what_runs_in_place_of_what_it_searched() -> None:
    few = tilecast.predict(Workload(218, 14, 2, 1, 1, mask="causal"), "h200-sxm")
    assert any("triton_short_d128_few" in note and "instead of" in note for note in few.notes)
    assert not any("decode kernel" in note for note in few.notes)
    assert not any(
        "triton_short" in note for note in tilecast.predict(Workload(1, 16, 16, 4096, 4096), "h200-sxm").notes
    )
    # Kernels for short sequences are Hopper's, of 16 bits.
    assert short_run(Workload(218, 14, 2, 1, 1), load_machine("b200")) is None
    assert short_run(Workload(218, 14, 2, 1, 1, dtype="fp8"), H200) is None
