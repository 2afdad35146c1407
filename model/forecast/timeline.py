"""What a simulated SM did, as text: one lane per role and engine, two timelines side by side on one scale."""

from __future__ import annotations

from tilecast.model.sm.simulate import Event, SmTrace

_GAP = "   "


def timeline(trace: SmTrace, cycles: float, cells: int) -> list[tuple[str, str]]:
    """(lane, row) of the steady state over ``cycles`` cycles in ``cells`` characters.

    Time 0 is where the busiest lane of the loop begins an iteration.  ``exp0a.1`` is operation exp0a of the block one
    after the oldest shown; a bar that began earlier opens with ``<``, one that goes on closes with ``>``.
    """
    lanes = _lanes(trace)
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
                _draw(row, event, begin, cycles, oldest)
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


def _draw(row: list[str], event: Event, begin: float, cycles: float, oldest: int) -> None:
    cells = len(row)
    start, end = (event.start - begin) * cells / cycles, (event.end - begin) * cells / cycles
    first, last = max(0, round(start)), min(cells, round(end))
    size = last - first
    if size <= 0:
        return
    name = f"{event.op}.{event.iteration - oldest}"
    inner = size - 2
    if inner <= 0:
        row[first:last] = list("|" * size)
        return
    body = name.center(inner, "=") if inner >= len(name) else event.op[:inner].center(inner, "=")
    row[first:last] = list(("<" if start < -0.5 else "[") + body + (">" if end > cells + 0.5 else "]"))


def side_by_side(left: SmTrace, right: SmTrace, titles: tuple[str, str], width: int = 120) -> list[str]:
    """Two timelines on one time scale in lines of ``width`` characters: equal lengths are equal cycles."""
    names = [lane for lane, _ in _lanes(left)]
    names += [lane for lane, _ in _lanes(right) if lane not in names]
    label = max(len(name) for name in names) + 2
    cells = max(20, (width - label - len(_GAP) - 4) // 2)
    cycles = 1.5 * max(left.ii_cycles, right.ii_cycles)
    rows = [dict(timeline(trace, cycles, cells)) for trace in (left, right)]
    heads = (title[: cells + 2].ljust(cells + 2) for title in titles)
    lines = [" " * label + _GAP.join(heads), " " * label + _GAP.join([_ruler(cycles, cells)] * 2)]
    for name in names:
        bars = (f"|{part.get(name, '').ljust(cells)}|" for part in rows)
        lines.append(f"{name:<{label}}" + _GAP.join(bars))
    return [line.rstrip() for line in lines]


def _ruler(cycles: float, cells: int) -> str:
    text = [" "] * (cells + 2)
    for quarter in range(4):
        mark = f"{cycles * quarter / 4:.0f}"
        at = 1 + cells * quarter // 4
        text[at : at + len(mark)] = mark
    end = f"{cycles:.0f}"
    text[-len(end) :] = end
    return "".join(text)
