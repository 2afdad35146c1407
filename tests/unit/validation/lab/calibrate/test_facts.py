"""Rows to facts to a machine file, on rows made by hand and on the rows measured on an H200."""

from __future__ import annotations

from pathlib import Path

import pytest

from tilecast.base.data import MEASURED
from tilecast.model.machine.machine import load_machine
from tilecast.validation.lab.calibrate.cases import Reading
from tilecast.validation.lab.calibrate.facts.facts import derive, holes, source_text
from tilecast.validation.lab.calibrate.facts.rule import Table, line
from tilecast.validation.lab.calibrate.gpu import Identity
from tilecast.validation.lab.calibrate.groups import all_cases
from tilecast.validation.lab.calibrate.report import all_facts, base_machine, machine_text, report_text
from tilecast.validation.lab.calibrate.run import chosen
from tilecast.validation.lab.calibrate.store import Row, params_text, read_rows, rows_of

RECORDED = MEASURED / "h200_calibrate.csv"
H200 = Identity("NVIDIA H200", "580.159.04", 90, 132, 62914560, 232448, 1980.0)


def row(place: str, quantity: str, value: float, unit: str = "cycles", spread: float = 0.0, **params: object) -> Row:
    group, benchmark = place.split("/")
    return rows_of(
        group, benchmark, params, {quantity: Reading((value - spread, value, value + spread), unit)},  # type: ignore[arg-type]
        gpu="NVIDIA H200", driver="580", clock_mhz=1980.0, date="2026-01-01", command="tilecast calibrate", source_sha="s",
    )[0]  # fmt: skip


def test_matrix_latency_is_the_wait_less_the_steps_at_the_steady_rate() -> None:
    rows = [
        row("tensor/wgmma_rate", "cycles_per_mma", 64.5, n=128, a="smem", dtype="bf16", b="k-major", warpgroups=1),
        row("tensor/wgmma_latency", "wait_cycles", 586.0, n=128, a="smem", steps=8, warpgroups=1, b="k-major"),
        row("tensor/wgmma_latency", "wait_cycles", 1112.0, n=128, a="smem", steps=16, warpgroups=1, b="k-major"),
        row("tensor/wgmma_latency", "wait_cycles", 9999.0, n=128, a="smem", steps=8, warpgroups=2, b="k-major"),
    ]
    fact = derive(rows)["tensor.mma_latency_cycles"]
    assert (fact.value, fact.low, fact.high) == (70.0, 70.0, 80.0)
    assert fact.kind == "measured"
    assert "tensor/wgmma_latency" in fact.source
    assert "NVIDIA H200" in fact.source
    # Half of the rows is no fact.
    assert "tensor.mma_latency_cycles" not in derive(rows[1:])


def test_fetch_facts_come_from_code_by_its_size() -> None:
    def length(size_kb: int, groups: int, value: float, sms: str = "all apart", chains: int = 16) -> Row:
        return row(
            "code/length", "cycles", value, "cycles/inst", instructions=size_kb * 64 // groups, warpgroups=groups,
            shared=False, sms=sms, chains=chains,
        )  # fmt: skip

    rows = [length(kb, 2, value) for kb, value in ((16, 1.03), (32, 1.06), (48, 2.0), (128, 2.8), (256, 4.8))]
    rows += [length(kb, 3, value) for kb, value in ((48, 2.1), (120, 2.6), (240, 5.0))]
    rows += [length(kb, 2, value, "all") for kb, value in ((96, 2.0), (128, 2.2), (160, 3.6))]
    rows += [length(48, 2, 9.0, chains=1), length(48, 1, 9.0)]
    facts = derive(rows)
    assert (facts["code.l1_bytes"].value, facts["code.l1_bytes"].high) == (32 << 10, 48 << 10)
    assert (facts["code.l2_bytes"].value, facts["code.l2_bytes"].high) == (128 << 10, 160 << 10)
    assert facts["code.fetch_cycles"].value == pytest.approx(2.05)
    assert facts["code.fetch_full_cycles"].value == pytest.approx(2.7)
    assert facts["code.fetch_far_cycles"].value == pytest.approx(4.9)
    assert "code.fetch_far_cycles" not in derive(rows[:4])


def test_the_store_queue_is_where_a_burst_begins_to_wait() -> None:
    # Four cycles to issue, 16 a warp to leave: ten under way fill the queue.
    def burst(warps: int, stores: int) -> Row:
        early, late, began = 4.0 * warps, 16.0 * warps, 40.0
        full = 10.0 / (warps * (1.0 - early / late))  # stores a warp when ten more came than left
        took = began + early * (min(stores, full) - 1) + late * max(0.0, stores - full)
        return row("local/burst", "issue_cycles", took, stores=stores, warps_per_partition=warps)

    facts = derive([burst(warps, stores) for warps in (2, 3) for stores in (1, 2, 3, 4, 16, 24)])
    assert facts["local.store_queue_depth"].value == pytest.approx(10.0, abs=3.0)


def test_a_hand_over_is_what_the_clocks_say_less_their_code() -> None:
    rows = [row("sync/one_way", "cycles", value, waiters=n) for n, value in ((1, 72.0), (4, 75.0), (8, 80.0))]
    fact = derive(rows)["sync.mbarrier_one_way_cycles"]
    assert (fact.value, fact.low, fact.high) == (50.0, 47.0, 55.0)


def test_lanes_come_from_cycles_and_the_range_from_repeats() -> None:
    fact = derive([row("arithmetic/rate", "cycles_per_step", 8.0, spread=0.5, stream="ex2", warps_per_partition=4)])[
        "mufu.ex2_per_clk"
    ]
    assert (fact.value, fact.low, fact.high) == (16.0, 128 / 8.5, 128 / 7.5)


def test_tile_latency_is_the_line_at_no_bytes() -> None:
    rows = []
    for size, took in ((8192, 440.0), (16384, 516.0), (32768, 668.0)):
        for name, add in (("", 0.0), ("p10_", -10.0), ("p90_", 20.0)):
            rows.append(
                row("tma/load_latency", f"latency_{name}cycles", took + add, source="l2", boxes=1, tile_bytes=size)
            )
    facts = derive(rows)
    assert facts["tma.latency_l2_cycles"].value == pytest.approx(364.0)
    assert (facts["tma.latency_l2_cycles"].low, facts["tma.latency_l2_cycles"].high) == pytest.approx((354.0, 384.0))
    assert facts["tma.bytes_per_clk"].value == pytest.approx(8192 / 76)
    assert line([(0.0, 1.0), (2.0, 5.0)]) == (1.0, 2.0)


def power_rows(
    name: str, watt: float, work: float, mhz: float, active: int = 0, fill: float = 0.0, set_mhz: float | None = None
) -> list[Row]:
    """Rows of a load; under matrix work nine of ten cycles of the set clock are executed."""
    values = {
        "power_w": (watt, "W"), "work_per_second": (work, "FLOP/s"), "fill_per_second": (fill, "B/s"),
        "effective_clock_mhz": (mhz, "MHz"), "nvml_clock_mhz": (set_mhz or mhz / 0.9, "MHz"),
    }  # fmt: skip
    return [
        row("power/load", key, value, unit, load=name, active_sms=active)
        for key, (value, unit) in values.items()
        if value
    ]


def test_energy_exponent_comes_from_the_same_work_on_fewer_sms() -> None:
    name = "wgmma bf16 n256 A in smem"
    rows = [
        *power_rows("idle", 100.0, 0.0, 2000.0),
        *power_rows(name, 700.0, 600e12, 1500.0),
        # A joule 1.44 times as dear at 1.2 times the clock: exponent 2.
        *power_rows(name, 100.0 + 1.44 * 300.0, 300e12, 1800.0, active=60),
        # As slow as the full chip: says nothing.
        *power_rows(name, 650.0, 500e12, 1510.0, active=120),
    ]
    facts = derive(rows)
    assert facts["power.energy_exponent"].value == pytest.approx(2.0)
    assert facts["power.tensor_clock_share"].value == pytest.approx(0.9)
    # The voltage is that of the set clock: a joule at 1500 executed is a joule at 1667 set.
    one = power_rows("wgmma bf16 n128 A in smem", 700.0, 600e12, 1500.0)
    assert derive([*rows, *one])["power.tensor_pj_per_flop_bf16"].value == pytest.approx(1.0 / (1.5 / 0.9) ** 2)
    assert "power.l2_energy_exponent" not in facts


def matrix_and_copies(noise: float = 0.0, one_clock: bool = False) -> list[Row]:
    """Watts of a chip whose FLOP costs 0.2 pJ f^1.8 and whose byte from L2 20 pJ f^0.6, at set clocks f."""
    name, rows = "wgmma bf16 n256 A in smem", power_rows("idle", 100.0, 0.0, 2000.0, set_mhz=2000.0)
    places = ((0, 1.75), (110, 1.85), (90, 1.95), (66, 2.0))
    for i, (active, ghz) in enumerate(places):
        for fill in (0.0, 6e12):
            work = 600e12 - 1e12 * active
            slower = 2.0 if one_clock else ghz - 0.2 if fill else ghz
            watt = work * 0.2e-12 * slower**1.8 + fill * 20e-12 * slower**0.6
            off = 1.0 + noise * (-1) ** i
            load = f"{name} + l2 fill" if fill else name
            rows += power_rows(load, 100.0 + watt * off, work, slower * 900.0, active, fill)
    return rows + power_rows("l2 fill", 100.0 + 9e12 * 20e-12 * 2.0**0.6, 0.0, 2000.0, fill=9e12, set_mhz=2000.0)


def test_matrix_work_and_copies_from_l2_grow_with_the_clock_each_in_its_own_way() -> None:
    facts = derive(matrix_and_copies())
    assert facts["power.energy_exponent"].value == pytest.approx(1.8)
    assert facts["power.l2_energy_exponent"].value == pytest.approx(0.6)
    assert facts["power.l2_pj_per_byte"].value == pytest.approx(20.0)
    assert facts["power.energy_exponent"].low == facts["power.energy_exponent"].high == pytest.approx(1.8)
    # Noise widens the range, which still holds the value.
    fact = derive(matrix_and_copies(0.01))["power.energy_exponent"]
    assert fact.low <= fact.value <= fact.high
    assert fact.high - fact.low > 0.02
    # A power limit that never holds says nothing about growth.
    assert not {"power.energy_exponent", "power.l2_pj_per_byte", "power.alu_pj_per_op"} & set(
        derive(matrix_and_copies(one_clock=True))
    )


def test_energy_of_an_instruction_is_what_its_stream_takes_more() -> None:
    def stream(name: str, pj: float, rate: float = 1e13) -> list[Row]:
        return power_rows(name, 100.0 + pj * 1e-12 * rate, rate, 2000.0, set_mhz=2000.0)

    rows = [
        *matrix_and_copies(), *stream("chaos", 12.0), *stream("chaos+fold", 20.0), *stream("chaos, one chain", 12.0, 3e12),
        *stream("chaos+ex2+fold", 38.0), *stream("chaos+2 folds", 27.0), *stream("chaos+max2+fold", 32.0),
        *stream("chaos+pack_bf16x2+fold", 30.0),
    ]  # fmt: skip
    facts = derive(rows)
    assert facts["power.mufu_pj_per_op"].value == pytest.approx(18.0 / 2.0**1.8)
    alu = facts["power.alu_pj_per_op"]
    # Two folds are one instruction, so the second adds half of one.
    assert (alu.low, alu.high) == pytest.approx((10.0 / 2.0**1.8, 14.0 / 2.0**1.8))
    assert alu.value == pytest.approx(12.0 / 2.0**1.8)
    # Watts go through idle power at no work: SMs draw nothing for being active.
    assert facts["power.active_w_at_1ghz"].value == pytest.approx(0.0, abs=1e-6)
    more = [*rows, *power_rows("chaos, one chain", 100.0 + 36.0 + 40.0, 3e12, 2000.0, set_mhz=2000.0)]
    assert derive(more)["power.active_w_at_1ghz"].value == pytest.approx(40.0 * 10 / 7 / 2.0**2.8, rel=1e-6)
    assert "power.fma_pj_per_op" not in facts


def test_a_table_refuses_to_guess_between_rows() -> None:
    table = Table([row("sync/cost", "cycles", 1.0, operation="a"), row("sync/cost", "cycles", 2.0, operation="b")])
    assert table.one("sync/cost", "cycles", operation="b").value == 2.0
    assert table.one("sync/cost", "cycles", operation="c") is None
    with pytest.raises(LookupError, match="2 rows"):
        table.one("sync/cost", "cycles")


def test_a_value_no_machine_file_accepts_is_refused_and_stays_a_hole() -> None:
    rows = [row("smem/latency", "latency_cycles", 9000.0, access=name) for name in ("ld_shared", "ldmatrix")]
    facts, refused = all_facts(rows, H200)
    assert "smem.latency_cycles" not in facts
    assert "takes 1 to 500 cycles, got 9000" in refused["smem.latency_cycles"]
    assert "refused: smem.latency_cycles" in report_text(rows, H200, "x.toml")


@pytest.mark.parametrize(
    ("name", "capability", "base"),
    [
        ("NVIDIA H200", 90, "h200-sxm"), ("NVIDIA H100 80GB HBM3", 90, "h100-sxm"), ("NVIDIA B200", 100, "b200"),
        ("NVIDIA GB200", 100, "gb200"), ("NVIDIA A100-SXM4-80GB", 80, "a100"), ("NVIDIA GeForce RTX 5090", 120, "rtx-5090"),
        ("NVIDIA B300 SXM6 AC", 103, "b300"),
    ],
)  # fmt: skip
def test_the_machine_inherited_is_the_nearest_shipped_one(name: str, capability: int, base: str) -> None:
    assert base_machine(name, capability).name == base


def test_an_unknown_capability_is_said_in_the_report() -> None:
    other = Identity("NVIDIA L40S", "580", 89, 142, 96 << 20, 101376, 2520.0)
    assert "no shipped machine has compute capability 89" in report_text([], other, "x.toml")


def test_without_rows_everything_measurable_is_a_hole() -> None:
    base = load_machine("h200-sxm")
    missing = holes(base, derive([]))
    assert "mufu.ex2_latency_cycles" in missing
    assert "reg.file_bytes" not in missing


@pytest.fixture(scope="module")
def recorded() -> list[Row]:
    return read_rows(RECORDED)


def test_the_recorded_h200_rows_pass_the_sanity_checks(recorded: list[Row]) -> None:
    table = Table(recorded)

    def value(place: str, quantity: str, **params: object) -> float:
        found = table.one(place, quantity, **params)  # type: ignore[arg-type]
        assert found is not None, (place, params)
        return found.value

    for n in (64, 128, 256):
        for a in ("smem", "register"):
            # The array takes N/2 cycles; nothing can be faster, and a group of eight costs under one and a half cycles each.
            rate = value("tensor/wgmma_rate", "cycles_per_mma", n=n, a=a, dtype="bf16", b="k-major", warpgroups=1)
            assert n / 2 <= rate <= n / 2 + 1.5
    assert value("arithmetic/rate", "cycles_per_step", stream="ex2", warps_per_partition=4) == pytest.approx(8, abs=0.1)
    assert value("arithmetic/rate", "cycles_per_step", stream="max2", warps_per_partition=4) == pytest.approx(
        2, abs=0.1
    )
    assert all(row.low <= row.value <= row.high for row in recorded)
    # No port carries more than 128 bytes a clock.
    assert max(row.value for row in table.all("smem/beside_mma", "stream_bytes_per_clk")) < 128.5


def test_the_recorded_h200_rows_give_a_complete_machine(recorded: list[Row], tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(machine_text(recorded, H200, "mine"))
    machine = load_machine(path)
    assert machine.fact("tensor.mma_latency_cycles").kind == "measured"
    assert machine.fact("reg.file_bytes").inherited_from
    facts, refused = all_facts(recorded, H200)
    assert not refused
    assert {key for key, fact in machine.facts.items() if not fact.inherited_from} == set(facts)
    for key, fact in facts.items():
        assert fact.low is None or fact.low <= fact.value <= fact.high, key
    assert 0 < machine["regs.mma_share"] < 1
    text = report_text(recorded, H200, str(path))
    for hole in holes(load_machine("h200-sxm"), facts):
        assert f"  {hole} = " in text


def test_the_shipped_energies_are_what_the_recorded_rows_give(recorded: list[Row]) -> None:
    shipped, found = load_machine("h200-sxm"), derive(recorded)
    # How fast the limiter reacts has a table of its own (tests/unit/model/chip/test_power.py), as has from when on products slow the clock.
    elsewhere = ("power.reaction_s", "power.tensor_clock_busy")
    keys = [key for key in shipped.facts if key.startswith("power.") and key not in elsewhere]
    assert len(keys) == 14
    for key in keys:
        assert shipped[key] == pytest.approx(found[key].value, rel=1e-3), key


def test_sources_name_the_command_and_the_rows() -> None:
    rows = [row("sync/cost", "cycles", 1.0, operation=name) for name in "abcd"]
    text = source_text(rows)
    assert text.startswith("tilecast calibrate (NVIDIA H200, driver 580, 2026-01-01): sync/cost {operation:a} cycles")
    assert text.endswith("and 1 rows more")


def test_the_short_list_gives_the_same_facts_it_only_gives_fewer(recorded: list[Row]) -> None:
    short = {(c.group, c.benchmark, params_text(c.params)) for c in chosen(all_cases(), 90, quick=True)}
    full = derive(recorded)
    quick = derive(r for r in recorded if (r.group, r.benchmark, r.params) in short)
    assert len(quick) > 30
    for key, fact in quick.items():
        # The short list's range of conditions is narrower, so medians over conditions may sit elsewhere in it.
        assert fact.value == pytest.approx(full[key].value, rel=0.06), key


def test_tcgen05_rate_and_latency_come_from_two_group_lengths() -> None:
    rows = []
    for ctas, m in ((1, 128), (2, 256)):
        for a, fixed in (("smem", 140.0), ("tmem", 105.0)):
            for steps in (8, 16):
                took = steps * 128.0 + fixed + 30 * (ctas - 1)
                rows.append(row("tensor/tcgen05_latency", "wait_cycles", took, m=m, n=256, a=a, steps=steps, ctas=ctas))
    facts = derive(rows)
    assert facts["tensor.bf16_flop_per_clk"].value == pytest.approx(8192.0)
    found = [facts[f"tensor.mma_latency{name}_cycles"].value for name in ("", "_ts", "_2cta", "_2cta_ts")]
    assert found == pytest.approx([140.0, 105.0, 170.0, 135.0])
    # Nothing of another kind of matrix instruction is made up.
    assert "tensor.mma_latency_register_cycles" not in facts
    assert "tensor.fp8_flop_per_clk" not in facts
