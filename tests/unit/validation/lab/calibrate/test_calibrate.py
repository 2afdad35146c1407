"""Calibration without a GPU: cases, store, resuming, windows, refusals, the command."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tilecast.validation.lab.calibrate import run as runner
from tilecast.validation.lab.calibrate.cases import CalibrateError, Case, Reading, repeats
from tilecast.validation.lab.calibrate.gpu import GpuError, Identity
from tilecast.validation.lab.calibrate.groups import GROUPS, all_cases
from tilecast.validation.lab.calibrate.groups.corun import inside
from tilecast.validation.lab.calibrate.groups.launch import start_offsets, turnarounds
from tilecast.validation.lab.calibrate.groups.power import power_between_ticks
from tilecast.validation.lab.calibrate.nvrtc import CompileError
from tilecast.validation.lab.calibrate.preludes import STREAMS, wgmma_prelude
from tilecast.validation.lab.calibrate.store import append_rows, params_text, read_rows, rows_of

IDENTITY = Identity("Test GPU", "1.2", 90, 132, 50 << 20, 232448, 1980.0)
WHERE = {
    "gpu": "Test GPU", "driver": "1.2", "clock_mhz": 1980.0, "date": "2026-01-01", "command": "c", "source_sha": "s",
}  # fmt: skip


def case(name: str, measure) -> Case:
    return Case("sync", name, {"n": 1}, "empty.cu", measure, defines={"THREADS": 32})


def run(cases: list[Case], store: Path, alive: bool = True):
    gpu = SimpleNamespace(identity=IDENTITY, arch="sm_90a", kernel=lambda case, cubin: None, alive=lambda: alive)
    return runner.run_cases(gpu, cases, store, "tilecast calibrate", lambda *_: None)


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "cores", lambda: 1)
    monkeypatch.setattr(runner, "compile_cubin", lambda text, arch: b"")


def test_a_second_run_measures_only_what_is_missing(tmp_path: Path) -> None:
    calls = []

    def measure(gpu, case):
        calls.append(case.benchmark)
        return {"cycles": Reading((3.0, 1.0, 2.0), "cycles")}

    store = tmp_path / "c.csv"
    assert run([case("a", measure)], store).measured == 1
    second = run([case("a", measure), case("b", measure)], store)
    assert (second.measured, second.skipped, calls) == (1, 1, ["a", "b"])
    row = second.rows[0]
    assert (row.value, row.low, row.high, row.repeats, row.parameters()) == (2.0, 1.0, 3.0, 3, {"n": 1})
    # Another driver, or another source, is another measurement.
    changed = replace(case("a", measure), defines={"THREADS": 64})
    assert run([changed], store).measured == 1


def test_a_broken_benchmark_is_reported_and_the_rest_measured(tmp_path: Path) -> None:
    def breaks(gpu, case):
        raise IndexError("nothing there")

    def works(gpu, case):
        return {"cycles": Reading((1.0,), "cycles")}

    outcome = run([case("bad", breaks), case("good", works)], tmp_path / "c.csv")
    assert [row.benchmark for row in outcome.rows] == ["good"]
    assert "bad" in outcome.failed[0][0]
    assert "nothing there" in outcome.failed[0][1]


def test_a_benchmark_that_does_not_compile_costs_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compiles(text: str, arch: str) -> bytes:
        if "THREADS 64" in text:
            raise CompileError("NVRTC refused a benchmark for sm_90a: error")
        return b""

    def works(gpu, case):
        return {"cycles": Reading((1.0,), "cycles")}

    monkeypatch.setattr(runner, "compile_cubin", compiles)
    cases = [replace(case("bad", works), defines={"THREADS": 64}), case("good", works), case("too", works)]
    outcome = run(cases, tmp_path / "c.csv")
    assert [row.benchmark for row in outcome.rows] == ["good", "too"]
    assert [reason for _, reason in outcome.failed] == ["CompileError: NVRTC refused a benchmark for sm_90a: error"]


def test_a_lost_gpu_stops_the_run_and_keeps_what_was_measured(tmp_path: Path) -> None:
    def works(gpu, case):
        return {"cycles": Reading((1.0,), "cycles")}

    def dies(gpu, case):
        raise GpuError("CUDA driver: illegal address")

    store = tmp_path / "c.csv"
    with pytest.raises(CalibrateError, match=r"lost in sync/dies.*run again to go on"):
        run([case("ok", works), case("dies", dies), case("never", works)], store, alive=False)
    assert [row.benchmark for row in read_rows(store)] == ["ok"]


def test_the_store_survives_a_torn_line_and_refuses_another_table(tmp_path: Path) -> None:
    store = tmp_path / "c.csv"
    rows = rows_of("sync", "a", {"b": 2, "a": 1}, {"cycles": Reading((1.5,), "cycles")}, **WHERE)
    append_rows(store, rows)
    with store.open("a") as file:
        file.write("sync,torn,{},cyc")
    append_rows(store, [replace(rows[0], benchmark="after")])
    assert [row.benchmark for row in read_rows(store)] == ["a", "after"]
    assert rows[0].params == params_text({"a": 1, "b": 2})
    other = tmp_path / "other.csv"
    other.write_text("x,y\n1,2\n")
    with pytest.raises(CalibrateError, match="not a calibrate table"):
        read_rows(other)


def test_repeats_leave_the_warm_up_out() -> None:
    values = iter((100.0, 1.0, 2.0))
    assert repeats(2, lambda: {"x": next(values)}, {"x": "cycles"})["x"].samples == (1.0, 2.0)


def test_every_case_belongs_to_one_key_and_a_chip_gets_only_what_it_has() -> None:
    cases = all_cases()
    keys = [(c.group, c.benchmark, params_text(c.params)) for c in cases]
    assert len(keys) == len(set(keys))
    ampere = runner.chosen(cases, 80, quick=False)
    assert {c.source for c in ampere}.isdisjoint(
        {"wgmma_rate.cu", "tcgen05.cu", "tma_latency.cu", "cluster.cu", "corun.cu"}
    )
    assert {c.source for c in runner.chosen(cases, 100, quick=False)} >= {"tcgen05.cu", "tmem.cu", "tma_bandwidth.cu"}
    # Every group has something to say in the short list, on every architecture that has the group.
    for chip in (80, 90, 100, 103, 120):
        groups = {c.group for c in runner.chosen(cases, chip, quick=False)}
        assert {c.group for c in runner.chosen(cases, chip, quick=True)} == groups
    assert [c.group for c in cases] == sorted((c.group for c in cases), key=GROUPS.index)


def test_wgmma_text_has_the_operands_its_shape_needs() -> None:
    text = wgmma_prelude(128, "register")
    assert text.count('"+f"') == 64
    assert "{%64, %65, %66, %67}, %68, p, 1, 1, 0;" in text
    assert "%64, %65, p, 1, 1, 0, 1;" in wgmma_prelude(128, "smem", trans_b=True)
    assert "m64n64k32.f32.e4m3.e4m3" in wgmma_prelude(64, "smem", "fp8")
    for wrong in (
        (12, "smem", "bf16", False),
        (264, "smem", "bf16", False),
        (64, "tmem", "bf16", False),
        (64, "smem", "fp8", True),
    ):
        with pytest.raises(ValueError, match="no wgmma"):
            wgmma_prelude(*wrong)
    assert all("%" in stream.body for stream in STREAMS.values())


def test_the_window_counts_events_between_two_clocks_even_when_they_wrap() -> None:
    wrap = 1 << 32
    log = np.array([(wrap - 300 + 100 * i) % wrap or 1 for i in range(8)] + [0, 0])
    events, cycles = inside(log, wrap - 250, 250)
    assert (events, cycles) == (4, 400)
    assert inside(log, 10_000, 10_010) == (0, 0)


def test_turnaround_is_end_to_next_start_on_one_sm_and_ignores_overlap() -> None:
    records = np.zeros((5, 2, 8), dtype=np.int64)
    for cta, (sm, first, last) in enumerate(
        [(0, 100, 1000), (1, 50, 500), (0, 1300, 2000), (1, 400, 900), (0, 2310, 3000)]
    ):
        records[cta, :, 0] = (first, first + 20)
        records[cta, 0, 1] = last
        records[cta, :, 4] = sm
    assert turnarounds(records) == [300.0, 310.0]


def test_start_offsets_resolve_below_the_timer_tick() -> None:
    rng = np.random.default_rng(0)
    true = np.array([0.0, 40.0, 90.0])
    ticks = np.floor((rng.uniform(0, 1e6, (4000, 1)) + true) / 256) * 256
    assert np.allclose(start_offsets(ticks), true, atol=8)


def test_power_comes_from_whole_ticks_of_the_counter() -> None:
    samples = [(i * 0.01, 30.0 * ((i + 3) // 10)) for i in range(60)]
    assert power_between_ticks(samples) == pytest.approx(300.0)
    with pytest.raises(CalibrateError, match="did not move"):
        power_between_ticks([(0.0, 1.0), (1.0, 1.0)])


def test_without_a_gpu_one_sentence_and_no_file(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    from tilecast.cli import main
    from tilecast.validation.lab.calibrate import gpu

    def none() -> None:
        raise CalibrateError("calibrate needs an NVIDIA GPU, and the driver finds none")

    monkeypatch.setattr(gpu, "_driver", none)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main(["calibrate"])
    told = capsys.readouterr().err
    assert stopped.value.code == 2
    assert "needs an NVIDIA GPU" in told
    assert told.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--only", "tensr"], "did you mean tensor"),
        (["-o", "missing/x.toml"], "folder missing does not exist"),
    ],
)
def test_wrong_options_are_refused_before_the_gpu_is_touched(arguments, told, capsys, tmp_path, monkeypatch) -> None:
    from tilecast.cli import main

    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main(["calibrate", *arguments])
    assert stopped.value.code == 2
    assert told in capsys.readouterr().err
