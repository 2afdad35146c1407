"""What was recorded of generated kernels: their runs, and what the compiler made of them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tilecast.base.text_file import read_text
from tilecast.model.compiled.code import CodeError, CodeKey, KernelCode, load_codes
from tilecast.validation.lab.measure.records import Measured


def generated_runs(measured: Iterable[Measured]) -> list[Measured]:
    """Short runs of kernels that tilecast wrote."""
    return [row for row in measured if row.source_sha and row.mode == "short" and row.kernel != "file"]


def read_profiles(codes: Path) -> dict[CodeKey, KernelCode]:
    """Profiles of a file of `tilecast profile` by kernel; CodeError, naming the file, for one that is something else."""
    return {code.key(): code for code in load_codes(read_text(codes, "the profiles", CodeError))}
