"""The best order of a kernel's loop, its proof, and the kernel's own order, for people and as data."""

from __future__ import annotations

from dataclasses import dataclass

from tilecast.base.html_table import html_table
from tilecast.base.progress import Progress, silent
from tilecast.model.chip.evaluate import PredictError
from tilecast.model.families import build_pipeline, legality, loop_shape, native_family
from tilecast.model.forecast.level import Compiler, at_hand, search_of
from tilecast.model.kernel.variant import Variant, short_text, variant_text
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine, machine_of
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
from tilecast.model.schedule.solve import Schedule, Storage, optimal_schedule, storage_of
from tilecast.model.sm.bounds import RecMii, bounds, rec_mii


@dataclass(frozen=True, slots=True, repr=False)
class ScheduledKernel:
    """The loop of one kernel, its best order and its own; both checked independently of the solver."""

    workload: Workload
    machine: Machine
    variant: Variant
    #: How the variant was found: "as given", or what was searched.
    variant_origin: str
    pipeline: Pipeline
    free: Schedule
    own: Schedule

    def text(self, width: int = 100) -> str:
        """What `tilecast schedule` prints."""
        head = f"{self.machine.title}: {self.workload.label()}\n  {short_text(self.variant)}  ({self.variant_origin})"
        return f"{head}\n\n{schedules_text(self.pipeline, self.free, self.own, width)}"

    def __repr__(self) -> str:
        ends = f"II {self.free.ii_cycles} cycles in the best order, {self.own.ii_cycles} in its own"
        return f"<ScheduledKernel {self.machine.name}: {self.workload.label()}: {ends}>"

    def _repr_html_(self) -> str:
        rows = [
            (name, s.status, f"{s.ii_cycles}", f"{s.bound}", f"{s.span_cycles}", f"{s.overlap_depth}")
            for name, s in (("best order", self.free), ("its own order", self.own))
        ]
        title = f"{self.machine.title}: {self.workload.label()}; {short_text(self.variant)} ({self.variant_origin})"
        return html_table(title, ("cycles", "status", "II", "lower bound", "span", "iterations at once"), rows)

    def to_dict(self) -> dict[str, object]:
        """Keys documented in docs/json.md; cycles are whole SM clocks."""

        return {
            "machine": self.machine.name, "workload": self.workload.as_dict(), "variant": variant_text(self.variant),
            "variant_origin": self.variant_origin, "pipeline": self.pipeline.name, "best_order": schedule_dict(self.pipeline, self.free),
            "own_order": schedule_dict(self.pipeline, self.own),
        }  # fmt: skip


def schedule_dict(pipeline: Pipeline, schedule: Schedule) -> dict[str, object]:
    """Keys of --json for one schedule."""
    limit = bounds(pipeline, with_roles=schedule.program_order)
    return {
        "status": schedule.status, "ii_cycles": schedule.ii_cycles, "bound_cycles": schedule.bound,
        "gap": schedule.gap, "span_cycles": schedule.span_cycles, "overlap_depth": schedule.overlap_depth,
        "lower_bound_cycles": limit.ii_lower, "lower_bound_set_by": limit.binding,
        "starts": schedule.starts, "issues": schedule.issues,
        "order": {unit: list(ops) for unit, ops in schedule.order_per_unit.items()},
        "storage": [{"resource": s.resource, "demand": s.demand, "limit": s.limit, "unit": s.unit, "holds": s.holds}
                    for s in schedule.limits],
    }  # fmt: skip


def schedule_kernel(
    workload: Workload, machine: Machine | str, variant: Variant | None = None, family: str | None = None,
    clock: str | float = "sustained", time_limit_s: float = 10.0, compiler: Compiler | None = at_hand,
    progress: Progress = silent,
) -> ScheduledKernel:  # fmt: skip
    """The schedules of a kernel's loop: of ``variant``, or of the best of ``family`` as `predict` finds it at ``clock`` and the level of ``compiler``.

    ``time_limit_s`` is for each of the two.  Raises PredictError for a kernel that cannot run.
    """
    work = workload.reduced()
    chip = machine_of(machine)
    chosen, origin = _kernel(work, chip, variant, family, clock, compiler)
    pipeline = build_pipeline(loop_shape(work), chosen, chip)
    return ScheduledKernel(
        work, chip, chosen, origin, pipeline, *solve_both(pipeline, storage_of(chip), time_limit_s, progress)
    )


def _kernel(
    work: Workload,
    machine: Machine,
    variant: Variant | None,
    family: str | None,
    clock: str | float,
    compiler: Compiler | None = at_hand,
) -> tuple[Variant, str]:
    """The kernel whose loop is scheduled, and how it was found."""
    if variant is None:
        found = search_of(compiler)(work, machine, family or native_family(machine).name, clock)
        return found.variant, found.scope
    verdict = legality(variant, work, machine)
    if not verdict.legal:
        raise PredictError(f"{variant.family} cannot run {work.label()} on {machine.name}: {verdict.sentence()}")
    return variant, "as given"


def solve_both(
    pipeline: Pipeline, storage: Storage, time_limit_s: float = 10.0, progress: Progress = silent
) -> tuple[Schedule, Schedule]:
    """(best order, the kernel's own order) in the ``storage`` of a CTA, both checked.

    Raises PipelineError for a deadlocked pipeline and RuntimeError when the independent checker rejects what the solver
    returned.
    """
    found = []
    for done, own in enumerate((False, True)):
        progress("solve", done, 2, "the kernel's own order" if own else "any order")
        schedule = optimal_schedule(pipeline, storage=storage, time_limit_s=time_limit_s, respect_program_order=own)
        wrong = check_schedule(pipeline, schedule)
        if wrong:
            raise RuntimeError(f"the schedule of {pipeline.name} fails its check: {'; '.join(wrong)}")
        found.append(schedule)
    progress("solve", 2, 2)
    return found[0], found[1]


def schedules_text(pipeline: Pipeline, free: Schedule, own: Schedule, width: int = 100) -> str:
    """The best order, and what the kernel's own costs against it."""
    text = schedule_report(pipeline, free, width)
    if free.status == "infeasible":
        return text
    cost = ""
    if free.status == "optimal":
        # Against a search that was stopped early a difference would say nothing.
        cost = f", {own.ii_cycles / free.ii_cycles - 1.0:.1%} more than the best order"
    order = "; ".join(f"{role.name}: " + " ".join(step_text(step) for step in role.program) for role in pipeline.roles)
    return f"{text}\n\nThe kernel's own order ({order})\nreaches II {own.ii_cycles} ({own.status}){cost}."


def schedule_report(pipeline: Pipeline, schedule: Schedule, width: int = 100) -> str:
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
        text_gantt(pipeline, schedule, min(width, 160)),
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
    return f"heaviest recurrence {which}: {walk}: {rec.latency:.0f} cycles in {rec.distance} iteration{'s' if rec.distance > 1 else ''}"


def _patterns_text(pipeline: Pipeline, schedule: Schedule) -> str:
    ping = is_ping_pong(schedule, pipeline)
    intra = intra_warpgroup_overlap(schedule, pipeline)

    def shares(tiles: tuple[int, ...], values: tuple[float, ...]) -> str:
        return ", ".join(f"tile {tile} {value:.0%}" for tile, value in zip(tiles, values, strict=False)) or "-"

    lines = [
        f"ping-pong between query tiles: {'yes' if ping.found else 'no'} (softmax under other tiles' "
        f"matrix work {shares(ping.tiles, ping.under_others)}, under its own {shares(ping.tiles, ping.under_own)})",
        f"overlap within a warpgroup: {'yes' if intra.found else 'no'} (next QK under softmax "
        f"{shares(intra.tiles, intra.next_qk)}, earlier PV under softmax {shares(intra.tiles, intra.earlier_pv)})",
    ]
    for role, steps in matrix_issue_order(schedule, pipeline).items():
        lines.append(f"matrix issue order, {role}: " + " ".join(step_text(step) for step in steps))
    return "\n".join(lines)
