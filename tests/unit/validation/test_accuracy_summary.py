"""The table of model errors that forecasts quote is the one that the forecasts of today give."""

from __future__ import annotations

import pytest

from tilecast.base.data import MODEL_ERROR
from tilecast.model.forecast.answer import BEFORE, COMPILED
from tilecast.model.forecast.checked_range import AT_HAND, model_error
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine
from tilecast.validation.accuracy import at_hand, followed, measured, published, table


def _recorded(level: str) -> list[str]:
    head, *rows = MODEL_ERROR.read_text(encoding="utf-8").splitlines()
    return [head, *(row for row in rows if row.split(",")[1] == level)]


def test_the_table_is_that_of_the_forecasts() -> None:
    checked = [*published(), *measured()]
    assert _recorded(BEFORE) == table(row for row in checked if row[1] == BEFORE).splitlines()
    compiled = table(row for row in checked if row[1] == COMPILED).splitlines()
    assert compiled == [row for row in _recorded(COMPILED) if not row.startswith("measured kernels")]


@pytest.mark.skipif("not config.getoption('--accuracy')", reason="minutes of every core: --accuracy")
def test_the_table_is_that_of_the_forecasts_from_machine_code() -> None:
    ours = [row for row in _recorded(COMPILED) if not row.startswith("published kernels")]
    assert ours == table(followed()).splitlines()


def test_the_table_is_that_of_the_forecasts_from_loops_at_hand() -> None:
    assert _recorded(AT_HAND) == table(at_hand()).splitlines()


def test_regions_fall_back_from_the_gpu_to_its_kind_of_tensor_core() -> None:
    own = model_error(Workload(), load_machine("h200-sxm"))
    assert own.rows == 820
    assert own.where == "measured kernels on h200-sxm, 16 bit"
    assert 0 < own.mean < own.p90
    kind = model_error(Workload(dtype="fp8"), load_machine("gb300"))
    assert kind.where == "published kernels on any tcgen05, fp8"
    compiled = model_error(Workload(), load_machine("h100-sxm"), COMPILED)
    assert compiled.where == "measured kernels from machine code on any wgmma, 16 bit"
    kept = model_error(Workload(), load_machine("h200-sxm"), AT_HAND)
    assert kept.where == "measured kernels from loops at hand on h200-sxm, 16 bit"
    assert max(compiled.mean, kept.mean) < own.mean
    unknown = model_error(Workload(), load_machine("gb10"))
    assert unknown.rows == 0
    assert unknown.sentence().startswith("model error unknown")


def test_errors_of_five_rows_are_summed_up() -> None:
    rows = [("published kernels", BEFORE, "b200", "fp8", e) for e in (0.1, -0.1, 0.2, 0.2, 0.1)]
    assert "published kernels,before compilation,b200,fp8,5,14.0,20.0,10.0\n" in table(rows)
    assert "b200" not in table(rows[:4])
