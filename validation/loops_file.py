"""Read a file of steady loops, naming the file where it is something else."""

from __future__ import annotations

from pathlib import Path

from tilecast.base.text_file import parsed
from tilecast.model.compiled.code import CodeError
from tilecast.model.compiled.roles.code import KernelRoles
from tilecast.model.compiled.roles.store import load_roles


def read_roles(path: Path, what: str = "the loops") -> dict[str, KernelRoles]:
    """The kernels of ``path`` by name; CodeError, naming the file, where ``what`` cannot be read or is something else."""
    return parsed(path, what, CodeError, load_roles)
