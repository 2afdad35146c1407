"""Rows to facts of a machine file: a pure function, one rule a fact, every rule with the rows it rests on.

A rule gives the value from the median rows, and low and high from the spread over repeats or, where the number depends
on conditions that a kernel meets, from the range over those conditions.  A rule without its rows gives nothing: the
fact keeps its cited value and is listed as a hole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tilecast.model.machine.machine import Fact, Machine
from tilecast.model.machine.schema import KEYS
from tilecast.validation.lab.calibrate.facts import chip, fetch, power, sm
from tilecast.validation.lab.calibrate.facts.rule import Table
from tilecast.validation.lab.calibrate.store import Row

#: Facts that are definitions, capacities or data sheet: no microbenchmark fills them.
NOT_MEASURABLE = (
    "chip.clock_rated_mhz", "chip.tdp_w", "chip.compute_capability", "tensor.fp4_flop_per_clk", "alu.minmax_inputs",
    "fma.packed_f32x2", "fma.lanes", "issue.warp_inst_per_clk", "smem.per_sm_bytes", "reg.file_bytes", "reg.max_per_thread",
    "sm.max_warps", "sm.max_ctas", "tmem.columns", "tmem.lanes", "tmem.load_reduce", "hbm.tbps_spec",
)  # fmt: skip


def derive(rows: Iterable[Row]) -> dict[str, Fact]:
    """Every fact that the rows determine, by key, kind "measured"; the rows must be of one GPU and driver."""
    table = Table(rows)
    facts: dict[str, Fact] = {}
    for rules in (sm.RULES, fetch.RULES, chip.RULES, power.RULES):
        for key, rule in rules.items():
            found = rule(table)
            if found is not None:
                facts[key] = Fact(
                    found.value, KEYS[key].unit, "measured", source_text(found.rows), found.low, found.high, found.note
                )
    return facts


def source_text(rows: Sequence[Row]) -> str:
    """Command, GPU, driver, date and the rows: "tilecast calibrate (NVIDIA H200, ...): tensor/wgmma_rate {...} cycles"."""
    first = rows[0]
    told = "; ".join(f"{row.group}/{row.benchmark} {row.params} {row.quantity}".replace('"', "") for row in rows[:3])
    more = f" and {len(rows) - 3} rows more" if len(rows) > 3 else ""
    return f"tilecast calibrate ({first.gpu}, driver {first.driver}, {first.date}): {told}{more}"


def holes(base: Machine, facts: Mapping[str, Fact]) -> list[str]:
    """Facts of ``base`` that a microbenchmark could fill and ``facts`` lacks, and required ones it only assumes."""
    return [key for key in base if key not in facts and key not in NOT_MEASURABLE]
