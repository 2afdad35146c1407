"""What `make test` leaves to `make test-all`: more of what other tests ask too, with other numbers."""

from __future__ import annotations

import os
from typing import TypeVar

import pytest

T = TypeVar("T")

#: Set by `--whole`; processes that tests start inherit it.
VARIABLE = "TILECAST_TESTS_WHOLE"
#: A test, or a case of one, that runs with `--whole` alone.
whole = pytest.mark.whole


def is_whole() -> bool:
    """Whether `--whole` was given."""
    return bool(os.environ.get(VARIABLE))


def sampled(cases: list[T]) -> list[T]:
    """Four of seven ``cases`` of a long list, all with `--whole`: lists go round in twos, threes and fives, and lose no value of a field so."""
    if is_whole():
        return cases
    return [case for number, case in enumerate(cases) if number % 7 not in (0, 2, 4)]
