"""Which rows make a pair: a small table by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tilecast.model.forecast.answer import BEFORE, COMPILED
from tilecast.model.kernel.workload import Workload
from tilecast.validation.ablations.pairs import paired, pairs
from tilecast.validation.lab.measure.records import Measured, shape_fields
from tilecast.validation.measured.recorded import Row

SHORT = Workload(1, 8, 8, 512, 512, 64, 64)
LONG = replace(SHORT, seqlen_q=2048, seqlen_k=2048)


def point(
    variant: str, cycles: float = 1000.0, work: Workload = SHORT, gpu: str = "A", kernel: str = "hopper_ws"
) -> Measured:
    numbers = dict.fromkeys(
        ("cycles_low", "cycles_high", "ms", "ms_low", "ms_high", "effective_mhz", "nvml_mhz", "power_w", "temperature_c", "error"), 1.0
    )  # fmt: skip
    names = dict.fromkeys(("date", "driver", "torch", "triton", "tilecast", "throttle", "command"), "")
    return Measured(
        gpu=gpu, machine="h200-sxm", kernel=kernel, variant=variant, source_sha="0", mode="short", role="build", cycles=cycles,
        rounds=1, launches_per_round=1, input_copies=1, **numbers, **names, **shape_fields(work),  # type: ignore[arg-type]
    )  # fmt: skip


def test_pairs_differ_in_exactly_one_knob() -> None:
    points = [
        point("fa3:tile_n=64"),
        point("fa3:tile_n=128"),  # one knob from 0
        point("fa3:tile_n=64,overlap=false"),  # one knob from 0, two from 1
        point("fa3:tile_n=128,overlap=false"),  # one from 1, one from 2
    ]
    assert paired(points) == [(0, 1, "tile_n"), (2, 0, "overlap"), (2, 3, "tile_n"), (3, 1, "overlap")]


def test_a_pair_goes_from_the_smaller_value_whatever_the_order_of_rows() -> None:
    small, large = point("fa3:emulated_share=0"), point("fa3:emulated_share=0.25")
    assert paired([small, large]) == [(0, 1, "emulated_share")]
    assert paired([large, small]) == [(1, 0, "emulated_share")]


def test_three_values_of_a_knob_are_three_pairs() -> None:
    points = [point(f"fa3:rescale={name}") for name in ("anchored", "always", "conditional")]
    assert paired(points) == [(0, 2, "rescale"), (1, 0, "rescale"), (1, 2, "rescale")]


@pytest.mark.parametrize(
    "other",
    [
        point("fa3:tile_n=128", work=LONG),
        point("fa3:tile_n=128", gpu="B"),
        replace(point("fa3:tile_n=128"), mode="sustained"),
        point("fa2:tile_n=128", kernel="triton"),
        point("fa3:tile_n=64"),
    ],
)
def test_rows_that_differ_otherwise_are_no_pair(other: Measured) -> None:
    assert paired([point("fa3:tile_n=64"), other]) == []


def test_a_kernel_measured_again_counts_with_its_last_row() -> None:
    points = [point("fa3:tile_n=64"), point("fa3:tile_n=128"), point("fa3:tile_n=64", cycles=500.0)]
    assert paired(points) == [(2, 1, "tile_n")]


def test_effects_are_ratios_of_speed_at_the_levels_that_both_rows_have() -> None:
    rows = [
        Row(point("fa3:tile_n=64", 1200.0), {BEFORE: 1100.0, COMPILED: 1300.0}),
        Row(point("fa3:tile_n=128", 1000.0), {BEFORE: 1000.0, COMPILED: 1000.0}),
        Row(point("fa3:tile_n=96", 800.0), {BEFORE: 500.0}),
        Row(point("fa3:tile_n=32", 900.0), {}, "refused"),
    ]
    found = {(pair.value_from, pair.value_to): pair.effect for pair in pairs(rows)}
    assert found.keys() == {(64, 96), (64, 128), (96, 128)}
    assert found[64, 128].measured == pytest.approx(1.2)
    assert found[64, 128].forecast == pytest.approx({BEFORE: 1.1, COMPILED: 1.3})
    assert found[96, 128].measured == pytest.approx(0.8)
    assert found[96, 128].forecast == pytest.approx({BEFORE: 0.5})
