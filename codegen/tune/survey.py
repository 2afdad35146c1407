"""The stages of tuning that need no GPU: survey by forecast, survey by machine code.

Each stage takes a `Tuning` and returns another one; nothing is ever taken out of it, a candidate only gets a `fate` and a
reason.  The stages read aloud: legal? writable? the deepest ring? forecast before compilation, forecast from machine code,
measured (`validation.tuning`), chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from tilecast.codegen.tune.compiled import CompiledCandidate
from tilecast.codegen.tune.structure import structure, tile
from tilecast.codegen.tune.trail import FATES, Candidate, by_guess
from tilecast.codegen.tune.tuning import Tuning
from tilecast.model.chip.evaluate import PredictError
from tilecast.model.compiled.loops.choose import looked_at
from tilecast.model.compiled.loops.shelf import kept_loop
from tilecast.model.families import Family, family_of, knob_space, legality, writable
from tilecast.model.kernel.variant import Variant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.search.best import Best, best
from tilecast.model.search.rank import Ranked, rank

#: Candidates compiled by default, and how many of one structure: the forecast before compilation gets structures wrong by
#: up to 20 %, so a dozen of them go on; what is left to the second of each is its depths and orders.
COMPILED = 24
COMPILED_PER_STRUCTURE = 2
#: Timed by default; of one structure at most the majority of five.  Without machine code it is not known yet what the
#: compiler makes of a tile, so at most two of one tile.
TIMED = 5
TIMED_PER_STRUCTURE = 3
TIMED_PER_TILE = 2


def survey(
    workload: Workload, machine: Machine, family: Family, *, clock: str | float = "sustained", keep: int = COMPILED,
    per_structure: int = COMPILED_PER_STRUCTURE, fixed: Mapping[str, object] | None = None,
) -> Tuning:  # fmt: skip
    """The whole space by forecast: who is illegal, cannot be written, cannot win, and the ``keep`` that go on.

    ``fixed`` are knobs with the one value that all candidates have.

    Raises PredictError, with the first obstacle, where nothing can be written.
    """
    # A window that hides nothing is another mask, with a space of its own.
    workload = workload.reduced()
    out: list[Candidate] = []
    ready: list[Candidate] = []
    space = knob_space(family.name, workload, machine)
    if fixed:
        space = tuple(dict.fromkeys(replace(v, **fixed) for v in space))  # type: ignore[arg-type]
    for order, variant in enumerate(space):
        verdict = legality(variant, workload, machine)
        fate = "illegal"
        if verdict.legal:
            verdict, fate = writable(variant, workload, machine), "not writable"
        if verdict.legal:
            ready.append(Candidate(variant, order, "", ""))
        else:
            out.append(Candidate(variant, order, fate, verdict.sentence()))
    if not ready:
        first = min(out, key=lambda c: (FATES.index(c.fate) < 1, c.order))
        raise PredictError(f"{family.name} cannot be written for {workload.label()} on {machine.name}: {first.reason}")
    deepest, fewer = _deepest(ready)
    ranking = rank(
        [c.variant for c in deepest], workload, machine, clock=clock, keep=keep, group=structure, per_group=per_structure
    )  # fmt: skip
    # The kernel that `predict` names, whatever the depth of its ring: the search is the same one.
    chosen = best(workload, machine, family.name, clock)
    if fixed:
        top = rank([c.variant for c in ready], workload, machine, clock=clock, keep=1).best[0]
        assert top.seconds is not None
        chosen = Best(top.variant, top.seconds, "best with the knobs that are fixed", 0, 0, ())
    leader, last = chosen.seconds, ranking.best[-1].seconds
    assert last is not None

    def known(entry: Ranked, fate: str, reason: str) -> Candidate:
        return replace(
            deepest[entry.order], fate=fate, reason=reason, floor_s=entry.floor_seconds, forecast_s=entry.seconds
        )

    for entry in ranking.best:
        text = _behind(entry.seconds, leader, "the leader by forecast")
        out.append(replace(known(entry, "forecast", text), kept=True))
    for entry in ranking.behind:
        assert entry.seconds is not None
        why = (
            f"{per_structure} of its structure are faster by forecast" if entry.seconds <= last else f"{keep} are kept"
        )
        out.append(known(entry, "forecast", f"{_behind(entry.seconds, leader, 'the leader by forecast')}; {why}"))
    for entry in ranking.dropped:
        text = f"takes at least {1e3 * entry.floor_seconds:.4g} ms: {entry.floor_seconds / leader - 1:.1%} above the leader"
        out.append(known(entry, "floor", f"{text}, and the last that could be kept is faster"))
    found = Tuning(workload, machine, family.name, clock, 0, "forecast", _in_order([*out, *fewer]))
    return choose(_with_chosen(found, chosen), [_order_of(found, chosen.variant)])


def by_kept_loops(tuning: Tuning, fixed: Mapping[str, object] | None = None) -> Tuning:
    """The candidates that the search by machine code looks at (`loops.choose`), compared by the loops at hand.

    Nothing is compiled.  Candidates whose loops are not at hand fall out; ``fixed`` as in `survey`.  Raises PredictError
    where no candidate's loop is at hand.
    """
    found = looked_at(tuning.workload, tuning.machine, tuning.family, tuning.clock)
    times = {v: s for v, s in found if all(getattr(v, knob) == value for knob, value in (fixed or {}).items())}
    if not times:
        raise PredictError(
            f"no loop of these candidates for {tuning.workload.label()} on {tuning.machine.name} is at hand: use --level auto "
            "or fluid, or compile some with tilecast loops"
        )
    pairs = []
    for c in tuning.candidates:
        if c.variant in times:
            made = kept_loop(tuning.workload.reduced(), tuning.machine, c.variant)
            facts = CompiledCandidate("", "", times[c.variant], made.registers, made.stack_bytes)
            pairs.append((c, facts))
        elif c.kept:
            pairs.append(
                (c, CompiledCandidate(unread="its loop is not at hand, or further behind than those looked at"))
            )
    return with_machine_code(tuning, pairs)


def _order_of(tuning: Tuning, variant: Variant) -> int:
    """Position of ``variant`` in the space, or behind it for one whose share was refined between the space's steps."""
    return next((c.order for c in tuning.candidates if c.variant == variant), len(tuning.candidates))


def _with_chosen(tuning: Tuning, chosen: Best) -> Tuning:
    """The search's own choice among those that go on."""
    order = _order_of(tuning, chosen.variant)
    first = Candidate(chosen.variant, order, "forecast", "", kept=True, forecast_s=chosen.seconds)
    others = tuple(c for c in tuning.candidates if c.order != order)
    return replace(tuning, candidates=_in_order([*others, first]))


def _deepest(candidates: Sequence[Candidate]) -> tuple[list[Candidate], list[Candidate]]:
    """(candidates with the deepest K/V ring of those alike, the others): on the GPU a deeper ring rides out late copies, which
    the forecast does not know; the search's own choice goes on besides."""
    best: dict[Variant, Candidate] = {}
    for c in candidates:
        depth = family_of(c.variant).ring_depth
        kind: Variant = replace(c.variant, kv_stages=0) if depth else c.variant  # type: ignore[arg-type]
        if kind not in best or (depth and depth(c.variant) > depth(best[kind].variant)):
            best[kind] = c
    kept = {c.order for c in best.values()}
    fewer = [
        replace(c, fate="fewer stages", reason="the same kernel with more K/V stages goes on")
        for c in candidates
        if c.order not in kept
    ]
    return [c for c in candidates if c.order in kept], fewer


def with_machine_code(tuning: Tuning, compiled: Sequence[tuple[Candidate, CompiledCandidate]]) -> Tuning:
    """What compiling found, put into the trail; candidates are then compared by machine code where it can be read.

    Where no forecast from machine code exists (only the families for Hopper have one) those that spill are dropped, unless
    all do.  Nothing changes where not one candidate compiled.
    """
    reads = any(made.seconds is not None for _, made in compiled)
    usable = [(c, made) for c, made in compiled if not made.failure and (made.seconds is not None or not reads)]
    if not usable:
        return replace(
            tuning, notes=(*tuning.notes, "no candidate could be compiled: chosen by the forecast before it")
        )
    stage = "machine code" if reads else "forecast"
    dry = [made for _, made in usable if not made.spill_bytes]
    leader = min(_guess(c, made) for c, made in usable)
    changed: dict[int, Candidate] = {}
    for c, made in compiled:
        known = replace(c, kept=False, compiled_s=made.seconds, registers=made.registers, spill_bytes=made.spill_bytes)
        if made.failure:
            changed[c.order] = replace(known, fate="compile", reason=made.failure)
        elif reads and made.seconds is None:
            changed[c.order] = replace(known, fate="compile", reason=made.unread)
        elif not reads and made.spill_bytes and dry:
            changed[c.order] = replace(known, fate="compile", reason=f"spills {made.spill_bytes} bytes a thread")
        else:
            spills = f"; spills {made.spill_bytes} bytes a thread" if made.spill_bytes else ""
            by = "the leader from machine code" if reads else "the leader by forecast"
            text = _behind(_guess(c, made), leader, by) + spills
            changed[c.order] = replace(known, fate=stage, reason=text, kept=True)
    merged = tuple(changed.get(c.order, _unwon(c)) for c in tuning.candidates)
    found = replace(tuning, by=stage, candidates=merged)
    ready = sorted((c for c in changed.values() if c.kept), key=by_guess)
    return choose(found, [c.order for c in ready])


def _guess(candidate: Candidate, made: CompiledCandidate) -> float:
    seconds = made.seconds if made.seconds is not None else candidate.forecast_s
    assert seconds is not None
    return seconds


def choose(tuning: Tuning, ordered: Sequence[int]) -> Tuning:
    """The first of ``ordered`` (positions in the space) wins."""
    out = []
    for c in tuning.candidates:
        if c.order == ordered[0]:
            out.append(
                replace(
                    c, fate="winner", reason=f"fastest by {_level(tuning.by)}; equals go by their order in the space"
                )
            )
        else:
            out.append(_unwon(c))
    return replace(tuning, candidates=tuple(out))


def _level(by: str) -> str:
    return {"forecast": "the forecast before compilation", "machine code": "the forecast from machine code"}.get(by, by)


def _unwon(c: Candidate) -> Candidate:
    return replace(c, fate="forecast", reason="overtaken by a later stage") if c.fate == "winner" else c


def timed_rule(tuning: Tuning) -> tuple[Callable[[Variant], tuple[object, ...]], int]:
    """(what counts as alike, how many alike may be timed) for the stage that ``tuning`` has reached."""
    return (structure, TIMED_PER_STRUCTURE) if tuning.by == "machine code" else (tile, TIMED_PER_TILE)


def _behind(seconds: float | None, leader: float, whom: str) -> str:
    assert seconds is not None
    share = seconds / leader - 1
    return f"{share:.1%} slower than {whom}" if share >= 0.0005 else f"level with {whom}"


def _in_order(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    return tuple(sorted(candidates, key=lambda c: c.order))
