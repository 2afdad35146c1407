"""The published table as points: nothing lost, nothing guessed, each row in its own FLOP convention."""

from __future__ import annotations

import csv
import hashlib
from collections import Counter
from pathlib import Path

import pytest

from tilecast.base.data import PUBLISHED
from tilecast.cli import main
from tilecast.model.machine.machine import machine_names
from tilecast.validation.published.points import (
    PublishedError,
    PublishedPoint,
    best_per_shape,
    load_cycles,
    load_points,
    reasons,
)
from tilecast.validation.published.run import run_published

TABLE = PUBLISHED / "points.csv"
POINTS, EXCLUDED = load_points()

#: cudnn-frontend artifacts of 2025 whose causal TFLOP/s halve S^2 although the table's note gives S (S + 1) / 2.
HALVED = ("f937055efc", "9793df569c", "0b1577c8c8")


def raw() -> dict[int, dict[str, str]]:
    with TABLE.open(newline="", encoding="utf-8") as handle:
        return dict(enumerate(csv.DictReader(handle), 2))


def test_the_table_is_the_one_that_was_collected() -> None:
    # The column of board power, the last, was added later.
    collected = b"".join(line.rpartition(b",")[0] + b"\r\n" for line in TABLE.read_bytes().splitlines())
    digest = hashlib.sha256(collected).hexdigest()
    assert digest == "c2e59a40e58e3f3b1828bdab3746dcebe92459ca475f866042da19cdfab9df9f"
    assert len(raw()) == 2203


def test_every_forward_row_is_a_point_or_an_exclusion() -> None:
    forward = {number for number, row in raw().items() if row["pass"] == "fwd"}
    assert len(forward) == 1199
    assert sorted([p.row for p in POINTS] + [e.row for e in EXCLUDED]) == sorted(forward)


def test_points_per_machine() -> None:
    assert Counter(p.machine for p in POINTS) == {
        "b200": 296, "gb300": 293, "gb200": 235, "h100-sxm": 211, "h200-sxm": 104, "b300": 20,
    }  # fmt: skip
    assert {p.machine for p in POINTS} <= set(machine_names())


def test_points_per_dtype_class() -> None:
    assert Counter(p.dtype_class for p in POINTS) == {"16 bit": 758, "fp8": 301, "mxfp8": 100}


def test_exclusions_are_counted_with_their_reasons() -> None:
    assert reasons(EXCLUDED) == {
        "no machine file for 'H800'": 12,
        "the source does not give heads_q, heads_kv": 12,
        "no machine file for 'H100 PCIe'": 8,
        "the source does not give causal": 6,
        "no machine file for 'Blackwell (model not visible)'": 2,
    }


def test_kernels_map_to_the_family_they_are_predicted_as() -> None:
    families: dict[str, set[str]] = {}
    for p in POINTS:
        families.setdefault(p.kernel, set()).add(p.family)
    assert families["fa2"] == families["pytorch-sdpa-flash(fa2)"] == {"fa2"}
    assert families["fa3"] == {"fa3"}
    # FlashAttention-4's package has a Hopper path of its own: FA3's pipeline, with knobs of its own.
    assert families["fa4"] == {"fa3 by fa4", "fa4"}
    assert {p.family for p in POINTS if p.kernel == "fa4" and p.machine == "h200-sxm"} == {"fa3 by fa4"}
    for closed in ("cudnn", "avo", "tlx", "gluon", "triton", "cudnn-oss(FROST)"):
        assert families[closed] == {""}


def test_dtypes_become_those_of_the_model() -> None:
    assert {p.workload.dtype for p in POINTS if p.dtype_as_written == "mxfp8"} == {"fp8"}
    assert {p.workload.dtype for p in POINTS if p.dtype_as_written == "fp16/bf16"} == {"bf16"}
    assert {p.workload.dtype for p in POINTS if p.dtype_as_written == "fp16"} == {"fp16"}


def test_locked_clocks_are_kept() -> None:
    gb300 = [p for p in POINTS if "#2605" in p.source and p.machine == "gb300"]
    assert len(gb300) == 33
    assert {p.clock_mhz for p in gb300} == {1957.0}
    ncu = [p for p in POINTS if p.source.endswith("#488")]
    assert len(ncu) == 3
    assert all(p.clock_mhz == pytest.approx(845.6, abs=1.0) for p in ncu)


def test_board_power_is_what_sources_state() -> None:
    stated = Counter((p.machine, p.board_power_w) for p in POINTS if p.board_power_w is not None)
    assert stated == {("b200", 750.0): 4, ("b200", 1000.0): 66, ("h200-sxm", 700.0): 35}
    notes = {raw()[p.row]["source_ref"] + raw()[p.row]["precision_note"] for p in POINTS if p.board_power_w == 750.0}
    assert any("750W" in note for note in notes) and any("750 W" in note for note in notes)


def half_a_digit(text: str) -> float:
    """Half of the last digit a table printed; '317.0' is a whole number that a csv writer gave a point."""
    decimals = text.partition(".")[2]
    return 0.5 if decimals in ("", "0") else 0.5 * 10 ** -len(decimals)


def agrees(flop: float, row: dict[str, str]) -> bool:
    """Whether ``flop`` over the row's time is the row's throughput, to the digits it prints."""
    time, tflops, slack = float(row["time_ms"]), float(row["tflops"]), half_a_digit(row["time_ms"])
    margin = half_a_digit(row["tflops"]) * 1.001
    return flop / (time + slack) / 1e9 - margin <= tflops <= flop / (time - slack) / 1e9 + margin


def test_time_and_throughput_agree_in_the_convention_of_the_row() -> None:
    rows = raw()
    both = [p for p in POINTS if rows[p.row]["time_ms"] and rows[p.row]["tflops"]]
    assert len(both) == 738
    wrong = [p for p in both if not agrees(p.flop, rows[p.row])]
    assert {p.source.rpartition("@")[2] for p in wrong} <= set(HALVED)
    assert all(agrees(p.workload.flops, rows[p.row]) for p in wrong)
    # The two conventions differ by 1/S: where they disagree the choice costs at most 0.1 %.
    assert all(p.flop / p.workload.flops - 1 <= 1.001 / 1024 for p in wrong)


def test_rows_with_only_a_time_get_their_throughput_from_it() -> None:
    rows = raw()
    timed = [p for p in POINTS if not rows[p.row]["tflops"]]
    assert len(timed) == 21
    for p in timed:
        assert p.tflops == pytest.approx(p.flop / float(rows[p.row]["time_ms"]) / 1e9, rel=1e-12)
    # The notes of these rows say what they imply.
    implied = {p.row: p.tflops for p in timed}
    assert implied[2116] == pytest.approx(667, abs=1)
    assert implied[2118] == pytest.approx(685, abs=1)


def test_best_per_shape_is_the_fastest_row_of_each_shape() -> None:
    fastest: dict[tuple[object, ...], float] = {}
    for p in POINTS:
        fastest[p.shape] = max(fastest.get(p.shape, 0.0), p.tflops)
    chosen = best_per_shape(POINTS)
    assert {p.shape: p.tflops for p in chosen} == fastest
    assert len(chosen) == len(fastest)


def test_block_scaled_fp8_does_not_compete_with_fp8() -> None:
    kinds: dict[tuple[object, ...], set[str]] = {}
    for p in best_per_shape(POINTS):
        kinds.setdefault((p.machine, p.workload), set()).add(p.dtype_as_written)
    assert any({"fp8", "mxfp8"} <= found for found in kinds.values())


def test_cycle_rows_are_those_of_the_fact_sheet() -> None:
    found = {(c.machine, c.dtype, c.head_dim, c.emulated_share): c.cycles for c in load_cycles()}
    assert found == {
        ("b200", "bf16", 128, 0.1875): 1168, ("b200", "fp8", 128, 0.1875): 1174,
        ("b300", "bf16", 128, 0.0): 1025, ("b300", "fp8", 128, 0.0): 928,
        ("b200", "bf16", 128, 0.0): 1487, ("b200", "bf16", 256, 0.0): 2165,
    }  # fmt: skip


def test_cycles_follow_from_the_shares_and_the_fixed_clock() -> None:
    matrix = {"bf16": 1024, "fp8": 512}
    for c in load_cycles():
        if "tensor" in c.shares and c.head_dim == 128:
            assert matrix[c.dtype] / (c.shares["tensor"] / 100) == pytest.approx(c.cycles, abs=1)
    # PR #488: time x clock over the tiles of one SM (b 2, h 128, S 8192 on 148 SMs).
    tiles = 2 * 128 * (8192 // 128) ** 2 / 148
    assert 12454.32 * 845.7 / tiles == pytest.approx(1487, abs=1)
    assert 18153.50 * 845.1 / tiles == pytest.approx(2165, abs=1)


def write_table(path: Path, **changes: str) -> Path:
    """One row of the table with some fields changed."""
    row = raw()[min(p.row for p in POINTS if p.machine == "gb200")] | changes
    with path.open("w", newline="", encoding="utf-8") as handle:
        writer = csv.DictWriter(handle, list(row))
        writer.writeheader()
        writer.writerow(row)
    return path


def only_point(path: Path) -> PublishedPoint:
    points, excluded = load_points(path)
    assert (len(points), excluded) == (1, [])
    return points[0]


def test_a_row_without_heads_is_excluded_not_guessed(tmp_path: Path) -> None:
    points, excluded = load_points(write_table(tmp_path / "t.csv", heads_q=""))
    assert points == []
    assert [(e.row, e.reason) for e in excluded] == [(2, "the source does not give heads_q")]


def test_a_row_with_neither_time_nor_throughput_is_excluded(tmp_path: Path) -> None:
    points, excluded = load_points(write_table(tmp_path / "t.csv", tflops="", time_ms=""))
    assert points == []
    assert [e.reason for e in excluded] == ["neither time nor throughput"]


def test_a_file_that_is_no_such_table_is_refused_in_one_sentence(tmp_path: Path) -> None:
    path = write_table(tmp_path / "t.csv")
    text = path.read_text()
    cases = {
        text.replace("heads_kv", "kv_heads"): "expected .*heads_kv.*; got no column heads_kv$",
        text.splitlines()[0] + "\n": "got no rows$",
        "": "got no rows$",
        text + "FA4C,x\n": "line 3: expected 19 fields, got 2$",
    }
    for content, sentence in cases.items():
        path.write_text(content)
        with pytest.raises(PublishedError, match=sentence):
            load_points(path)
    with pytest.raises(PublishedError, match="cannot read the points"):
        load_points(tmp_path)
    assert [e.reason for e in load_points(write_table(path, tflops="fast"))[1]] == [
        "time or throughput is not a number above 0"
    ]


def test_the_column_of_power_may_be_missing_and_is_read_where_it_is(tmp_path: Path) -> None:
    with_column = write_table(tmp_path / "t.csv", board_power_w="750")
    assert [p.board_power_w for p in load_points(with_column)[0]] == [750.0]
    fast, slow = (run_published("sustained", points=load_points(write_table(tmp_path / "u.csv", gpu="B200", board_power_w=w))[0])
                  for w in ("1000", "750"))  # fmt: skip
    assert 0.6 < slow.rows[0].tflops / fast.rows[0].tflops < 0.85
    lines = with_column.read_text(encoding="utf-8").splitlines()
    (tmp_path / "old.csv").write_text("".join(line.rpartition(",")[0] + "\n" for line in lines), encoding="utf-8")
    assert [p.board_power_w for p in load_points(tmp_path / "old.csv")[0]] == [None]
    assert [e.reason for e in load_points(write_table(tmp_path / "t.csv", board_power_w="much"))[1]] == [
        "board_power_w takes watts or nothing, got 'much'"
    ]
    refused = run_published(
        "short", points=load_points(write_table(tmp_path / "t.csv", gpu="B200", board_power_w="100"))[0]
    )
    assert "more than the 245 W" in refused.refused[0].refused


def test_the_command_takes_anybodys_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["validate", "published", str(write_table(tmp_path / "t.csv")), "--rows"])
    assert ended.value.code in (0, None)
    text = capsys.readouterr().out
    assert text.startswith("Predicted against 1 published forward rows")
    assert "In cycles" not in text and "GB300 over GB200" not in text


def test_backward_rows_are_left_alone(tmp_path: Path) -> None:
    assert load_points(write_table(tmp_path / "t.csv", **{"pass": "bwd"})) == ([], [])


def test_a_locked_clock_is_read_from_the_source(tmp_path: Path) -> None:
    changes = {"source_ref": "PR #2605 table GB300-a", "gpu": "GB300"}
    assert only_point(write_table(tmp_path / "t.csv", **changes)).clock_mhz == 1957.0
