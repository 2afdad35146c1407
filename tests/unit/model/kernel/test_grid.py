"""Spaces as rows of knob values."""

from dataclasses import replace
from itertools import product

import pytest

from tilecast.model.families import FAMILIES, knob_space
from tilecast.model.kernel.grid import Grid
from tilecast.model.kernel.variants.fa2 import Fa2Variant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine

GRID = Grid(Fa2Variant, ("warps", "tile_m"), product((4, 8), (64, 128)), scheduler="longest-first")


def test_rows_become_variants_in_order_with_what_is_fixed() -> None:
    plain = Fa2Variant(scheduler="longest-first")
    expected = [replace(plain, warps=w, tile_m=m) for w in (4, 8) for m in (64, 128)]
    assert list(GRID) == expected
    assert len(GRID) == 4


def test_a_rule_is_asked_once_for_the_same_knobs() -> None:
    asked = []

    def wide(variant: Fa2Variant) -> bool:
        asked.append(variant.tile_m)
        return variant.tile_m > 64

    assert list(GRID.where(("tile_m", "tile_n"), wide)) == [v for v in GRID if v.tile_m > 64]
    assert asked == [64, 128]


def test_a_rule_that_names_no_knob_is_asked_of_all() -> None:
    assert list(GRID.where((), lambda v: v.warps * 16 == v.tile_m)) == [v for v in GRID if v.warps * 16 == v.tile_m]


@pytest.mark.parametrize("family", FAMILIES)
def test_spaces_have_no_variant_twice(family: str) -> None:
    for chip, mask in product(("h200-sxm", "b300"), ("none", "causal")):
        space = knob_space(family, Workload(mask=mask), load_machine(chip))
        assert len(set(space)) == len(space) > 0
