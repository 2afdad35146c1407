"""What a simulated SM did, as text: one lane per role and engine, two timelines side by side on one scale."""

from __future__ import annotations

from tilecast.base.lanes import draw_bar, ruler
from tilecast.model.sm.simulate import SmTrace, drawn

_GAP = "   "


def timeline(trace: SmTrace, cycles: float, cells: int) -> list[tuple[str, str]]:
    """(lane, row) of the steady state over ``cycles`` cycles in ``cells`` characters.

    Time 0 is where the busiest lane of the loop begins an iteration.  ``exp0a.1`` is operation exp0a of the block one
    after the oldest shown; a bar that began earlier opens with ``<``, one that goes on closes with ``>``.
    """
    lanes = _lanes(trace)
    trace = drawn(trace)
    last = len(trace.iteration_end)
    first = max(trace.settled_at, last - 4)
    begin = min((e.start for e in trace.events if e.iteration == first and e.end > e.start), default=0.0)
    shown = [e for e in trace.events if e.end > begin and e.start < begin + cycles]
    oldest = min((e.iteration for e in shown), default=0)
    out = []
    for lane, ops in lanes:
        row = [" "] * cells
        for event in shown:
            if event.op in ops:
                start, end = ((at - begin) * cells / cycles for at in (event.start, event.end))
                label = f"{event.op}.{event.iteration - oldest}"
                draw_bar(row, start, end, label, short=event.op, narrow="|", least=0)
        out.append((lane, "".join(row)))
    return out


def _lanes(trace: SmTrace) -> list[tuple[str, set[str]]]:
    """The matrix engine, then every role with synchronous work."""
    pipeline = trace.pipeline
    matrix = {op.name for op in pipeline.ops if op.engine == "tensor"}
    lanes = [("tensor", matrix)] if matrix else []
    for role in pipeline.roles:
        work = {step.op for step in role.program if not pipeline.op(step.op).engine}
        if work:
            lanes.append((role.name, work))
    return lanes


def side_by_side(left: SmTrace, right: SmTrace, titles: tuple[str, str], width: int = 120) -> list[str]:
    """Two timelines on one time scale in lines of ``width`` characters: equal lengths are equal cycles."""
    names = [lane for lane, _ in _lanes(left)]
    names += [lane for lane, _ in _lanes(right) if lane not in names]
    label = max(len(name) for name in names) + 2
    cells = max(20, (width - label - len(_GAP) - 4) // 2)
    cycles = 1.5 * max(left.ii_cycles, right.ii_cycles)
    rows = [dict(timeline(trace, cycles, cells)) for trace in (left, right)]
    heads = (title[: cells + 2].ljust(cells + 2) for title in titles)
    lines = [" " * label + _GAP.join(heads), " " * label + _GAP.join([ruler(cycles, cells, 4)] * 2)]
    for name in names:
        bars = (f"|{part.get(name, '').ljust(cells)}|" for part in rows)
        lines.append(f"{name:<{label}}" + _GAP.join(bars))
    return [line.rstrip() for line in lines]
