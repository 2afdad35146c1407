"""Matrix instruction costs against published measurements."""

from __future__ import annotations

import csv

import pytest

from tilecast.base.data import PUBLISHED
from tilecast.model.machine.machine import load_machine
from tilecast.model.pipeline.tensor_core import (
    mma_completion_latency_cycles,
    mma_instruction_cycles,
    mma_smem_bytes,
    mma_sync_tile_cycles,
    mma_tile_cycles,
)

TABLE = PUBLISHED / "tcgen05_b200.csv"
ROWS = list(csv.DictReader(TABLE.open()))
B200 = load_machine("b200")


def test_the_table_has_the_48_shapes() -> None:
    assert len({(r["a_home"], r["cta_group"], r["m"], r["n"]) for r in ROWS}) == 48


@pytest.mark.parametrize("row", ROWS, ids=lambda r: f"{r['a_home']}-{r['cta_group']}cta-{r['m']}x{r['n']}")
def test_each_measured_shape_within_5_percent(row: dict[str, str]) -> None:
    cycles = mma_instruction_cycles(B200, int(row["m"]), int(row["n"]), "bf16", row["a_home"], int(row["cta_group"]))
    assert cycles == pytest.approx(float(row["cycles_per_instruction"]), rel=0.05)


@pytest.mark.parametrize("row", [r for r in ROWS if r["m"] in ("128", "256") and (r["m"] == "256" or r["cta_group"] == "1")],
                         ids=lambda r: f"{r['a_home']}-{r['cta_group']}cta-{r['m']}x{r['n']}")  # fmt: skip
def test_issue_to_wait_of_one_instruction(row: dict[str, str]) -> None:
    m, n, group = int(row["m"]), int(row["n"]), int(row["cta_group"])
    latency = mma_completion_latency_cycles(B200, m, n, "bf16", row["a_home"], group)
    assert n / 2 + latency == pytest.approx(float(row["issue_to_wait_cycles"]), abs=3)


def test_fa4_tile_costs_its_table() -> None:
    qk = mma_tile_cycles(B200, 128, 128, 128, "bf16", "smem", 1)
    pv = mma_tile_cycles(B200, 128, 128, 128, "bf16", "tmem", 1)
    assert qk + pv == 1024
    read = mma_smem_bytes(128, 128, 128, "bf16", "smem") + mma_smem_bytes(128, 128, 128, "bf16", "tmem")
    assert read / B200["smem.bytes_per_clk"] == 768
    assert mma_tile_cycles(B200, 128, 128, 128, "fp8", "smem", 1) == qk / 2


def test_wgmma_reads_limit_narrow_tiles() -> None:
    h100 = load_machine("h100-sxm")
    assert mma_instruction_cycles(h100, 64, 256, "fp16", "smem") == 128
    assert mma_instruction_cycles(h100, 64, 64, "fp16", "smem") == 32
    assert mma_instruction_cycles(h100, 64, 8, "fp16", "smem") == 18
    assert mma_instruction_cycles(h100, 64, 8, "fp16", "register") == 13.17


def test_a_faster_array_scales_until_memory_binds() -> None:
    double = B200.with_facts({"tensor.bf16_flop_per_clk": 16384})
    assert mma_instruction_cycles(double, 128, 256, "bf16", "tmem") == 64
    assert mma_instruction_cycles(double, 128, 256, "bf16", "smem") == 96  # 32 + N/4: the operand read


def test_legacy_path_on_hopper_is_slower_than_wgmma() -> None:
    h100 = load_machine("h100-sxm")
    legacy = mma_sync_tile_cycles(h100, 64, 128, 128, "bf16")
    assert legacy == pytest.approx(mma_tile_cycles(h100, 64, 128, 128, "bf16", "smem") * 4096 / 2723, rel=1e-3)


@pytest.mark.parametrize(
    ("machine", "arguments", "message"),
    [
        ("b200", (192, 128, "bf16", "smem", 1), "tcgen05.mma is m64/128"),
        ("b200", (128, 512, "bf16", "smem", 1), "n8..256"),
        ("h100-sxm", (128, 128, "bf16", "smem", 1), "wgmma is m64"),
        ("a100", (64, 128, "bf16", "smem", 1), "mma.sync reads A from registers"),
        ("b200", (128, 128, "int4", "smem", 1), "no matrix instruction for dtype 'int4'"),
    ],
)
def test_shapes_the_unit_does_not_have_are_refused(machine: str, arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mma_instruction_cycles(load_machine(machine), *arguments)
