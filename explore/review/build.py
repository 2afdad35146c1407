"""The review, put together: one pure function from the question to everything the report says."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tilecast.base.progress import Progress, silent
from tilecast.explore.review.content.assumptions import assumptions, machine_digest
from tilecast.explore.review.content.considered import binding_name, considered, workload_options
from tilecast.explore.review.content.content import Provenance, Regime, Side, Tornado
from tilecast.explore.review.content.judgement import Evidence, peak_share, question, risks, verdict
from tilecast.explore.review.content.reviewed import Comparison, Reviewed, as_change
from tilecast.explore.review.content.roofline import ceilings
from tilecast.explore.review.content.timeline import timeline
from tilecast.explore.review.passes import backward, forward
from tilecast.explore.review.review import Review
from tilecast.model.forecast.answer import BEFORE, Explained
from tilecast.model.forecast.level import Compiler, at_hand
from tilecast.model.kernel.variant import variant_text
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine, machine_names, machine_of
from tilecast.model.passes import FORWARD, Pass
from tilecast.model.whatif.asymmetry import SHOWN, AsymmetryMap, asymmetry_map
from tilecast.model.whatif.break_even import break_evens

_REVIEWED = {reviewed.asked.name: reviewed for reviewed in (forward.REVIEWED, backward.REVIEWED)}
#: Facts that move the time by less than this (percent per percent) are named, not drawn.
LEAST = 0.005
_STEP = 0.05
#: Steps that `report` tells its progress.
_STAGES = 5


def report(
    workload: Workload,
    machine: Machine | str,
    variant: Any = None,
    *,
    family: str | None = None,
    clock: str | float = "sustained",
    changes: Mapping[str, float] | None = None,
    scales: Mapping[str, float] | None = None,
    measured: str | Path | None = None,
    date: str = "",
    machine_name: str = "",
    map_grid: int = 9,
    compiler: Compiler | None = at_hand,
    progress: Progress = silent,
    asked_pass: Pass = FORWARD,
) -> Review:
    """The design review of ``workload`` on ``machine``; ``.page()`` is the HTML file, ``.markdown()`` its twin.

    ``variant`` fixes the kernel, else the best of ``family`` is searched for as `what_if` does; ``changes`` and
    ``scales`` add a before and after; ``measured`` is a table of `tilecast measure`; ``date`` is printed as it is;
    ``machine_name`` is how the command in the report names the machine (a file's path; default: its name);
    ``map_grid`` is the cells of the map each way; ``compiler`` the level of every forecast, as in `predict`;
    ``asked_pass`` the pass that is reviewed (`tilecast.BACKWARD`: before compilation, and ``measured`` is a table of tools/compare_backward.py).
    Raises PredictError, VariantError, MachineError, WorkloadError or RecordError (all ValueError) with one sentence.
    """
    chip = machine_of(machine)
    machine_name = machine_name or (machine if isinstance(machine, str) else machine.name)
    table, r = Path(measured) if measured is not None else None, _REVIEWED[asked_pass.name]
    if table is not None:
        r.check_table(table)  # refuses what is no table before the work begins
    changed: Comparison | None = None
    progress("review", 0, _STAGES, "what if" if changes or scales else "forecast")
    if changes or scales:
        changed = r.what_if(workload, chip, changes, scales, variant, family, clock, compiler)
        if changed.before.level == BEFORE:
            # What machine code does not follow is forecast before compilation, and then all of the page is.
            compiler = None
    progress("review", 1, _STAGES, "sensitivities")
    p = r.predict(workload, chip, variant, family, clock, True, compiler)
    level = asked_pass.settled(compiler, p.workload, chip, p.variant, None, clock)
    change = as_change(changed, _side, _text) if changed is not None else None
    tornado = _tornado(r, p, clock, level)
    progress("review", 2, _STAGES, "alternatives")
    others = considered(r, p, clock, level)
    progress("review", 3, _STAGES, "assumptions and accuracy")
    found = Evidence(p, ceilings(p, r.work(p)), assumptions(p), others, r.regions(p, table), tornado, change)
    bound = binding_name(p)
    progress("review", 4, _STAGES, "the map")
    drawn = _map(r, p, machine_name, clock, map_grid, level)
    first, *rest = sorted(p.kernels, key=lambda kernel: -kernel.time_ms)
    progress("review", _STAGES, _STAGES)
    return Review(
        title=f"{chip.title}: {asked_pass.words}{workload.label()}", asked_pass=asked_pass.name, machine=chip.title, workload=workload.label(),
        question=question(p, change), verdict=verdict(found), regimes=_regimes(r, p, level), kernel=" and ".join(k.pipeline.name for k in p.kernels),
        variant=variant_text(p.variant), binding=bound, peak_share=peak_share(p), waterfall=p.waterfall,
        ceilings=tuple(found.ceilings), timeline=timeline(first, _title(first.name, not rest)),
        other_timelines=tuple(timeline(k, _title(k.name, False)) for k in rest), launches=r.launches(p), tornado=found.tornado,
        map=drawn, variants=found.variants,
        regions=tuple(found.regions), assumptions=tuple(found.assumptions), conditions=_conditions(r, p), risks=risks(found),
        change=change,
        provenance=Provenance(
            _command(r, p, machine_name, variant, clock, changes, scales, measured, date, level), _version(), source_digest(), date, machine_digest(chip)
        ),
    )  # fmt: skip


def _title(kernel: str, only: bool) -> str:
    return "the loop as simulated" if only else f"the loop of {kernel}, as simulated"


def _regimes(r: Reviewed, p: Explained, level: Compiler | None) -> tuple[Regime, ...]:
    """The clock asked for first, then the others, each with its own interval."""
    out = [_regime(p)]
    for name, _, _, _ in p.other_regimes:
        out.append(_regime(r.predict(p.workload, p.machine, p.variant, None, name, True, level)))
    return tuple(out)


def _regime(p: Explained) -> Regime:
    low, high = p.tflops_interval
    return Regime(p.regime, p.time_ms, p.tflops, low, high, p.clock.mhz, p.clock.words(p.machine, p.regime))


def _tornado(r: Reviewed, p: Explained, clock: str | float, level: Compiler | None) -> Tornado:
    rows = r.sensitivities(p.workload, p.machine, p.variant, clock, _STEP, level)
    points = break_evens(p.workload, p.machine, p.variant, clock=clock, compiler=level, asked_pass=r.asked)
    drawn = tuple(r for r in rows if max(abs(r.fixed), abs(r.reoptimised)) >= LEAST)
    return Tornado(_STEP, drawn, tuple(r.fact for r in rows if r not in drawn), points)


def _map(
    r: Reviewed, p: Explained, machine_name: str, clock: str | float, grid: int, level: Compiler | None
) -> AsymmetryMap:
    """The map around the machine, with the machine itself on it where it can be loaded by its name."""
    known = machine_name in machine_names() or machine_name.endswith(".toml")
    shown = dict.fromkeys((*SHOWN, machine_name)) if known else SHOWN
    held = None if clock == "sustained" else p.clock.mhz
    return asymmetry_map(
        p.workload,
        p.machine,
        variant=p.variant,
        grid=grid,
        clock=held,
        shown=tuple(shown),
        compiler=level,
        asked_pass=r.asked,
    )


def _side(p: Explained, title: str) -> Side:
    return Side(
        title, p.time_ms, p.tflops, p.clock.mhz, binding_name(p), variant_text(p.variant), p.waterfall, timeline(p.main, title)
    )  # fmt: skip


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def _conditions(r: Reviewed, p: Explained) -> tuple[str, ...]:
    """What holds for every forecast and is no machine fact."""
    regime = {
        "sustained": "Back-to-back work for seconds: the board's power limit holds the clock.",
        "short": "Runs of tens of milliseconds: the limiter lets power overshoot by what the same boards show for short matrix products.",
    }.get(p.regime, "The SM clock is fixed by the user; power is reported, not limited.")
    return (
        regime,
        *_level(p),
        "The GPU runs this kernel alone; inputs are random as in benchmarks (data values move power, and so the clock).",
        r.counted,
        "The interval moves every fact with a range to its ends in turn and adds the changes in quadrature; it holds no model error.",
    )


def _level(p: Explained) -> tuple[str, ...]:
    """What the forecasts stand on, where that is machine code."""
    if p.compiled is None:
        return ()
    made = p.compiled.made
    return (
        f"Every time of a kernel is from machine code ({made.target}, {made.compiler}; {made.followed}); before compilation this kernel's forecast "
        f"is {p.compiled.before_ms:.4g} ms.  Alternatives whose machine code is not at hand are not compared.",
    )


def _command(
    r: Reviewed, p: Explained, name: str, variant: Any, clock: str | float, changes: Mapping[str, float] | None,
    scales: Mapping[str, float] | None, measured: str | Path | None, date: str,
    level: Compiler | None,
) -> str:  # fmt: skip
    """The command line that makes this report again, with the kernel spelt out."""
    words = [
        "tilecast",
        "report",
        "--machine",
        name,
        *(() if r.asked is FORWARD else ("--pass", r.asked.name)),
        *workload_options(p.workload),
        "--clock",
        f"{clock:g}" if isinstance(clock, float) else str(clock),
    ]
    if p.machine.given_power_w is not None:
        words += ["--power", f"{p.machine.given_power_w:g}"]
    if variant is not None:
        words += ["--variant", variant_text(variant)]
    elif p.variant.family != r.native(p.workload, p.machine):
        words += ["--family", p.variant.family]
    for option, values in (("--set", changes), ("--scale", scales)):
        for fact, value in (values or {}).items():
            words += [option, f"{fact}={value:g}"]
    if measured is not None:
        words += ["--measured", str(measured)]
    if level is not None:
        words += ["--level", "kept"]
    if date:
        words += ["--date", date]
    return shlex.join([*words, "-o", "review.html"])


def _version() -> str:
    try:
        return version("tilecast")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "not installed"


@lru_cache(maxsize=1)
def source_digest() -> str:
    """First 12 hex digits of SHA-256 over the model's code and machine files: which tilecast made the numbers."""
    root = Path(__file__).parents[2] / "model"
    total = hashlib.sha256()
    for path in sorted(p for p in root.rglob("*") if p.suffix in (".py", ".toml")):
        total.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()[:12]
