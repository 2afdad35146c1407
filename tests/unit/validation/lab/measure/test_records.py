"""Tables of measured points: what is written is read back, damage is named, a crash costs at most one row."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tilecast.base.data import MEASURED
from tilecast.model.kernel.workload import Workload
from tilecast.validation.lab.measure.records import COLUMNS, Measured, RecordError, append, read, shape_fields

WORK = Workload(2, 16, 4, 512, 1024, 128, 128, "causal")
ROW = Measured(
    gpu="NVIDIA H200", machine="h200-sxm", date="2026-01-02", driver="580.1", torch="2.11", triton="3.6",
    tilecast="0.1",
    kernel="hopper_ws", variant="family=fa3,tile_n=64", source_sha="0123456789abcdef", mode="short",
    **shape_fields(WORK), role="build", cycles=1000.0, cycles_low=990.0, cycles_high=1010.0, ms=0.5, ms_low=0.49,
    ms_high=0.51, effective_mhz=1700.0, nvml_mhz=1980.0, power_w=600.0, temperature_c=50.0,
    throttle="power cap, thermal",
    rounds=15, launches_per_round=8, input_copies=2, error=0.002, command='tilecast measure "a b".toml',
)  # fmt: skip
DIGITS = ("cycles", "ms", "effective_mhz", "power_w", "error")
TEXT = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\r\x00"), max_size=30)


def table(folder: Path, text: str) -> Path:
    path = folder / "t.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_rows_come_back_as_they_were_and_the_header_stands_once(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    append(path, [ROW])
    append(path, [replace(ROW, kernel="triton"), replace(ROW, mode="sustained")])
    assert read(path) == [ROW, replace(ROW, kernel="triton"), replace(ROW, mode="sustained")]
    assert path.read_text().count("cycles_low") == 1


@given(
    variant=TEXT, command=TEXT, rounds=st.integers(1, 10**9),
    floats=st.tuples(*[st.floats(1e-9, 1e12, allow_subnormal=False)] * len(DIGITS)),
)  # fmt: skip
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_row_survives_the_round_trip(
    tmp_path: Path, variant: str, command: str, rounds: int, floats: tuple[float, ...]
) -> None:
    row = replace(ROW, variant=variant, command=command, rounds=rounds, **dict(zip(DIGITS, floats, strict=True)))
    path = tmp_path / "any.csv"
    path.unlink(missing_ok=True)
    append(path, [row, ROW])
    found, other = read(path)
    assert other == ROW
    for name in COLUMNS:
        if name in DIGITS:  # six digits are kept
            assert getattr(found, name) == pytest.approx(getattr(row, name), rel=5.1e-6)
        else:
            assert getattr(found, name) == getattr(row, name)


@pytest.mark.parametrize(
    "work",
    [WORK, Workload(), Workload(mask="window", window=(255, -1)), Workload(1, 8, 1, 64, 4096, 192, 128, dtype="fp16")],
    ids=lambda w: w.label(),
)
def test_a_row_knows_its_workload(work: Workload) -> None:
    assert replace(ROW, **shape_fields(work)).workload() == work


def test_the_key_ignores_when_and_with_what_driver_but_not_what_ran() -> None:
    assert replace(ROW, date="2027-01-01", driver="600", torch="3", cycles=1.0, role="held-out").key() == ROW.key()
    for change in ({"gpu": "B200"}, {"kernel": "cudnn"}, {"variant": "x"}, {"mode": "sustained"}, {"seqlen_q": 256}):
        assert replace(ROW, **change).key() != ROW.key(), change


@pytest.mark.parametrize("text", ["a,b\n1,2\n", ",".join(COLUMNS[:-1]) + "\n", "shape\n"])
def test_another_table_is_neither_read_nor_appended_to(tmp_path: Path, text: str) -> None:
    path = table(tmp_path, text)
    with pytest.raises(RecordError, match="not a table of measurements"):
        append(path, [ROW])
    with pytest.raises(RecordError, match="not a table of measurements"):
        read(path)
    assert path.read_text() == text


def test_an_empty_file_gets_its_header_but_is_no_table_yet(tmp_path: Path) -> None:
    path = table(tmp_path, "")
    with pytest.raises(RecordError, match="not a table"):
        read(path)
    append(path, [ROW])
    assert read(path) == [ROW]


def test_a_missing_or_binary_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="cannot read"):
        read(tmp_path / "none.csv")
    (tmp_path / "b.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecordError, match="cannot read"):
        read(tmp_path / "b.csv")


def crashed(folder: Path, missing: int) -> Path:
    """Two rows, the last ``missing`` characters of which never reached the disk."""
    path = folder / "t.csv"
    append(path, [ROW, replace(ROW, kernel="triton")])
    return table(folder, path.read_text()[:-missing])


@pytest.mark.parametrize("missing", [1, 2, 20, 60, 150, 250])
def test_a_last_line_cut_off_by_a_crash_is_dropped(tmp_path: Path, missing: int) -> None:
    assert read(crashed(tmp_path, missing)) == [ROW]


@pytest.mark.parametrize("missing", [1, 20, 150])
def test_a_run_goes_on_after_a_crash(tmp_path: Path, missing: int) -> None:
    path = crashed(tmp_path, missing)
    append(path, [replace(ROW, kernel="cudnn")])
    assert read(path) == [ROW, replace(ROW, kernel="cudnn")]


def test_a_damaged_field_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    append(path, [ROW, replace(ROW, rounds=77), ROW])
    table(tmp_path, path.read_text().replace(",77,", ",many,"))
    with pytest.raises(RecordError, match=r"line 3: field 'rounds' takes int, got 'many'"):
        read(path)


def test_a_short_line_within_is_damage_not_a_crash(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    append(path, [ROW])
    path.write_text(path.read_text() + "NVIDIA H200,short\n")
    append(path, [ROW])
    with pytest.raises(RecordError, match=rf"line 3: expected {len(COLUMNS)} fields, got 2"):
        read(path)


@pytest.mark.parametrize("name", ["h200_points.csv", "h200_sustained.csv"])
def test_committed_tables_are_whole(name: str) -> None:
    rows = read(MEASURED / name)
    assert rows
    assert len({row.key() for row in rows}) == len(rows)
    for row in rows:
        assert row.cycles_low <= row.cycles <= row.cycles_high, asdict(row)
        assert row.error < 0.03
