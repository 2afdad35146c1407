"""A choice of kernels in a specification, and what a specification asks of a pass: one record for each pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tilecast.model.forecast.answer import Explained
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine

#: The level of items that name none.
FLUID = "fluid"


@dataclass(frozen=True, slots=True)
class Choice:
    """``rule`` with an optional ``family``; or rule "" and the full ``text`` of a variant."""

    rule: str
    family: str
    text: str = ""


@dataclass(frozen=True, slots=True)
class SweptPass:
    """A pass as sweeps see it."""

    #: Value of ``pass``.
    name: str
    rules: tuple[str, ...]
    families: tuple[str, ...]
    #: A family's own name from any of its names, and a variant's full text from its family and knobs; VariantError for others.
    family: Callable[[str], str]
    text: Callable[[str, str], str]
    #: Variants that a forecast item may hold for a choice; or the sentence why there are none.
    variants: Callable[[Choice, Workload, Machine], list[str] | str]
    #: The forecast of an item's content.
    predict: Callable[[Mapping[str, Any], Machine], Explained]
