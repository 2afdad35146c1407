"""The published cells from flash-attn-4's own machine code: what the docs claim of them holds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tilecast.model.families import near_published
from tilecast.model.forecast.answer import BEFORE, COMPILED
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine
from tilecast.validation.published.loops import (
    LATEST,
    loop_for,
    loop_name,
    loop_of,
    read_loops,
    release_of,
    simulated,
)
from tilecast.validation.published.points import PublishedPoint, load_cycles, load_points
from tilecast.validation.published.run import default_predictor, fluid_predictor, published_kernel

CELLS = {
    ("b200", "bf16"): (1238, 0.060),
    ("b200", "fp8"): (1168, -0.005),
    ("b300", "bf16"): (1078, 0.052),
    ("b300", "fp8"): (937, 0.010),
}


def test_every_cell_keeps_its_error() -> None:
    loops = read_loops()
    found = {}
    for point in load_cycles():
        kernel = loop_of(point, loops)
        if kernel is not None:
            found[point.machine, point.dtype] = (point, *simulated(point, kernel))
    assert found.keys() == CELLS.keys()
    errors = []
    for cell, (point, cycles, shares) in found.items():
        expected, error = CELLS[cell]
        assert cycles == pytest.approx(expected, abs=1.0), cell
        errors.append(cycles / point.cycles - 1.0)
        assert errors[-1] == pytest.approx(error, abs=1e-3), cell
        assert all(abs(points) <= 5.05 for points in shares.values()), (cell, shares)
    assert sum(map(abs, errors)) / len(errors) <= 0.032


def test_a_row_is_of_the_release_of_its_day() -> None:
    """Releases that spill, that store row maxima themselves, or that stand for what nobody names: what their code says of them."""
    loops = read_loops()
    assert release_of("Dao-AILab/flash-attention PR/issue text: PR #2605 table B200-a", "bf16") == "4.0.0b15"
    assert release_of("PR #2109 comment 2026-01-30", "fp8") == "4.0.0b10"
    assert release_of("PR #2109 comment 2026-01-30", "fp16") == "4.0.0b4"
    assert release_of("a table of nobody's", "bf16") == LATEST

    def instructions(name: str) -> dict[str, int]:
        """Of the longest role and an iteration."""
        loop, unrolled = max((role.loop for role in loops[name].roles), key=len), loops[name].unrolled
        return {pipe: sum(one.pipe == pipe for one in loop) // unrolled for pipe in ("alu", "shared")}

    # Row maxima came with the load since August; the pair's kernel of May spills, that of October does not.
    assert (
        instructions("sm_103a 128/128 none bf16 of 4.0.0b21")["alu"]
        > 1.4 * instructions("sm_103a 128/128 none bf16")["alu"]
    )
    assert (
        instructions("sm_100a 128/128 none bf16 of 4.0.0b15")["shared"]
        > 4 * instructions("sm_100a 128/128 none bf16")["shared"]
    )
    # Its own release answers, where that has the kernel, else the latest.
    point = next(p for p in rows_of("gb300", "16 bit", 128, "causal") if "#2605" in p.source)
    chip = load_machine("gb300")
    variant = published_kernel(point.workload, chip, "fa4", None, "short")
    assert loop_for(point.workload, chip, variant, None, "4.0.0b15") == loops["sm_103a 128/128 causal bf16 of 4.0.0b15"]
    assert loop_for(point.workload, chip, variant, None, "4.0.0b4") == loops["sm_103a 128/128 causal bf16"]


def rows_of(machine: str, dtype: str, head_dim: int, mask: str) -> list[PublishedPoint]:
    return [
        point
        for point in load_points()[0]
        if point.family == "fa4"
        and (point.machine, point.dtype_class, point.workload.head_dim_qk, point.workload.mask)
        == (machine, dtype, head_dim, mask)
    ]


def test_rows_of_flash_attention_4_stand_on_its_machine_code() -> None:
    points = rows_of("gb300", "16 bit", 64, "none")
    assert len(points) == 9
    for point in points:
        row, before = default_predictor(point, "short"), fluid_predictor(point, "short")
        assert (row.level, before.level) == (COMPILED, BEFORE)
        # Its loop waits where the pipeline does not, a quarter of its time: docs/accuracy.md.
        assert 1.1 < row.time_ms / before.time_ms < 1.3


def test_a_closed_kernel_has_no_tile_that_open_ones_have_at_other_head_dimensions_only() -> None:
    """FlashAttention-4 and FROST share one query tile by keys at head_dim 256; a closed kernel of 128 is not taken for such a one."""
    chip = load_machine("gb200")
    for dim, split in ((128, "q"), (256, "k")):
        near = near_published(Workload(1, 40, 40, 2100, 2100, dim, dim), chip)
        assert {getattr(variant, "split", "") for variant in near} == {split} and len(near) > 8


def test_a_closed_kernel_emulates_no_more_exponentials_than_open_ones() -> None:
    chip = load_machine("gb200")
    for dim, most in ((128, 0.25), (256, 0.375)):
        near = near_published(Workload(2, 64, 8, 8192, 8192, dim, dim, dtype="fp8"), chip)
        assert max(getattr(variant, "emulated_share", 0.0) for variant in near) == most


def test_a_row_that_states_its_share_of_emulation_gets_that_code() -> None:
    (point, *_) = rows_of("b200", "fp8", 64, "none")
    assert point.emulated_share == 0.0
    loops = {share: read_loops()[loop_name("sm_100a", (64, 64), "none", "fp8", share)] for share in (None, 0.0)}
    exponentials = {
        share: sum(one.pipe == "mufu" for one in max(kernel.roles, key=lambda role: len(role.loop)).loop)
        for share, kernel in loops.items()
    }
    # 128 x 128 scores are 128 to a thread; as shipped some go to the FMA pipe.
    assert exponentials[None] < 128 <= exponentials[0.0]
    chip = load_machine("b200")
    variant = published_kernel(point.workload, chip, "fa4", point.emulated_share, "short")
    assert loop_for(point.workload, chip, variant, 0.0) == loops[0.0]
    assert loop_for(point.workload, chip, variant, 0.5) is None
    # A pair of CTAs runs another kernel.
    assert loop_for(point.workload, chip, replace(variant, cta_group=2), 0.0) is None  # type: ignore[call-arg]
