"""A schedule as text: one line per unit and role, one initiation interval (or more) across."""

from __future__ import annotations

from tilecast.base.lanes import draw_bar, ruler
from tilecast.model.pipeline.graph import Op, Pipeline
from tilecast.model.schedule.solve import Schedule

_MARGIN = 2


def text_gantt(pipeline: Pipeline, schedule: Schedule, width: int = 100, periods: int = 1) -> str:
    """The steady state over ``periods`` intervals in lines of at most ``width`` characters.

    Lanes: the matrix engine, every role with synchronous work, copies.  ``exp0.2`` is operation exp0 for
    the block two after the oldest one in flight; ``=`` continues a bar, ``<`` one that began before the
    left edge, and ``>`` marks one that goes on beyond the right edge.  An infeasible schedule gives the
    reason instead.
    """
    if not schedule.starts:
        return schedule.reason or "no schedule"
    lanes = _lanes(pipeline)
    label = max([len(name) for name, _ in lanes] + [len("cycles")]) + _MARGIN
    cells = max(10, width - label - 2)
    horizon = schedule.ii_cycles * periods
    lines = [f"{'cycles':<{label}}{ruler(horizon, cells, 5)}"]
    for name, ops in lanes:
        rows = _rows(ops, schedule, horizon, cells)
        lines += [f"{name if n == 0 else '':<{label}}|{row}|" for n, row in enumerate(rows)]
    return "\n".join(line.rstrip() for line in lines)


def _lanes(pipeline: Pipeline) -> list[tuple[str, list[Op]]]:
    matrix = [op for op in pipeline.ops if op.engine == "tensor"]
    lanes = [("tensor", matrix)] if matrix else []
    for role in pipeline.roles:
        work = [pipeline.op(step.op) for step in role.program if not pipeline.op(step.op).engine]
        if work:
            lanes.append((role.name, work))
    copies = [op for op in pipeline.ops if op.engine and op.engine != "tensor"]
    return lanes + ([("copies", copies)] if copies else [])


def _rows(ops: list[Op], schedule: Schedule, horizon: int, cells: int) -> list[str]:
    """Bars of one lane; bars that would hide each other (copies overlap) go to further rows."""
    bars = []
    for op in ops:
        start = schedule.starts[op.name]
        newest = start // schedule.ii_cycles
        # Iteration lap - depth + 1 is the oldest in flight in this window, shown as block 0.
        for lap in range(-newest - 1 - int(op.min_cycles // schedule.ii_cycles), horizon // schedule.ii_cycles + 1):
            begin = start + lap * schedule.ii_cycles
            end = begin + op.min_cycles
            if end > 0 and begin < horizon:
                bars.append((begin, end, f"{op.name}.{lap + schedule.overlap_depth - 1}"))
    rows: list[list[str]] = []
    taken: list[float] = []
    for begin, end, name in sorted(bars):
        row = next((n for n, until in enumerate(taken) if begin >= until - 1e-6), len(rows))
        if row == len(rows):
            rows.append([" "] * cells)
            taken.append(0.0)
        taken[row] = end
        draw_bar(rows[row], begin * cells / horizon, end * cells / horizon, name)
    return ["".join(row) for row in rows] or [" " * cells]
