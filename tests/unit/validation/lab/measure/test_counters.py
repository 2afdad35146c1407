"""Counters of Nsight Compute: which metrics are asked for, and how its CSV becomes rows."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tilecast.model.kernel.workload import Workload
from tilecast.validation.lab.counters import collect as module
from tilecast.validation.lab.counters.collect import COLUMNS, METRICS, choose, collect, parse, write
from tilecast.validation.lab.measure.plan import Item, PlanError

DRAM, CYCLES = "dram__bytes.sum", "sm__cycles_elapsed.max"
HEAD = f'"ID","Process ID","Kernel Name","device__attribute_display_name","{DRAM}","{CYCLES}"'
PAGE = f"""==PROF== Connected to process 1 (/usr/bin/python3)
some output of the program, with "ID" in it
==PROF== Disconnected from process 1
{HEAD}
"","","","","byte","cycle"
"0","1","attention_forward_hopper","NVIDIA H200","1,234,567","1000"
"1","1","void at::native::fill_kernel<int>(int*, long)","NVIDIA H200","1","2"
"2","1","attention_forward","NVIDIA H200","8","n/a"
==PROF== a remark after the table
"""
ITEMS = [
    Item("hopper_ws", "family=fa3,tile_n=64", Workload(2, 8, 4, 512, 512, 128, 64, "causal"), "h200-sxm"),
    Item("triton", "family=fa2", Workload(), "h200-sxm"),
]


def test_only_attention_kernels_count_and_the_row_of_units_does_not() -> None:
    rows = parse(PAGE)
    assert [row["ID"] for row in rows] == ["0", "2"]
    assert rows[0][DRAM] == "1,234,567"


def test_output_without_a_table_has_no_rows() -> None:
    assert parse("") == []
    assert parse("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission\n") == []
    assert parse(HEAD + "\n") == []


def test_the_first_known_name_of_a_counter_is_asked_for() -> None:
    newest, older = (METRICS["issue_percent"][i] for i in (0, 1))
    base = {name: name.split(".")[0] for name in (newest, older)}
    assert choose({base[newest], base[older]}) == {"issue_percent": newest}
    assert choose({base[older]}) == {"issue_percent": older}
    assert choose(set()) == {}
    assert choose({"dram__bytes", "something_else"}) == {"dram_bytes": DRAM}
    everything = {name.split(".")[0] for names in METRICS.values() for name in names}
    assert {counter: names[0] for counter, names in METRICS.items()} == choose(everything)


@pytest.fixture
def ncu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):  # type: ignore[no-untyped-def]
    """Let a script that prints a page stand for Nsight Compute."""

    def install(page: str) -> None:
        (tmp_path / "page.csv").write_text(page)
        script = tmp_path / "ncu"
        script.write_text(
            "#!/bin/sh\ncase $1 in\n"
            "--query-metrics) printf 'Device H200\\n  indented\\ndram__bytes  # bytes\\nsm__cycles_elapsed  #\\n';;\n"
            "--version) printf 'NVIDIA (R) Nsight Compute\\nVersion 2025.3.1.0 (build 1)\\n';;\n"
            f"*) cat '{tmp_path}/page.csv'; echo 'ERR_NVGPUCTRPERM: ask your administrator' >&2;;\nesac\n"
        )
        script.chmod(0o755)
        monkeypatch.setattr(module.shutil, "which", lambda name: str(script))

    return install


def test_every_item_gets_a_row_a_counter(ncu, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    ncu(PAGE)
    rows = collect(ITEMS, "0.1")
    assert [(row["kernel"], row["counter"], row["metric"], row["value"]) for row in rows] == [
        ("hopper_ws", "cycles", CYCLES, 1000.0),
        ("hopper_ws", "dram_bytes", DRAM, 1234567.0),
        ("triton", "dram_bytes", DRAM, 8.0),  # its cycles were not available
    ]
    assert {(row["gpu"], row["ncu"], row["machine"]) for row in rows} == {("NVIDIA H200", "2025.3.1.0", "h200-sxm")}
    assert (rows[0]["seqlen_q"], rows[0]["head_dim_v"], rows[0]["mask"]) == (512, 64, "causal")
    write(tmp_path / "c.csv", rows)
    with (tmp_path / "c.csv").open(newline="") as file:
        back = list(csv.DictReader(file))
    assert tuple(back[0]) == COLUMNS
    assert [{k: str(v) for k, v in row.items()} for row in rows] == back


def test_a_count_that_does_not_match_is_refused_with_the_reason(ncu) -> None:  # type: ignore[no-untyped-def]
    ncu("")
    with pytest.raises(PlanError, match="ncu reported 0 kernels for 2 items: ERR_NVGPUCTRPERM: ask your administrator"):
        collect(ITEMS, "0.1")
    ncu(PAGE)
    with pytest.raises(PlanError, match="2 kernels for 1 items"):
        collect(ITEMS[:1], "0.1")


def test_without_nsight_compute_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    with pytest.raises(PlanError, match="put ncu on the PATH"):
        collect(ITEMS, "0.1")
