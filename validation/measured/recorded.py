"""What was recorded of generated kernels: their runs, what the compiler made of them, and a run with its forecasts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

from tilecast.base.text_file import parsed
from tilecast.model.compiled.code import CodeError, CodeKey, KernelCode, load_codes
from tilecast.model.forecast.answer import BEFORE, COMPILED
from tilecast.validation.lab.measure.records import Measured


@dataclass(frozen=True, slots=True)
class Row:
    """A measured point and its forecasts in cycles by level; none and a reason where it cannot be forecast."""

    point: Measured
    cycles: Mapping[str, float]
    refused: str = ""

    @property
    def level(self) -> str:
        """The best level there is: from machine code, where a profile of the kernel is at hand."""
        return COMPILED if COMPILED in self.cycles else BEFORE

    def error(self, level: str) -> float:
        """Signed relative error of the cycles."""
        return self.cycles[level] / self.point.cycles - 1.0


def generated_runs(measured: Iterable[Measured]) -> list[Measured]:
    """Short runs of kernels that tilecast wrote."""
    return [row for row in measured if row.source_sha and row.mode == "short" and row.kernel != "file"]


def read_profiles(codes: Path) -> Mapping[CodeKey, KernelCode]:
    """Profiles of a file of `tilecast profile` by kernel; CodeError, naming the file, for one that is something else."""
    return parsed(codes, "the profiles", CodeError, _profiles)


@lru_cache(maxsize=4)
def _profiles(text: str) -> Mapping[CodeKey, KernelCode]:
    """The profiles of a file's text: several verbs read the same one."""
    return MappingProxyType({code.key(): code for code in load_codes(text)})
