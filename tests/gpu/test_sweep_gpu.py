"""Sweeps that measure: each GPU times one item at a time, all GPUs of a kind are used, compiled ahead on the CPU."""

from __future__ import annotations

import itertools
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from support.paths import ROOT

import tilecast
from tilecast.explore.sweep import api
from tilecast.explore.sweep.errors import SweepError
from tilecast.explore.sweep.run.gpus import GpuLocks, Host, find_host
from tilecast.explore.sweep.spec.spec import load_spec

EXAMPLE = ROOT / "explore" / "sweep" / "examples" / "gpus.toml"


@pytest.fixture
def host() -> Host:
    return _host()


@lru_cache(maxsize=1)
def _host() -> Host:
    return find_host()


def specification(host: Host) -> Any:
    """Two shapes of six variants: the shipped example on Hopper, tiles of the portable family elsewhere."""
    if host.gpus[0].capability == 90:
        return EXAMPLE
    tiles = {"family": "triton", "tile_m": [64, 128], "tile_n": [32, 64, 128], "warps": 8}
    return {"do": "measure", "rounds": 9, "workload": [{"batch": [1, 2], "seqlen": 2048}], "variant": [tiles]}


def cubins(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*.cubin")}


def test_every_gpu_times_its_own_items_one_after_the_other(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "triton"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    monkeypatch.setenv("TILECAST_CACHE", str(tmp_path))
    raw = specification(host)
    plan = api._measurement_plan(load_spec(raw), host)
    stages: list[tuple[str, int, int]] = []
    api._compile(
        plan.items,
        host,
        0,
        lambda stage, done, total, *_: stages.append((stage, done, total)),
        api._greeting("measure", ()),
        "test",
    )
    ahead = cubins(cache)
    assert len(ahead) >= 6 and stages[-1] == ("compiled", len(plan.items), len(plan.items))

    table = tilecast.sweep(raw, store=tmp_path / "s.db")
    assert table.computed == len(table) == len(plan.items)
    assert [row["reason"] for row in table if row["status"] != "ok"] == []
    # Timing found every kernel compiled: what came on top are the protocol's own stamps.
    assert sorted(name for name in cubins(cache) - ahead if "stamp" not in name) == []

    spans: dict[str, list[tuple[float, float]]] = {}
    for row in table:
        spans.setdefault(row["gpu_uuid"], []).append((row["begin_unix_s"], row["end_unix_s"]))
        assert row["gpu"] == host.gpus[0].name and row["time_ms"] > 0 and row["relative_error"] < 0.03
    assert set(spans) == {gpu.uuid for gpu in host.gpus}
    for mine in spans.values():
        mine.sort()
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(mine))
    if len(spans) > 1:  # they worked at the same time, not in turns
        first, second = sorted(spans.values(), key=lambda mine: mine[0])[:2]
        assert second[0][0] < first[-1][1]

    again = tilecast.sweep(raw, store=tmp_path / "s.db")
    assert (again.known, again.computed, again.rows) == (len(table), 0, table.rows)


def test_clock_and_power_are_read_from_the_gpu_that_is_timed(host: Host) -> None:
    import pynvml

    from tilecast.validation.lab.measure.telemetry import Nvml

    for gpu in host.gpus:
        assert pynvml.nvmlDeviceGetUUID(Nvml(gpu.uuid)._gpu) == gpu.uuid


def test_a_second_sweep_on_the_same_gpus_is_refused(host: Host, tmp_path: Path) -> None:
    locks = GpuLocks(host.gpus)
    try:
        with pytest.raises(SweepError, match="another tilecast is timing"):
            tilecast.sweep(specification(host), store=tmp_path / "s.db")
    finally:
        locks.close()
    assert not list(tmp_path.iterdir())


def test_measuring_on_a_gpu_that_is_timed_on_is_refused(host: Host, tmp_path: Path) -> None:
    locks = GpuLocks(host.gpus)
    table = tmp_path / "t.csv"
    for arguments in (
        ["measure", "--kernel", "cudnn", "-o", str(table)],
        ["calibrate", "--quick", "-o", str(tmp_path / "m.toml"), "--store", str(tmp_path / "s.csv")],
        ["bundle", "--quick", "-o", str(tmp_path / "b.zip")],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "tilecast.cli", *arguments], capture_output=True, text=True, check=False
        )
        assert done.returncode == 2, done.stderr
        assert "another tilecast is timing on GPU-" in done.stderr
        assert not list(tmp_path.iterdir())
    locks.close()
    arguments = ["measure", "--kernel", "cudnn", "--seqlen", "1024", "--rounds", "3", "-o", str(table)]
    assert subprocess.run([sys.executable, "-m", "tilecast.cli", *arguments], check=False).returncode == 0
