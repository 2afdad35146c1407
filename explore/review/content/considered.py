"""Variants beside the chosen one: every knob changed alone, the authors' kernel, other families."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

from tilecast.explore.review.content.content import Considered, Variants
from tilecast.model.chip.evaluate import PredictError
from tilecast.model.families import FAMILIES, knob_space, legality, one_knob_away, published_variant
from tilecast.model.forecast.level import Compiler, follows
from tilecast.model.forecast.predict import Prediction, predict
from tilecast.model.kernel.variant import Variant, variant_text
from tilecast.model.kernel.verdict import VariantError
from tilecast.model.kernel.workload import Workload

#: Times within this are a tie: no forecast or measurement tells them apart.
TIE = 0.005
_ORDER = {"chosen": 0, "faster": 1, "tie": 2, "slower": 3, "refused": 4}


def considered(p: Prediction, clock: str | float, level: Compiler | None = None) -> Variants:
    """Alternatives of ``p`` with the reason each was not taken; the family's space is counted, not forecast.

    ``level`` (`forecast.level.settled`) is that of ``p``: an alternative that cannot be forecast at it is not compared.
    """
    work, machine, chosen = p.workload, p.machine, p.variant
    space = knob_space(chosen.family, work, machine)
    legal = sum(legality(v, work, machine).legal for v in space)
    rows: dict[str, Considered] = {}
    for change, variant in _alternatives(p, space):
        rows.setdefault(variant_text(variant), _row(p, change, variant, clock, level))
    text = variant_text(chosen)
    rows[text] = Considered("", text, "chosen", p.tflops, 0.0, _why_chosen(p))
    listed = sorted(rows.values(), key=lambda row: (_ORDER[row.verdict], row.slower or 0.0, row.change))
    return Variants(text, tuple(listed), len(space), legal)


def difference(a: Variant, b: Variant) -> str:
    """What differs in ``b`` from ``a``, as knobs; the family alone when it is another."""
    if a.family != b.family:
        return f"family={b.family}"
    return ", ".join(f"{name}={_plain(getattr(b, name))}" for name in _knobs(b) if getattr(a, name) != getattr(b, name))


def _knobs(variant: Variant) -> tuple[str, ...]:
    return tuple(f.name for f in fields(variant) if f.name != "family")


def _plain(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def _why_chosen(p: Prediction) -> str:
    return f"shortest forecast: {p.variant_origin}" if p.variant_origin != "as given" else "given by the user"


def _alternatives(p: Prediction, space: tuple[Variant, ...]) -> Iterable[tuple[str, Variant]]:
    """(what is special about it, variant), without the chosen one."""
    work, machine, chosen = p.workload, p.machine, p.variant
    shipped = published_variant(chosen.family, work, machine)
    if shipped != chosen:
        yield f"as the authors ship it: {difference(chosen, shipped)}", shipped
    for other in one_knob_away(chosen, space):
        yield difference(chosen, other), other
    for family in FAMILIES:
        if family != chosen.family:
            try:
                other = published_variant(family, work, machine)
            except VariantError:
                continue
            yield f"another family: {family}", other


def _row(p: Prediction, change: str, variant: Variant, clock: str | float, level: Compiler | None) -> Considered:
    text = variant_text(variant)
    verdict = legality(variant, p.workload, p.machine)
    if not verdict.legal:
        return Considered(change, text, "refused", None, None, verdict.sentence())
    base, said = p, ""
    if not follows(level, p.workload, p.machine, variant):
        # Two levels do not compare: both as they are before compilation.
        level, said = None, " (both before compilation: its loop is not at hand)"
    try:
        if said:
            base = predict(p.workload, p.machine, p.variant, clock=clock, interval=False, compiler=None)
        other = predict(p.workload, p.machine, variant, clock=clock, interval=False, compiler=level)
    except (PredictError, ValueError) as error:
        return Considered(change, text, "refused", None, None, str(error))
    slower = other.time_ms / base.time_ms - 1.0
    tflops = p.tflops / (1.0 + slower) if said else other.tflops
    if abs(slower) <= TIE:
        return Considered(change, text, "tie", tflops, slower, f"same time to within {TIE:.1%}{said}")
    name = "slower" if slower > 0 else "faster"
    return Considered(change, text, name, tflops, slower, f"{abs(slower):.1%} {name}: {_compare(base, other)}{said}")


def _compare(p: Prediction, other: Prediction) -> str:
    """Which step of the waterfall costs (or saves) most of the difference; milliseconds."""
    if other.variant.family != p.variant.family and not _same_steps(p, other):
        return f"bound by {binding_name(other)}"
    mine = {s.cause: s.share * p.time_ms for s in p.waterfall}
    theirs = {s.cause: s.share * other.time_ms for s in other.waterfall}
    gap = other.time_ms - p.time_ms
    cause = max(theirs, key=lambda c: (theirs[c] - mine.get(c, 0.0)) * (1 if gap > 0 else -1))
    return f"{theirs[cause] - mine.get(cause, 0.0):+.3g} ms in “{cause}”"


def _same_steps(p: Prediction, other: Prediction) -> bool:
    return {s.cause for s in p.waterfall} == {s.cause for s in other.waterfall}


def binding_name(p: Prediction) -> str:
    """What the forecast sits on, for a sentence."""
    bound = p.binding.as_dict()
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
