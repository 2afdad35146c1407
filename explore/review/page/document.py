"""The review as sections of text, tables and charts: the one order that the page and its Markdown twin both follow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tilecast.base.words import significant
from tilecast.explore.review.content.content import (
    Assumption,
    Change,
    Considered,
    Region,
    ReviewContent,
    Timeline,
)
from tilecast.explore.review.content.judgement import percent
from tilecast.explore.review.page.charts import Chart, charts, milliseconds, signed

#: Variants and points a table lists; the rest is counted.
_MOST_VARIANTS, _MOST_POINTS = 28, 8
HOW_TO_READ = (
    "Move the pointer over a bar (or tap it) for the operation, its units, its cycles and what it waited for; drag, or use the "
    "buttons, to zoom. The loop is shown from the start of a tile to one period beyond the steady state."
)

#: Terms that the page prints and a reader from another field may not know, with the passes whose pages have them;
#: docs/glossary.md has all of them.
WORDS = (
    ("Iteration", "One pass of the kernel's loop: a block of keys against all query rows of a CTA.", "fwd"),
    ("Iteration", "One pass of a kernel's loop: a CTA that owns keys takes a block of queries, one that owns queries a block of keys.", "bwd"),
    ("Recurrence", "The loop of dependences that each iteration must close before the next can begin; it binds where no unit is full.", "fwd bwd"),
    ("Lost to sharing, hand-over", "Cycles that a step takes longer because others use the same unit; cycles between the end of one step and the start of the next.", "fwd bwd"),
    ("Q·Kᵀ, row max, exp, P·V, row sum, correction", "Scores; the largest score of each row; exponentials; the product with V; sums of exponentials; rescaling of the output when a maximum has moved. A number names the query tile, a and b the parts of one step.", "fwd"),
    ("S, P, dP, dS, dV, dK, dQ", "Scores S = Q·Kᵀ and P = exp(S − LSE), computed again; dP = dO·Vᵀ; dS = P·(dP − D); the gradients dV = Pᵀ·dO, dK = dSᵀ·Q, dQ = dS·K. A number names the warpgroup, a and b the halves of one step.", "bwd"),
    ("LSE, D (row terms), sums", "Two numbers of every query row, the logarithm of its sum of exponentials and D = Σ dO·O, that a small kernel makes first; float32 sums of dQ that programs add to in L2, and that a small kernel rounds at the end.", "bwd"),
    ("mufu, fma, alu, cvt, issue, tma, smem, tmem", "Units of an SM: exponentials; 32-bit multiply-add; integer and maximum; conversion to 16 or 8 bit; warp schedulers; copies between memory and shared memory; shared memory; tensor memory.", "fwd bwd"),
    ("fa2, fa3, fa4, unfused", "Kernel families: FlashAttention-2 in portable Triton, -3 for Hopper, -4 for Blackwell; matrix product, softmax and matrix product as three kernels.", "fwd"),
    ("fa2_bwd, fa3_bwd, fa3_bwd_apart, fa4_bwd", "Kernel families: portable Triton, seven products; Hopper, five products and dQ summed in L2; Hopper above head_dim 128, a kernel of the keys and one of the queries; Blackwell as FlashAttention-4 has it.", "bwd"),
    ("split-q, split-k", "Two softmax groups work on different query rows, or on different keys of the same rows.", "fwd"),
    ("Sustained, short", "The clock that the power limit allows in long runs; the clock of runs of milliseconds.", "fwd bwd"),
    ("spec, measured, inferred, assumed", "Where a fact is from: a data sheet; a microbenchmark; other facts; a judgement.", "fwd bwd"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Table:
    """Cells as text; ``numeric`` columns are set right."""

    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Section:
    """One heading: paragraphs, then charts, then tables, then points."""

    ident: str
    title: str
    paragraphs: tuple[str, ...] = ()
    charts: tuple[Chart, ...] = ()
    tables: tuple[Table, ...] = ()
    bullets: tuple[str, ...] = ()
    code: str = ""
    #: How to handle the charts that zoom, shown above the first of them: for the page only.
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Document:
    """The whole review; ``figures`` are the numbers a reader takes away: (name, value, note)."""

    title: str
    question: str
    verdict: tuple[str, ...]
    figures: tuple[tuple[str, str, str], ...]
    sections: tuple[Section, ...]


def document(c: ReviewContent) -> Document:
    """Everything in reading order."""
    drawn = charts(c)

    def some(*names: str) -> tuple[Chart, ...]:
        return tuple(drawn[name] for name in names if name in drawn)

    sections = [
        Section("forecast", "Forecast", (_forecast_text(c),), some("forecast"), (_regimes(c), *_launches(c)), (), c.variant),
        Section("risks", "Risks", () if c.risks else ("None was found by the rules of this report.",), (), (), tuple(f"**{r.title}.** {r.sentence}" for r in c.risks)),
        Section("waterfall", "Where the time goes", (f"Every step is computed; together they are the {c.whole}.",), some("waterfall"), (_waterfall(c),)),
        Section("roofline", "Roofline of every unit", (_roofline_text(c),), some("roofline"), (_ceilings(c),)),
        Section("schedule", "The schedule", _schedule_text(c), some("timeline", *(f"timeline-{i}" for i, _ in enumerate(c.other_timelines, 2))), _schedule_tables(c), hint="" if c.change else HOW_TO_READ),
        Section("sensitivity", "What a change of the machine would bring", _tornado_text(c), some("tornado"), (_sensitivities(c), _break_evens(c))),
        Section("map", "Map of asymmetric machines", (_map_text(c),), some("map"), (_machines(c),)),
        Section("variants", "Variants considered", (_variants_text(c),), (), (_variants(c),)),
        Section("accuracy", "Accuracy near this question", _accuracy_text(c.regions), some("accuracy"), tuple(_points(r) for r in c.regions if r.count)),
        Section("assumptions", "Assumptions", ("Facts with a range come first, the widest effect on top.",), (), (_assumptions(c.assumptions),), c.conditions),
        Section("words", "Words used here", (), bullets=tuple(f"**{word}.** {meaning}" for word, meaning, passes in WORDS if c.asked_pass in passes.split())),
        Section("reproduce", "Reproduce", ("This command makes the same files again, byte for byte, with the same version and machine file.",), (), (_provenance(c),), (), c.provenance.command),
    ]  # fmt: skip
    if c.change is not None:
        sections.insert(0, _change_section(c.change, c.whole, some("change", "before", "after")))
    return Document(c.title, c.question, c.verdict, _figures(c), tuple(sections))


def table(caption: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A column is numeric when every filled cell of it begins like a number."""
    body = tuple(tuple(row) for row in rows)
    numeric = tuple(bool(body) and all(_numeric(row[i]) for row in body) for i in range(len(header)))
    return Table(caption, tuple(header), body, numeric)


def _numeric(cell: str) -> bool:
    """A number with its unit, but no sentence that begins with one."""
    begins = cell[:1].isdigit() or (cell[:1] in "+-−" and cell[1:2].isdigit())
    return cell in ("", "–") or (begins and "(" not in cell)


def _figures(c: ReviewContent) -> tuple[tuple[str, str, str], ...]:
    first = c.regimes[0]
    out = [
        ("Time", f"{first.time_ms:.4g} ms", f"{first.name} clock"),
        (
            "Throughput",
            f"{significant(first.tflops)} TFLOP/s",
            f"interval {significant(first.low)} to {significant(first.high)}",
        ),
        ("Of peak", percent(c.peak_share), "tensor cores at top clock"),
        ("SM clock", f"{first.clock_mhz:.0f} MHz", first.clock_reason),
    ]
    if c.change is not None:
        out.append(
            ("After the change", f"{significant(c.change.after.tflops)} TFLOP/s", f"{c.change.speed_up - 1:+.1%}")
        )
    return tuple(out)


def _forecast_text(c: ReviewContent) -> str:
    if c.other_timelines:
        return f"Kernels: {c.kernel}; the one that takes longest is bound by {c.binding}; their knobs:"
    return f"Kernel: {c.kernel}, bound by {c.binding}; its knobs:"


def _regimes(c: ReviewContent) -> Table:
    rows = [
        (
            r.name,
            f"{r.time_ms:.4g}",
            significant(r.tflops),
            f"{significant(r.low)} to {significant(r.high)}",
            f"{r.clock_mhz:.0f}",
            r.clock_reason,
        )
        for r in c.regimes
    ]
    return table("Forecast at each clock regime", ("clock", "ms", "TFLOP/s", "interval", "MHz", "why this clock"), rows)


def _launches(c: ReviewContent) -> tuple[Table, ...]:
    if not c.launches:
        return ()
    rows = [(x.name, f"{x.time_ms:.4g}", f"{x.share:.1%}", f"{x.hbm_bytes / 1e6:.0f}") for x in c.launches]
    header = ("launch", "ms", "share", "MB to and from memory")
    return (table("What is launched, each with what it takes to start it", header, rows),)


def _waterfall(c: ReviewContent) -> Table:
    rows = [(s.cause, f"{s.cycles:.0f}", f"{s.share:.1%}") for s in c.waterfall]
    total = (
        c.whole,
        f"{sum(s.cycles for s in c.waterfall):.0f}",
        f"{sum(s.share for s in c.waterfall):.1%}",
    )
    return table("Cycles per SM at the forecast's clock", ("cause", "cycles", "share"), [*rows, total])


def _roofline_text(c: ReviewContent) -> str:
    low = c.ceilings[0]
    return (
        f"{low.unit} has the lowest ceiling, {significant(low.tflops)} TFLOP/s; the forecast of {significant(c.regimes[0].tflops)} is "
        f"{c.regimes[0].tflops / low.tflops:.0%} of it. What is missing are waits, start and end of tiles, and the last wave."
    )


def _ceilings(c: ReviewContent) -> Table:
    rows = [
        (r.unit, "–" if r.cycles is None else f"{r.cycles:.0f}", f"{r.busy:.0%}", significant(r.tflops), r.about)
        for r in c.ceilings
    ]
    of = ", of the kernel that takes longest" if c.other_timelines else ""
    return table(
        f"Demand and ceiling of every unit{' (cycles per iteration' + of + ')' if of else ''}",
        ("unit", "cycles per iteration", "busy", "ceiling TFLOP/s", "what it is"),
        rows,
    )


def _schedule_text(c: ReviewContent) -> tuple[str, ...]:
    text = " ".join(_period(t, len(c.other_timelines) > 0) for t in (c.timeline, *c.other_timelines))
    if c.change is not None:
        return (f"{text} Its timeline is the one called “before” above.",)
    return (text,)


def _period(t: Timeline, named: bool) -> str:
    settled = "verified to repeat" if t.periodic else "an average: the loop did not settle"
    whose = f" of {t.title.removesuffix(', as simulated')}" if named else ""
    return f"One iteration{whose} takes {t.ii_cycles:.0f} cycles, {settled}."


def _schedule_tables(c: ReviewContent) -> tuple[Table, ...]:
    if not c.other_timelines:
        return _waits_tables(c.timeline, "")
    every = (c.timeline, *c.other_timelines)
    return tuple(made for t in every for made in _waits_tables(t, f", {t.title.removesuffix(', as simulated')}"))


def _waits_tables(t: Timeline, of: str) -> tuple[Table, ...]:
    critical = [
        (op, why, f"{alone:.0f}", f"{shared:.0f}", f"{wait:.0f}") for op, why, alone, shared, wait in t.critical
    ]
    waits = [(role, cause, f"{cycles:.0f}") for role, cause, cycles in t.waits]
    out = []
    if critical:
        out.append(
            table(
                f"The recurrence that sets the period (cycles per iteration){of}",
                ("operation", "after", "alone", "lost to sharing", "hand-over"),
                critical,
            )
        )
    if waits:
        out.append(table(f"What each role waits for{of}", ("role", "waits for", "cycles per iteration"), waits))
    return tuple(out)


def _tornado_text(c: ReviewContent) -> tuple[str, ...]:
    t = c.tornado
    text = (
        f"Each fact is moved {t.step:.0%} down and up. −1 means that 1 % more of it takes 1 % off the time. “Kept” leaves the kernel as it is; "
        "“chosen again” searches the knobs at both ends. Break-even: solved for the busiest unit, simulated with all hand-overs, and the value beyond "
        "which more brings less than 1 %."
    )
    if any(r.one_sided for r in t.rows):
        text += " A fact with * stands at an end of what it can be: it was moved one way only."
    if t.without_effect:
        text += f" Without effect here: {', '.join(t.without_effect)}."
    return (text,)


def _sensitivities(c: ReviewContent) -> Table:
    rows = [
        (
            r.fact + ("*" if r.one_sided else ""),
            f"{r.value:g} {r.unit}",
            r.kind,
            signed(r.fixed, 3),
            signed(r.reoptimised, 3),
            f"{r.low_ms:.4g}",
            f"{r.high_ms:.4g}",
        )
        for r in c.tornado.rows
    ]
    step = f"{c.tornado.step:.0%}"
    return table(
        "Percent of time per percent of the fact",
        ("fact", "value", "kind", "kernel kept", "chosen again", f"ms at −{step}", f"ms at +{step}"),
        rows,
    )


def _break_evens(c: ReviewContent) -> Table:
    rows = []
    for b in c.tornado.break_evens:
        equal = "–" if b.solved is None else f"{b.solved.value:.4g} ({b.solved.unit} = {b.solved.other})"
        until = (
            "–" if b.simulated is None else f"{b.simulated.value:.4g} ({b.simulated.below}, then {b.simulated.above})"
        )
        useful = "beyond the range" if b.useful_until is None else f"{b.useful_until:.4g}"
        rows.append((b.fact, f"{b.value:g} {b.unit}", b.bound_now, equal, until, useful, f"{b.at_most_percent:.1f} %"))
    header = (
        "fact",
        "value",
        "bound now",
        "equally busy at (solved)",
        "stops binding at (simulated)",
        "useful until",
        "could save at most",
    )
    return table("Break-even points, the kernel kept", header, rows)


def _variants_text(c: ReviewContent) -> str:
    v = c.variants
    refused = sum(row.verdict == "refused" for row in v.rows)
    more = (
        f" The table lists the first {_MOST_VARIANTS} of each kind." if len(v.rows) - refused > _MOST_VARIANTS else ""
    )
    return f"The family's knobs span {v.space} combinations, {v.legal} of them legal for this shape on this machine. Forecast here: {v.compared}.{more}"


def _variants(c: ReviewContent) -> Table:
    ran = [row for row in c.variants.rows if row.verdict != "refused"][:_MOST_VARIANTS]
    refused = [row for row in c.variants.rows if row.verdict == "refused"][:_MOST_VARIANTS]
    return table(
        "Variants and why not",
        ("variant", "verdict", "TFLOP/s", "time", "why"),
        [_variant(row) for row in (*ran, *refused)],
    )


def _variant(row: Considered) -> tuple[str, ...]:
    if row.verdict == "chosen":
        return "this report's kernel", "chosen", significant(row.tflops or 0.0), "+0.0%", row.reason
    if row.tflops is None or row.slower is None:
        return row.change, "not legal", "–", "–", row.reason
    return row.change, row.verdict, significant(row.tflops), f"{row.slower:+.1%}", row.reason


def _accuracy_text(regions: tuple[Region, ...]) -> tuple[str, ...]:
    out = []
    for r in regions:
        if r.count:
            out.append(
                f"{r.count} {r.kind} points {r.nearness}: error {r.mean:.1%} in the mean, {r.median:.1%} median, {r.p90:.1%} for nine of ten, "
                f"{r.worst:.0%} at worst, bias {r.bias:+.1%}. {r.note}"
            )
        else:
            out.append(r.note)
    return tuple(out)


def _points(region: Region) -> Table:
    rows = [
        (q.machine, q.kernel, q.shape, significant(q.measured), significant(q.predicted), f"{q.error:+.1%}", q.source)
        for q in region.points[:_MOST_POINTS]
    ]
    caption = f"The nearest {len(rows)} of {region.count} {region.kind} points"
    return table(caption, ("GPU", "kernel", "shape", "measured TFLOP/s", "predicted", "error", "source"), rows)


def _assumptions(rows: Sequence[Assumption]) -> Table:
    body = []
    for a in rows:
        ends = "–" if a.low is None else f"{a.low:g} to {a.high:g}"
        answer = (
            "–"
            if a.tflops_low is None or a.tflops_high is None
            else f"{significant(a.tflops_low)} to {significant(a.tflops_high)}"
        )
        effect = "–" if a.low is None else f"{a.effect:.1%}"
        body.append((a.fact, f"{a.value:g} {a.unit}", a.kind, ends, answer, effect, f"{a.meaning}; {a.source}"))
    return table(
        "Machine facts the forecast rests on",
        ("fact", "value", "kind", "range", "TFLOP/s at its ends", "effect", "meaning and source"),
        body,
    )


def _map_text(c: ReviewContent) -> str:
    m = c.map
    chosen = (
        "the share of emulated exponentials is chosen again"
        if m.asked_pass == "fwd"
        else "the kernel is the fastest of those that are best at the machine or in a corner"
    )
    return (
        f"{m.x_fact} and {m.y_fact} are moved by up to a factor of {m.x[-1] / m.x[len(m.x) // 2]:.3g}; every other fact stays this machine's, and the clock is "
        f"held at {m.clock_mhz:.0f} MHz, where the kernel reaches {significant(m.base_tflops)} TFLOP/s. In every cell {chosen}. "
        "A GPU's place says where it lies by these two rates; it is no forecast for that GPU."
    )


def _machines(c: ReviewContent) -> Table:
    rows = [(q.label, f"{q.x:g}", f"{q.y:g}", q.kind, q.source) for q in c.map.points]
    header = ("GPU", f"{c.map.x_fact} ({c.map.x_unit})", f"{c.map.y_fact} ({c.map.y_unit})", "kind", "source")
    return table("GPUs on the map", header, rows)


def _provenance(c: ReviewContent) -> Table:
    p = c.provenance
    rows = [
        ("tilecast", p.version),
        ("model and machine files", f"sha256 {p.source}"),
        ("facts of this machine", f"sha256 {p.machine_digest}"),
    ]
    if p.date:
        rows.append(("date", p.date))
    return table("What made these numbers", ("part", "version"), rows)


def _change_section(change: Change, whole: str, drawn: tuple[Chart, ...]) -> Section:
    sides = [
        (
            s.title,
            f"{s.time_ms:.4g}",
            significant(s.tflops),
            f"{s.clock_mhz:.0f}",
            f"{s.timeline.ii_cycles:.0f}",
            s.binding,
        )
        for s in (change.before, change.after)
    ]
    parts = [(cause, f"{a:.4f}", f"{b:.4f}", signed(b - a, 4)) for cause, a, b in milliseconds(change, whole)]
    tables = [
        table(
            "Facts changed",
            ("fact", "before", "after"),
            [(n, f"{a:g} {u}", f"{b:g} {u}") for n, a, b, u in change.changes],
        ),
        table("Milliseconds by cause", ("cause", "before", "after", "difference"), parts),
        table("Forecast", ("side", "ms", "TFLOP/s", "MHz", "cycles per iteration", "bound by"), sides),
    ]
    if change.knobs:
        tables.append(table("What the kernel changes", ("knob", "before", "after"), change.knobs))
    kept = f"it cannot run: {change.kept_refused}" if change.kept_refused else f"{change.speed_up_kept - 1:+.1%}"
    text = f"Throughput changes by {change.speed_up - 1:+.1%} with the kernel chosen again; with the kernel of before, {kept}."
    if abs(change.speed_up - 1) < 5e-4:
        text = f"The time stays what it was, {change.after.time_ms:.4g} ms."
    if not change.knobs:
        text += " The best kernel stays the same."
    return Section("change", "What the change brings", (text,), drawn, tuple(tables), hint=HOW_TO_READ)
