"""The published cells in cycles, forecast from the machine code of the kernel that they are of.

`data/published/fa4_loops.txt` holds the steady loops of flash-attn-4 4.0.0b36 as its authors' compiler makes them (read by
`codegen/compiler/structure/steady.py`).  No constant of the simulator was chosen on these cells.
"""

from __future__ import annotations

from tilecast.base.data import PUBLISHED
from tilecast.base.text_file import read_text
from tilecast.model.compiled.code import CodeError
from tilecast.model.compiled.roles.code import KernelRoles
from tilecast.model.compiled.roles.costs import role_costs
from tilecast.model.compiled.roles.run import run_roles
from tilecast.model.compiled.roles.store import load_roles
from tilecast.model.machine.machine import load_machine
from tilecast.validation.published.points import CyclePoint

LOOPS = PUBLISHED / "fa4_loops.txt"
#: Share that Nsight Compute counts -> what of the simulated sub-partition that is.  It counts a packed FMA once, the simulator the
#: two cycles that it takes: those shares do not compare.
_COUNTED = {"tensor": "tensor", "xu": "mufu", "alu": "alu", "issue": "issue"}


def read_loops() -> dict[str, KernelRoles]:
    """Kernels by machine, dtype and head dimension, such as "b200 bf16 head_dim 128"."""
    return load_roles(read_text(LOOPS, "the loops", CodeError))


def loop_of(point: CyclePoint, loops: dict[str, KernelRoles]) -> KernelRoles | None:
    """The kernel that a cell is of, where its machine code is at hand."""
    return (
        loops.get(f"{point.machine} {point.dtype} head_dim {point.head_dim}")
        if point.kernel.startswith("fa4")
        else None
    )


def simulated(point: CyclePoint, kernel: KernelRoles) -> tuple[float, dict[str, float]]:
    """(cycles of a 128 x 128 tile, shares less the measured ones in points)."""
    run = run_roles(kernel, role_costs(load_machine(point.machine)))
    tiles = kernel.flop / (4.0 * 128 * 128 * point.head_dim)
    shares = {name: 100.0 * run.busy[_COUNTED[name]] / run.cycles for name in point.shares if name in _COUNTED}
    return run.cycles / tiles, {name: share - point.shares[name] for name, share in shares.items()}
