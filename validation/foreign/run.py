"""Launches of other people's kernels, as measured, beside their forecasts from machine code.

`data/measured/h200_foreign_loops.txt` holds the steady loops of the kernels as their authors' compilers make them (read by
`codegen/compiler/structure/steady.py`); no constant of the simulator was chosen on them.  Cycles are compared, as hardware
counters give them, so that the clock does not enter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tilecast.base.csv_file import Row, check_whole, numbered_rows
from tilecast.base.data import MEASURED
from tilecast.model.chip.tiles import head_tiles
from tilecast.model.compiled.roles.code import KernelRoles
from tilecast.model.compiled.roles.costs import role_costs
from tilecast.model.compiled.roles.launch import CtaCost, Launch, cta_cost, launch
from tilecast.model.kernel.workload import Workload, WorkloadError
from tilecast.model.machine.machine import Machine, load_machine
from tilecast.validation.loops_file import read_roles

TABLE = MEASURED / "h200_foreign.csv"
LOOPS = MEASURED / "h200_foreign_loops.txt"
#: Share that Nsight Compute counts -> what of the simulated sub-partition that is.
SHARES = {"tensor": "tensor", "xu": "mufu", "issue": "issue"}


class ForeignError(ValueError):
    """A table of launches that cannot be used: file, row, field, expected, got."""


@dataclass(frozen=True, slots=True)
class Point:
    """A measured launch: what it did, and what counters said of it."""

    kernel: str
    library: str
    label: str
    ctas_per_sm: int
    #: CTAs of the launch, and the iterations of its tiles.
    ctas: int
    iterations: tuple[int, ...]
    cycles: float
    #: Percent of the cycles in which SMs are active.
    shares: dict[str, float]
    #: Active cycles of an SM over those of the launch (0..1).
    active: float


@dataclass(frozen=True, slots=True)
class Compared:
    """A launch with its forecast."""

    point: Point
    found: Launch
    cost: CtaCost

    @property
    def error(self) -> float:
        """Forecast over measured cycles, less one."""
        return self.found.cycles / self.point.cycles - 1.0

    @property
    def off_by(self) -> dict[str, float]:
        """Busy shares less the measured ones, in points of percent of the launch's cycles."""
        return {
            name: 100.0 * self.found.busy[SHARES[name]] - share * self.point.active
            for name, share in self.point.shares.items()
        }


def load(path: Path = TABLE) -> tuple[Point, ...]:
    """The launches of ``path``; ForeignError names the row and field that are wrong."""
    _, rows = numbered_rows(path, "the launches", ForeignError)
    check_whole(path, rows, ForeignError)
    if not rows:
        raise ForeignError(f"{path}: expected a row for each launch, found none")
    return tuple(_point(row, f"{path}: line {number}") for number, row in rows)


def compare(points: Sequence[Point], loops: dict[str, KernelRoles], machine: Machine) -> tuple[Compared, ...]:
    """Forecasts of ``points`` on ``machine``; ForeignError for a kernel whose loop is not at hand."""
    costs = role_costs(machine)

    @cache
    def cost(kernel: str, ctas: int, stay: bool) -> CtaCost:
        if kernel not in loops:
            raise ForeignError(f"{kernel}: expected one of the {len(loops)} kernels whose loops are at hand")
        return cta_cost(loops[kernel], costs, ctas, stay=stay)

    out = []
    for point in points:
        mine = cost(point.kernel, point.ctas_per_sm, point.ctas < len(point.iterations))
        out.append(Compared(point, launch(mine, point.iterations, machine, point.ctas), mine))
    return tuple(out)


def run_foreign(path: Path = TABLE, loops: Path = LOOPS, machine: str = "h200-sxm") -> tuple[Compared, ...]:
    """Every launch of ``path`` against the loops of ``loops``; raises ForeignError, CodeError, MachineError."""
    return compare(load(path), read_roles(loops), load_machine(machine))


def _point(row: Row, where: str) -> Point:
    if row.get("work") not in ("attention", "matmul"):
        raise ForeignError(f"{where}: work: expected attention or matmul, got '{row.get('work', '')}'")
    ctas = _number(row, "ctas", where)
    if row["work"] == "matmul":
        label = f"{row['m']} x {row['n']} x {row['k']}"
        iterations = [_number(row, "iterations", where)] * ctas
    else:
        work = _workload(row, where)
        label = f"{work.batch} x {work.heads_q} heads, {work.seqlen_q}, {row['mask']}"
        tiles = head_tiles(work, _number(row, "tile_rows", where), _number(row, "tile_keys", where))
        iterations = [int(count) for count in tiles.iterations for _ in range(work.batch * work.heads_q)]
    cycles = float(_number(row, "cycles", where))
    return Point(
        row["kernel"], row["library"], label, _number(row, "ctas_per_sm", where), ctas, tuple(iterations),
        cycles,
        {name: _share(row, f"{name}_percent", where) for name in SHARES}, _number(row, "active_cycles", where) / cycles,
    )  # fmt: skip


def _workload(row: Row, where: str) -> Workload:
    heads, seqlen, head_dim = (_number(row, name, where) for name in ("heads", "seqlen", "head_dim"))
    try:
        return Workload(
            batch=_number(row, "batch", where), heads_q=heads, heads_kv=heads, seqlen_q=seqlen, seqlen_k=seqlen,
            head_dim_qk=head_dim, head_dim_v=head_dim, mask=row["mask"], dtype=row["dtype"],
        )  # fmt: skip
    except WorkloadError as error:
        raise ForeignError(f"{where}: {error}") from None


def _number(row: Row, name: str, where: str) -> int:
    text = row.get(name, "")
    if not text.isdigit() or int(text) < 1:
        raise ForeignError(f"{where}: {name}: expected a whole number from 1 on, got '{text}'")
    return int(text)


def _share(row: Row, name: str, where: str) -> float:
    try:
        share = float(row.get(name, ""))
    except ValueError:
        share = -1.0
    if not 0.0 <= share <= 100.0:
        raise ForeignError(f"{where}: {name}: expected percent, got '{row.get(name, '')}'")
    return share
