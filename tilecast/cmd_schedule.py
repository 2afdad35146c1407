"""``tilecast schedule``: the best order of a kernel's loop, its proof, and the kernel's own order."""

from __future__ import annotations

from tilecast.model.pipeline.graph import Pipeline
from tilecast.model.schedule.check import check_schedule
from tilecast.model.schedule.gantt import text_gantt
from tilecast.model.schedule.patterns import (
    intra_warpgroup_overlap,
    is_ping_pong,
    matrix_issue_order,
    step_text,
    with_discovered_order,
)
from tilecast.model.schedule.solve import Schedule, optimal_schedule
from tilecast.model.sm.bounds import RecMii, bounds, rec_mii


def run_schedule(pipeline: Pipeline, time_limit: float = 10.0) -> str:
    """Solve for the free order and for the kernel's own order, check both, and report.

    ``time_limit`` is in seconds for each of the two.  Raises PipelineError for a deadlocked pipeline and
    RuntimeError when the independent checker rejects what the solver returned.
    """
    free = optimal_schedule(pipeline, time_limit_s=time_limit)
    own = optimal_schedule(pipeline, time_limit_s=time_limit, respect_program_order=True)
    for schedule in (free, own):
        wrong = check_schedule(pipeline, schedule)
        if wrong:
            raise RuntimeError(f"the schedule of {pipeline.name} fails its check: {'; '.join(wrong)}")
    text = schedule_report(pipeline, free)
    if free.status == "infeasible":
        return text
    cost = ""
    if free.status == "optimal":
        # Against a search that was stopped early a difference would say nothing.
        cost = f", {own.ii_cycles / free.ii_cycles - 1.0:.1%} more than the best order"
    order = "; ".join(f"{role.name}: " + " ".join(step_text(step) for step in role.program) for role in pipeline.roles)
    return f"{text}\n\nThe kernel's own order ({order})\nreaches II {own.ii_cycles} ({own.status}){cost}."


def schedule_report(pipeline: Pipeline, schedule: Schedule) -> str:
    """The schedule for people: II with its proof, bounds, storage, a Gantt, patterns, the issue order."""
    head = f"{pipeline.name} on {pipeline.machine}"
    storage = "\n".join(f"  {limit.sentence()}" for limit in schedule.limits)
    if schedule.status == "infeasible":
        return f"{head}: infeasible\n{storage}"
    order = "program order" if schedule.program_order else "free order"
    rows = pipeline.rows_per_cta * pipeline.keys_per_iteration
    per_tile = schedule.ii_cycles * 128 * 128 / rows
    parts = [
        head,
        f"II {schedule.ii_cycles} cycles ({_proof(schedule)}), {order}; {per_tile:.0f} per 128x128 score tile",
        f"one iteration spends {schedule.span_cycles} cycles in flight, {schedule.overlap_depth} overlap; "
        f"solved in {schedule.solve_seconds * 1e3:.0f} ms",
        _bounds_text(pipeline, schedule),
        f"storage\n{storage}",
        text_gantt(pipeline, schedule),
        _patterns_text(pipeline, schedule),
    ]
    return "\n\n".join(parts)


def _proof(schedule: Schedule) -> str:
    if schedule.status == "optimal":
        return "proven optimal"
    return f"best found; no II below {schedule.bound} exists, gap {schedule.gap:.1%}"


def _bounds_text(pipeline: Pipeline, schedule: Schedule) -> str:
    limit = bounds(pipeline, with_roles=schedule.program_order)
    lines = [f"bounds for any order (II >= {limit.ii_lower:.0f}, set by {limit.binding})"]
    if schedule.program_order:
        lines = [f"bounds for this order (II >= {limit.ii_lower:.0f}, set by {limit.binding})"]
    for name, slack in sorted(limit.slack.items(), key=lambda item: (item[1], item[0])):
        lines.append(f"  {name:<18} {limit.ii_lower - slack:8.0f} cycles   slack {limit.slack_fraction[name]:6.1%}")
    # What an order costs is the recurrence it closes through the in-order roles and the engine's queue.
    lines.append(f"  {_recurrence_text('of any order', limit.rec)}")
    if not schedule.program_order:
        lines.append(f"  {_recurrence_text('of the order found', rec_mii(with_discovered_order(schedule, pipeline)))}")
    return "\n".join(lines)


def _recurrence_text(which: str, rec: RecMii) -> str:
    if not rec.edges:
        return f"heaviest recurrence {which}: none"
    walk = " -> ".join((*rec.ops_on_cycle, rec.ops_on_cycle[0]))
    return f"heaviest recurrence {which}: {walk}: {rec.latency:.0f} cycles in {rec.distance} iteration(s)"


def _patterns_text(pipeline: Pipeline, schedule: Schedule) -> str:
    ping = is_ping_pong(schedule, pipeline)
    intra = intra_warpgroup_overlap(schedule, pipeline)

    def shares(values: tuple[float, ...]) -> str:
        return " ".join(f"{value:.0%}" for value in values) or "-"

    lines = [
        f"ping-pong between query tiles: {'yes' if ping.found else 'no'} (softmax under other tiles' "
        f"matrix work {shares(ping.under_others)}, under its own {shares(ping.under_own)})",
        f"overlap within a warpgroup: {'yes' if intra.found else 'no'} (next QK under softmax "
        f"{shares(intra.next_qk)}, earlier PV under softmax {shares(intra.earlier_pv)})",
    ]
    for role, steps in matrix_issue_order(schedule, pipeline).items():
        lines.append(f"matrix issue order, {role}: " + " ".join(step_text(step) for step in steps))
    return "\n".join(lines)
