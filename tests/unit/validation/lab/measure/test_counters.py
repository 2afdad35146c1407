"""Counters of Nsight Compute: which metrics are asked for, and how its CSV becomes rows."""

from __future__ import annotations

import csv
import json
import sys
from dataclasses import replace
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


NCU = """#!{python}
import json, pathlib, sys
if sys.argv[1] == "--query-metrics":
    print("Device H200\\n  indented\\ndram__bytes  # bytes\\nsm__cycles_elapsed  #")
elif sys.argv[1] == "--version":
    print("NVIDIA (R) Nsight Compute\\nVersion 2025.3.1.0 (build 1)")
else:
    plays = pathlib.Path({plays!r})
    (page, fates, words), *rest = json.loads(plays.read_text())
    plays.write_text(json.dumps(rest))
    listing, told = map(pathlib.Path, sys.argv[-3:-1])
    assert len(fates) <= len(json.loads(listing.read_text()))
    told.write_text("".join(json.dumps(fate) + "\\n" for fate in fates))
    print(page)
    print(words, file=sys.stderr)
"""


@pytest.fixture
def ncu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):  # type: ignore[no-untyped-def]
    """Let a script stand for Nsight Compute: (page it prints, fates its target writes, last words), process by process."""

    def install(*plays: tuple[str, list[str], str]) -> None:
        listing = tmp_path / "plays.json"
        listing.write_text(json.dumps(plays))
        script = tmp_path / "ncu"
        script.write_text(NCU.format(python=sys.executable, plays=str(listing)))
        script.chmod(0o755)
        monkeypatch.setattr(module.shutil, "which", lambda name: str(script))

    return install


def test_every_item_gets_a_row_a_counter(ncu, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    ncu((PAGE, ["", ""], ""))
    rows, failures = collect(ITEMS, "0.1")
    assert failures == []
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


def page(*cycles: int) -> str:
    """What ncu prints of launches that took so many cycles."""
    return "\n".join([HEAD, *(f'"{n}","1","attention_forward","NVIDIA H200","1","{c}"' for n, c in enumerate(cycles))])


def test_a_kernel_that_takes_its_process_down_costs_itself(ncu) -> None:  # type: ignore[no-untyped-def]
    items = [replace(ITEMS[1], variant=f"family=fa2,tile_n={n}") for n in (16, 32, 64, 96, 128)]
    # The second cannot be written; the third faults, and ncu still has a row of it; the rest is counted in a new process.
    ncu((page(10, 30), ["", "no such tile"], "CUDA error: an illegal memory access"), (page(40, 50), ["", ""], ""))
    rows, failures = collect(items, "0.1")
    assert [(row["variant"], row["value"]) for row in rows if row["counter"] == "cycles"] == [
        ("family=fa2,tile_n=16", 10.0), ("family=fa2,tile_n=96", 40.0), ("family=fa2,tile_n=128", 50.0),
    ]  # fmt: skip
    assert [(f.item, f.reason, f.fatal) for f in failures] == [
        (items[1], "no such tile", False),
        (items[2], "its process ended: CUDA error: an illegal memory access", True),
    ]


def test_a_count_that_does_not_match_is_refused_with_the_reason(ncu) -> None:  # type: ignore[no-untyped-def]
    ncu(("", ["", ""], "ERR_NVGPUCTRPERM: ask your administrator"))
    with pytest.raises(PlanError, match="ncu reported 0 kernels for 2 items: ERR_NVGPUCTRPERM: ask your administrator"):
        collect(ITEMS, "0.1")
    ncu((PAGE, [""], ""))
    with pytest.raises(PlanError, match="2 kernels for 1 items"):
        collect(ITEMS[:1], "0.1")


def test_a_target_that_never_gets_to_a_kernel_is_given_up(ncu) -> None:  # type: ignore[no-untyped-def]
    ncu(*[("", [], "no module named torch")] * 3)
    with pytest.raises(PlanError, match="ncu counted none of 3 kernels: its process ended: no module named torch"):
        collect([*ITEMS, *ITEMS], "0.1")


def test_without_nsight_compute_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    with pytest.raises(PlanError, match="put ncu on the PATH"):
        collect(ITEMS, "0.1")
