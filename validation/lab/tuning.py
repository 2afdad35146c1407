"""Tune attention for a shape: forecasts first, then, where the GPU at hand is the machine, the few best timed in turns.

tuning = tilecast.tune(tilecast.Workload(4, 16, 16, 8192, 8192, 128, 128), "h200-sxm")
print(tuning)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tilecast.base.files import cache_folder
from tilecast.base.pool import cores
from tilecast.base.progress import Progress, silent
from tilecast.codegen.compiler.kept import FOLDER
from tilecast.codegen.tune.compiled import Job, compile_candidates
from tilecast.codegen.tune.structure import Timed, diverse, pick_winner
from tilecast.codegen.tune.survey import COMPILED, TIMED, by_kept_loops, survey, timed_rule, with_machine_code
from tilecast.codegen.tune.trail import Candidate
from tilecast.codegen.tune.tuning import Tuning
from tilecast.model.chip.evaluate import PredictError
from tilecast.model.families import Family, find_family, named_knobs, native_family
from tilecast.model.forecast.level import Compiler, at_hand, settled
from tilecast.model.forecast.predict import predict
from tilecast.model.kernel.variant import variant_text
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine, machine_of
from tilecast.validation.lab.measure.records import Measured


def tune(
    workload: Workload,
    machine: Machine | str,
    *,
    family: str | None = None,
    budget: int = TIMED,
    compile: bool = True,
    candidates: int = COMPILED,
    clock: str | float = "sustained",
    table: str | Path | None = None,
    workers: int = 0,
    progress: Progress = silent,
    command: str = "tilecast.tune",
    version: str = "",
    fixed: str | None = None,
    compiler: Compiler | None = at_hand,
) -> Tuning:
    """The best variant for ``workload`` on ``machine`` with the trail of how it was chosen.

    ``budget`` kernels are timed where the GPU at hand is the machine (0: none); their rows go to ``table``, and points it
    already has are not measured again.  ``fixed`` are knobs ("cta_group=2,scheduler=grid") that every candidate has.  ``compile=False`` answers from the forecasts before compilation at once.
    With `loop_at_hand` or `kept_loop` as ``compiler`` candidates are compared by the loops at hand, and none is compiled.
    Raises PredictError, VariantError, MachineError, WorkloadError or PlanError (all ValueError) with one sentence.
    """
    chip = machine_of(machine)
    kernel = find_family(family) if family else native_family(chip)
    if budget < 0 or candidates < 1:
        raise PredictError(f"tune: budget takes 0 or more and candidates 1 or more, got {budget} and {candidates}")
    if budget > candidates:
        raise PredictError(
            f"tune: cannot time {budget} of {candidates} candidates: raise candidates or lower the budget"
        )
    progress("forecast", 0, 1)
    knobs = named_knobs(fixed, kernel) if fixed is not None else {}
    found = replace(survey(workload, chip, kernel, clock=clock, keep=candidates, fixed=knobs), budget=budget)
    progress("forecast", 1, 1)
    level = settled(compiler, workload.reduced(), chip, family=kernel.name, clock=clock)
    if level is not None:
        try:
            return _to_gpu(by_kept_loops(found, knobs), chip, table, progress, command, version)
        except PredictError:
            # With some knobs fixed no loop may be at hand where others are; only who asked for loops alone is refused.
            if compiler is level:
                raise
    if compile:
        found = _compiled(found, kernel, workers, progress)
    return _to_gpu(found, chip, table, progress, command, version)


def _to_gpu(
    found: Tuning, chip: Machine, table: str | Path | None, progress: Progress, command: str, version: str
) -> Tuning:
    """The few best timed, where there is a budget and the GPU at hand is the machine."""
    if not found.budget:
        return replace(found, notes=(*found.notes, "nothing was timed (budget 0): forecast only"))
    obstacle = _no_gpu(chip)
    if obstacle:
        return replace(found, notes=(*found.notes, f"nothing was timed: {obstacle}"))
    return _measured(found, Path(table) if table else Path("tune.csv"), progress, command, version)


def to_time(tuning: Tuning, budget: int) -> tuple[Candidate, ...]:
    """The candidates that ``budget`` lets a GPU time, best guess first (`codegen.tuning.timed_rule`)."""
    alike, most = timed_rule(tuning)
    return diverse(tuning.shortlist, lambda c: c.variant, budget, alike, most)


def _compiled(tuning: Tuning, family: Family, workers: int, progress: Progress) -> Tuning:
    """The kept candidates compiled and forecast again from their machine code."""
    try:
        import triton  # noqa: F401
    except ImportError:
        note = "triton is not installed: chosen by the forecast before compilation (pip install 'tilecast[gpu]')"
        return replace(tuning, notes=(*tuning.notes, note))
    chosen = tuning.shortlist
    # One clock for all: which kernel takes fewer cycles is what machine code tells.
    mhz = predict(
        tuning.workload, tuning.machine, chosen[0].variant, clock=tuning.clock, interval=False, compiler=None
    ).clock_mhz
    folder = str(cache_folder(FOLDER))
    jobs = [Job(family.template, c.variant, tuning.workload, tuning.machine, mhz, folder) for c in chosen]
    made = compile_candidates(jobs, workers or min(12, cores()), progress)
    return with_machine_code(tuning, list(zip(chosen, made, strict=True)))


def _no_gpu(machine: Machine) -> str:
    """Why nothing can be timed here; "" when the GPU at hand is the machine."""
    try:
        import torch
    except ImportError:
        return "torch is not installed: forecast only (pip install 'tilecast[gpu]')"
    if not torch.cuda.is_available():
        return "no CUDA GPU here: forecast only"
    from tilecast.validation.lab.measure.detect import match_machine

    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    if 10 * capability[0] + capability[1] != machine["chip.compute_capability"]:
        return f"the GPU here is {name}, not {machine.name}: forecast only"
    here = match_machine(name, capability)
    # A machine file of the user's own may well describe this GPU: only a shipped machine of another name is another one.
    if here.name != machine.name and machine.name in _shipped():
        return f"the GPU here is {name} ({here.name}), not {machine.name}: forecast only"
    return ""


def _shipped() -> tuple[str, ...]:
    from tilecast.model.machine.machine import machine_names

    return tuple(machine_names())


def _measured(tuning: Tuning, table: Path, progress: Progress, command: str, version: str) -> Tuning:
    """Time the few best in turns and choose among them by the stated rule."""
    from tilecast.validation.lab.measure.plan import Item, Options
    from tilecast.validation.lab.measure.records import read
    from tilecast.validation.lab.measure.run import measure

    chosen = to_time(tuning, tuning.budget)
    kernel = find_family(tuning.family).template
    items = [Item(kernel, variant_text(c.variant), tuning.workload, tuning.machine.name) for c in chosen]
    progress("time", 0, len(items))
    failures = measure(items, table, Options(command=command, version=version))
    progress("time", len(items), len(items))
    broken = {failure.item.variant: failure.reason for failure in failures}
    rows = {
        row.variant: row
        for row in (read(table) if table.exists() else [])
        if row.kernel == kernel and row.workload() == tuning.workload and row.mode == "short"
    }
    timed = [
        (c, rows[item.variant])
        for c, item in zip(chosen, items, strict=True)
        if item.variant in rows and item.variant not in broken
    ]
    if not timed:
        reason = next(iter(broken.values()), "no row came back")
        return replace(tuning, notes=(*tuning.notes, f"timing failed ({reason}): chosen by {tuning.by}"))
    return _chosen(tuning, timed, broken)


def _chosen(tuning: Tuning, timed: Sequence[tuple[Candidate, Measured]], broken: dict[str, str]) -> Tuning:
    """The trail with the times in it and the winner by the tie rule."""
    # In cycles: kernels that ran in turns are compared free of the clock's drift.
    marks = [
        Timed(c.variant, c.order, row.cycles, row.cycles_low, row.cycles_high, c.registers or 0, c.spill_bytes or 0)
        for c, row in timed
    ]
    index, ties = pick_winner(marks)
    changed: dict[int, Candidate] = {}
    for i, (c, row) in enumerate(timed):
        share = marks[i].seconds / marks[index].seconds - 1
        if i == index:
            text = f"{'one of ' if len(ties) > 1 else ''}the fastest of {len(timed)} timed"
            if len(ties) > 1:
                text += f"; {len(ties)} tie: no spills, fewest registers, plainest, earliest wins"
        elif i in ties:
            text = f"measured {share:+.1%} against the winner: a tie that the rule gives to it"
        else:
            text = f"measured {share:.1%} slower than the winner"
        changed[c.order] = replace(
            c, fate="winner" if i == index else "measured", reason=text, measured_s=row.ms / 1e3,
            measured_low_s=row.ms_low / 1e3, measured_high_s=row.ms_high / 1e3,
        )  # fmt: skip
    out = []
    for c in tuning.candidates:
        if c.order in changed:
            out.append(changed[c.order])
        elif variant_text(c.variant) in broken:
            why = f"timing failed: {broken[variant_text(c.variant)]}"
            out.append(replace(c, fate="compile", reason=why, kept=False))
        else:
            out.append(replace(c, kept=False))
    return replace(tuning, by="measured", candidates=tuple(out))
