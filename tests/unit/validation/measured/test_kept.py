"""Points of the tables that were measured again as their kernels are written now."""

from __future__ import annotations

from dataclasses import replace

from tilecast.validation.lab.measure.records import read
from tilecast.validation.measured.kept import AGAIN, as_written_now, kept_profiles
from tilecast.validation.measured.recorded import generated_runs
from tilecast.validation.measured.run import TABLE


def test_a_point_measured_again_stands_for_that_of_before_and_keeps_its_role() -> None:
    first, second, *_ = generated_runs(read(TABLE))
    again = replace(first, cycles=1.0, role="held-out", source_sha="0123456789abcdef")
    found = as_written_now([first, second], [again, replace(second, gpu="another", cycles=1.0)])
    assert found == [replace(again, role=first.role), second]


def test_what_was_measured_again_has_a_loop_at_hand() -> None:
    """All but four of 104 kernels, whose loops the search has put behind others since."""
    again = read(AGAIN)
    kept, measured = set(kept_profiles(again, None)), {point.code_key() for point in again}
    assert kept < measured and len(kept) >= 100
