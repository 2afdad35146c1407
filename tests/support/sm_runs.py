"""`run_sm` held against the same in C wherever a test asks for a run."""

from __future__ import annotations

from collections.abc import Sequence

from tilecast.model.compiled.costs import WarpCosts
from tilecast.model.compiled.native.run import run_ctas
from tilecast.model.compiled.sm import Cta, SmRun, run_sm


def run_both(ctas: Sequence[Cta], costs: WarpCosts, mma: dict[tuple[int, bool], float]) -> SmRun:
    """What `run_sm` finds; AssertionError where `run_ctas` finds a digit otherwise."""
    found = run_sm(ctas, costs, mma)
    assert run_ctas(ctas, costs, mma) == found
    return found
