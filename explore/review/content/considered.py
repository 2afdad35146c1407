"""Variants beside the chosen one: every knob changed alone, the authors' kernel, other families."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from tilecast.explore.review.content.content import Considered, Variants
from tilecast.explore.review.content.reviewed import Reviewed
from tilecast.model.chip.evaluate import PredictError
from tilecast.model.families import one_knob_away
from tilecast.model.forecast.answer import Explained
from tilecast.model.forecast.level import Compiler, follows
from tilecast.model.kernel.variant import variant_text
from tilecast.model.kernel.workload import Workload

#: Times within this are a tie: no forecast or measurement tells them apart.
TIE = 0.005
_ORDER = {"chosen": 0, "faster": 1, "tie": 2, "slower": 3, "refused": 4}


def considered(r: Reviewed, p: Explained, clock: str | float, level: Compiler | None = None) -> Variants:
    """Alternatives of ``p`` with the reason each was not taken; the family's space is counted, not forecast.

    ``level`` (`forecast.level.settled`) is that of ``p``: an alternative that cannot be forecast at it is not compared.
    """
    work, machine, chosen = p.workload, p.machine, p.variant
    space = r.space(chosen, work, machine)
    legal = sum(not r.refusal(v, work, machine) for v in space)
    rows: dict[str, Considered] = {}
    for change, variant in _alternatives(r, p, space, clock):
        rows.setdefault(variant_text(variant), _row(r, p, change, variant, clock, level))
    text = variant_text(chosen)
    rows[text] = Considered("", text, "chosen", p.tflops, 0.0, _why_chosen(p))
    listed = sorted(rows.values(), key=lambda row: (_ORDER[row.verdict], row.slower or 0.0, row.change))
    return Variants(text, tuple(listed), len(space), legal, r.compared)


def difference(a: Any, b: Any) -> str:
    """What differs in ``b`` from ``a``, as knobs; the family alone when it is another."""
    if a.family != b.family:
        return f"family={b.family}"
    return ", ".join(f"{name}={_plain(getattr(b, name))}" for name in _knobs(b) if getattr(a, name) != getattr(b, name))


def _knobs(variant: Any) -> tuple[str, ...]:
    return tuple(f.name for f in fields(variant) if f.name != "family")


def _plain(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def _given(p: Explained) -> bool:
    return p.variant_origin == "as given"


def _why_chosen(p: Explained) -> str:
    return "given by the user" if _given(p) else f"shortest forecast of those compared: {p.variant_origin}"


def _alternatives(r: Reviewed, p: Explained, space: tuple[Any, ...], clock: str | float) -> Iterable[tuple[str, Any]]:
    """(what is special about it, variant), without the chosen one."""
    chosen = p.variant
    shipped = r.shipped(chosen, p.workload, p.machine)
    if shipped is not None and shipped != chosen:
        yield f"as the authors ship it: {difference(chosen, shipped)}", shipped
    for other in one_knob_away(chosen, space):
        yield difference(chosen, other), other
    for family, variant in r.others(chosen, p.workload, p.machine, clock):
        yield f"another family: {family}", variant


def _row(
    r: Reviewed, p: Explained, change: str, variant: Any, clock: str | float, level: Compiler | None
) -> Considered:
    text = variant_text(variant)
    refused = r.refusal(variant, p.workload, p.machine)
    if refused:
        return Considered(change, text, "refused", None, None, refused)
    base, said = p, ""
    if not follows(level, p.workload, p.machine, variant):
        # Two levels do not compare: both as they are before compilation.
        level, said = None, " (both before compilation: its loop is not at hand)"
    try:
        if said:
            base = r.predict(p.workload, p.machine, p.variant, None, clock, False, None)
        other = r.predict(p.workload, p.machine, variant, None, clock, False, level)
    except (PredictError, ValueError) as error:
        return Considered(change, text, "refused", None, None, str(error))
    slower = other.time_ms / base.time_ms - 1.0
    tflops = p.tflops / (1.0 + slower) if said else other.tflops
    if abs(slower) <= TIE:
        return Considered(change, text, "tie", tflops, slower, f"same time to within {TIE:.1%}{said}")
    name = "slower" if slower > 0 else "faster"
    why = f"{abs(slower):.1%} {name}: {_compare(base, other)}{said}"
    if slower < 0 and not _given(p):
        unwritten = r.unwritten(variant, p.workload, p.machine)
        if unwritten:
            why += f"; not compared, as tilecast does not write it: {unwritten}"
        elif not said:
            why += "; not among those compared by machine code"
    return Considered(change, text, name, tflops, slower, why)


def _compare(p: Explained, other: Explained) -> str:
    """Which step of the waterfall costs (or saves) most of the difference; milliseconds."""
    if other.variant.family != p.variant.family and not _same_steps(p, other):
        return f"bound by {binding_name(other)}"
    mine = {s.cause: s.share * p.time_ms for s in p.waterfall}
    theirs = {s.cause: s.share * other.time_ms for s in other.waterfall}
    gap = other.time_ms - p.time_ms
    cause = max(theirs, key=lambda c: (theirs[c] - mine.get(c, 0.0)) * (1 if gap > 0 else -1))
    return f"{theirs[cause] - mine.get(cause, 0.0):+.3g} ms in “{cause}”"


def _same_steps(p: Explained, other: Explained) -> bool:
    return {s.cause for s in p.waterfall} == {s.cause for s in other.waterfall}


def binding_name(p: Explained) -> str:
    """What the forecast sits on, for a sentence."""
    bound = p.main.binding.as_dict()
    if bound["kind"] == "recurrence":
        return f"the recurrence {str(bound['name']).replace('->', '→')}"
    return f"the {bound['name']} unit" if bound["kind"] == "unit" else str(bound["name"])


def workload_options(work: Workload) -> list[str]:
    """The command line options that say ``work`` again."""
    out = [
        "--batch", str(work.batch), "--heads", str(work.heads_q), "--heads-kv", str(work.heads_kv), "--seqlen", str(work.seqlen_q),
        "--seqlen-k", str(work.seqlen_k), "--head-dim", str(work.head_dim_qk), "--head-dim-v", str(work.head_dim_v),
    ]  # fmt: skip
    if work.window is not None:
        out += ["--window", f"{work.window[0]},{work.window[1]}"]
    else:
        out.append("--causal" if work.mask == "causal" else "--no-causal")
    return [*out, "--dtype", work.dtype]
