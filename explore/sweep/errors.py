"""What a sweep refuses, each in one sentence."""

from __future__ import annotations


class SweepError(ValueError):
    """A sweep that cannot start or go on: what, where, and what to do."""


class SpecError(SweepError):
    """A specification that makes no sense: file, field, expected, got, nearest name."""


class StoreError(SweepError):
    """A store that cannot be read or written; what it held before is kept."""
