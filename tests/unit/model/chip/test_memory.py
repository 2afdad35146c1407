"""What the memory needs for reads and writes."""

from __future__ import annotations

import pytest

from tilecast.model.chip.memory import memory_seconds
from tilecast.model.machine.machine import load_machine

H200 = load_machine("h200-sxm")


def test_a_copy_takes_what_was_measured_and_reads_alone_less() -> None:
    copied, read = H200["hbm.tbps_achieved"] * 1e12, H200["hbm.tbps_achieved"] * H200["hbm.read_ratio"] * 1e12
    assert memory_seconds(H200, 1e9, 1e9) == pytest.approx(2e9 / copied)
    assert memory_seconds(H200, 1e9) == pytest.approx(1e9 / read)
    assert 1e9 / read < 1e9 / copied < memory_seconds(H200, 0.0, 1e9)


def test_reads_follow_a_what_if_of_the_bandwidth_and_are_a_copy_where_none_was_measured() -> None:
    faster = H200.with_facts({"hbm.tbps_achieved": 2.0 * H200["hbm.tbps_achieved"]})
    assert memory_seconds(faster, 1e9) == pytest.approx(memory_seconds(H200, 1e9) / 2.0)
    b200 = load_machine("b200")
    assert memory_seconds(b200, 1e9) == pytest.approx(1e-3 / b200["hbm.tbps_achieved"])
