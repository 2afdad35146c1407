"""Figures of docs/fp8.md are those of the measured tables, for the variants that ship."""

from __future__ import annotations

import csv
from pathlib import Path

from tilecast.base.data import MEASURED
from tilecast.codegen.ship import read_e4m3_list
from tilecast.model.families import parse_variant
from tilecast.model.forecast.predict import predict
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine

PAGE = (Path(__file__).parents[3] / "docs" / "fp8.md").read_text(encoding="utf-8")


def table(name: str) -> list[dict[str, str]]:
    with (MEASURED / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def shipped(row: dict[str, str]) -> bool:
    """Whether the row is of a kernel that ships; a threshold says nothing where O is rescaled always."""
    dim, mask = int(row["head_dim"]), row["mask"]
    if row["variant"] == "bf16":
        return False
    variant = parse_variant(f"family=fa3,{row['variant'].replace('rescale_threshold=4,', '')}")
    return any(
        (k.workload.head_dim_qk, k.workload.mask) == (dim, mask) and parse_variant(f"family=fa3,{k.variant}") == variant
        for k in read_e4m3_list()
        if k.family == "hopper_ws"
    )


def test_times_are_the_measured_ones() -> None:
    rows = table("h200_fp8.csv")
    found = {(r["head_dim"], r["seqlen"], r["mask"], r["input"]): float(r["tflops"]) for r in rows if shipped(r)}
    found |= {(r["head_dim"], r["seqlen"], r["mask"], "bf16"): float(r["tflops"]) for r in rows if r["input"] == "bf16"}
    shapes = {key[:3] for key in found if key[3] == "V as stored"}
    assert len(shapes) == 5
    for shape in shapes:
        values = " | ".join(f"{found[*shape, how]:.0f}" for how in ("V as stored", "V given", "bf16"))
        assert f"| {' | '.join(shape)} | {values} |" in PAGE


def test_errors_are_the_measured_ones() -> None:
    rows = [row for row in table("h200_fp8_errors.csv") if shipped(row) and row["mask"] == "none"]
    assert {row["head_dim"] for row in rows} == {"64", "128"}
    for protocol in ("randn", "sink", "positive", "outliers"):
        of = {row["head_dim"]: row for row in rows if row["protocol"] == protocol}
        values = (float(of[d][name]) for d in ("64", "128") for name in ("error", "float64_with_rounded_p"))
        assert " | ".join(f"{x:#.3g}" for x in values) in PAGE, protocol


def test_what_ships_lost_no_more_than_the_format_and_is_deterministic() -> None:
    rows = table("h200_fp8_errors.csv")
    assert f"all {len(rows)} runs" in PAGE
    assert all(row["same_bits"] == "1" for row in rows)
    for row in filter(shipped, rows):
        if row["protocol"] != "positive":
            assert float(row["error"]) <= 1.5 * float(row["float64_with_rounded_p"])


def test_forecast_costs_of_a_threshold_are_the_models() -> None:
    machine, knobs = load_machine("b200"), "fa4:cta_group=2,emulated_share=0.1875,scheduler=persistent"
    for batch, length in ((32, 512), (8, 2048), (4, 4096), (1, 16384)):
        work = Workload(batch, 16, 16, length, length, dtype="fp8")
        times = [
            predict(
                work, machine, parse_variant(f"{knobs},rescale_threshold={most}"), clock="short", interval=False
            ).time_ms
            for most in (4, 0.75, 0)
        ]
        row = next(line for line in PAGE.splitlines() if line.startswith(f"| {batch} x {length} |"))
        assert [row.split("|")[column].strip() for column in (3, 5)] == [
            f"{100 * (time / times[0] - 1):+.1f} %" for time in times[1:]
        ]
