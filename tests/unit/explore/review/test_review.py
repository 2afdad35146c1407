"""The design review: what it says is what the model says, and it reads the same twice."""

from __future__ import annotations

import html.parser
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from support.review_case import WORK, h200_review

from tilecast.cli import main
from tilecast.explore.review.build import LEAST, report
from tilecast.explore.review.content.assumptions import machine_digest
from tilecast.explore.review.content.considered import considered
from tilecast.explore.review.content.nearby import distance
from tilecast.explore.review.page.charts import Bars, charts, tornado_chart, waterfall_chart
from tilecast.explore.review.page.document import document
from tilecast.explore.review.page.drawings import svg
from tilecast.explore.review.page.plots import lines_of
from tilecast.explore.review.page.render import html_page
from tilecast.explore.review.passes.forward import REVIEWED, regions
from tilecast.explore.review.review import Review
from tilecast.model.compiled.loops.shelf import kept_loop
from tilecast.model.families import legality, parse_variant
from tilecast.model.forecast.level import at_hand
from tilecast.model.forecast.predict import predict
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine
from tilecast.model.sm.simulate import drawn
from tilecast.model.whatif.break_even import break_evens
from tilecast.model.whatif.sensitivity import sensitivities


@pytest.fixture(scope="module")
def review() -> Review:
    return h200_review()


@pytest.fixture(scope="module")
def small() -> Review:
    """An A100 at a fixed clock, a sequence shorter than what was checked."""
    return report(Workload(seqlen_q=256, seqlen_k=256), "a100", clock=1200.0, map_grid=3)


@pytest.fixture(scope="module")
def page(review: Review) -> str:
    return review.page()


def chosen(review: Review):
    return parse_variant(review.variant)


def test_the_forecast_is_that_of_predict_with_the_variant_named(review: Review) -> None:
    for regime in review.regimes:
        again = predict(WORK, "h200-sxm", chosen(review), clock=regime.name, compiler=None)
        assert (regime.time_ms, regime.tflops, regime.low, regime.high) == (
            again.time_ms,
            again.tflops,
            *again.tflops_interval,
        )
    assert {r.name for r in review.regimes} == {"sustained", "short"}
    assert f"{review.regimes[0].tflops:.0f} TFLOP/s" in review.verdict[0]


def test_the_waterfall_adds_up_to_the_time(review: Review) -> None:
    assert sum(step.share for step in review.waterfall) == pytest.approx(1.0, abs=1e-12)
    marks = waterfall_chart(review.waterfall).marks
    for before, after in pairwise(marks[:-1]):
        assert after.start == pytest.approx(before.start + before.length, abs=6e-4 * len(review.waterfall))
    assert marks[-1].length == pytest.approx(1.0)


def test_the_tornado_is_the_models_sensitivities(review: Review) -> None:
    rows = sensitivities(WORK, "h200-sxm", chosen(review), step=review.tornado.step, compiler=None)
    matter = [row for row in rows if max(abs(row.fixed), abs(row.reoptimised)) >= LEAST]
    assert list(review.tornado.rows) == matter
    assert set(review.tornado.without_effect) == {row.fact for row in rows} - {row.fact for row in matter}
    drawn = [m for m in tornado_chart(review.tornado).marks if m.legend == "kernel kept"]
    assert [m.length for m in drawn] == [row.fixed for row in matter[: len(drawn)]]


def test_no_unit_is_faster_than_its_ceiling_and_busy_shares_agree(review: Review) -> None:
    first = review.regimes[0]
    for row in review.ceilings:
        assert first.tflops <= row.tflops * (1 + 1e-9), row.unit
        # A ceiling is the forecast over the busy share, by definition of both.
        assert row.tflops * row.busy == pytest.approx(first.tflops, rel=1e-9)
    tensor = next(row for row in review.ceilings if row.unit == "tensor")
    # Causal tiles execute more than the half that counts, never less.
    machine = load_machine("h200-sxm")
    peak = machine["tensor.bf16_flop_per_clk"] * machine["chip.sm_count"] * first.clock_mhz / 1e6
    assert tensor.tflops <= peak * (1 + 1e-9)


@pytest.mark.parametrize("family", ["fa4", "fa2"])
def test_busy_cycles_per_sm_are_what_the_chip_ran(family: str) -> None:
    from tilecast.explore.review.content.roofline import busy_cycles_per_sm

    p = predict(WORK, "b200", family=family, interval=False)
    busy = busy_cycles_per_sm(REVIEWED.work(p), p.machine)
    # Steady-state loop cycles times the unit's share of an iteration: the chip's own account.
    for unit, share in p.units.items():
        assert busy[unit] == pytest.approx(share * p.chip.loop_cycles, rel=0.02), unit


def test_variants_carry_their_reasons(review: Review) -> None:
    machine = load_machine("h200-sxm")
    base = chosen(review)
    rows = review.variants.rows
    assert [row.verdict for row in rows].count("chosen") == 1
    refused = [row for row in rows if row.verdict == "refused"]
    assert refused
    for row in refused:
        assert row.reason == legality(parse_variant(row.variant), WORK, machine).sentence()
    for row in rows:
        if row.verdict in ("slower", "tie", "faster"):
            other = predict(WORK, machine, parse_variant(row.variant), interval=False, compiler=None)
            assert other.time_ms / review.regimes[0].time_ms - 1 == pytest.approx(row.slower, abs=1e-12)
            assert (row.verdict == "tie") == (abs(row.slower) <= 0.005)
    assert 0 < review.variants.legal < review.variants.space
    assert any(row.change == "another family: fa2" for row in rows)
    assert base.family == "fa3"


@pytest.mark.parametrize(
    ("machine", "work", "level", "reason"),
    [
        ("b300", Workload(batch=2, mask="window", window=(1023, 0)), None, "tilecast does not write it"),
        ("h200-sxm", Workload(4, 16, 16, 8192, 8192, 64, 64, mask="causal"), at_hand, "compared by machine code"),
    ],
)
def test_a_faster_variant_says_why_it_was_not_chosen(machine: str, work: Workload, level, reason: str) -> None:
    p = predict(work, machine, compiler=level)
    faster = [row for row in considered(REVIEWED, p, "sustained", level and kept_loop).rows if row.verdict == "faster"]
    assert any(reason in row.reason for row in faster)
    assert all("not compared" in row.reason or "not among those compared" in row.reason for row in faster)
    given = replace(p, variant_origin="as given")
    assert not any(
        "compared" in row.reason for row in considered(REVIEWED, given, "sustained", level and kept_loop).rows
    )


def test_assumptions_move_the_answer_as_the_machine_does(review: Review) -> None:
    machine = load_machine("h200-sxm")
    ranged = [a for a in review.assumptions if a.low is not None]
    assert ranged == sorted(ranged, key=lambda a: -a.effect)
    widest = ranged[0]
    moved = predict(WORK, machine.with_facts({widest.fact: widest.high}), chosen(review), interval=False, compiler=None)
    assert widest.tflops_high == pytest.approx(moved.tflops, rel=1e-12)
    assert all(a.kind in ("spec", "measured", "inferred", "assumed") and a.source for a in review.assumptions)


def test_a_change_says_what_the_what_if_says(review: Review) -> None:
    assert review.change is not None
    assert review.change.changes == (("mufu.ex2_per_clk", 16.0, 32.0, "op/clk/SM"),)
    assert review.change.before.time_ms == review.regimes[0].time_ms
    assert review.change.speed_up == pytest.approx(review.change.before.time_ms / review.change.after.time_ms)
    assert review.change.speed_up >= review.change.speed_up_kept * (1 - 1e-3)
    assert "mufu.ex2_per_clk goes from 16 to 32" in review.question


def test_a_change_that_machine_code_does_not_follow_is_reviewed_before_compilation() -> None:
    """The forecast of the page and the one before the change are one number."""
    work = Workload(heads_q=8, seqlen_q=1024)
    page = report(work, "h200-sxm", changes={"reg.file_bytes": 131072.0}, map_grid=3)
    before = predict(work, "h200-sxm", compiler=None)
    assert page.change is not None
    assert page.change.before.time_ms == page.regimes[0].time_ms == before.time_ms


def test_the_timeline_shows_the_simulation(review: Review) -> None:
    t = review.timeline
    trace = drawn(predict(WORK, "h200-sxm", chosen(review), interval=False, compiler=None).trace)
    shown = {(b.name, round(b.start, 3), round(b.cycles, 3)) for b in t.bars if b.kind not in ("unit", "wait")}
    assert shown <= {(e.op, round(e.start, 3), round(e.end - e.start, 3)) for e in trace.events}
    view = [b for b in t.bars if t.view[0] <= b.start < t.view[1] and b.kind not in ("unit", "wait")]
    assert {b.name for b in view} == {op.name for op in trace.pipeline.ops}
    assert {b.lane for b in t.bars} == {*t.lanes, *t.unit_lanes}
    # No two synchronous operations of a role at once, and none inside a wait.
    for role in trace.pipeline.roles:
        mine = sorted((b for b in t.bars if b.lane == role.name), key=lambda b: b.start)
        for one, two in pairwise(mine):
            assert one.start + one.cycles <= two.start + 1e-3
    for bar in view:
        text = "\n".join(bar.lines)
        assert (
            bar.name in text
            and "cycles" in text
            and "busy cycles by unit" in text
            and ("waited" in text or "released by" in text)
        )
    # A unit's bars hold exactly its demand over whole periods.
    demand = trace.pipeline.demand()
    for unit in ("tensor", "mufu"):
        inside = sum(
            b.share * max(0.0, min(b.start + b.cycles, t.view[0] + t.ii_cycles) - max(b.start, t.view[0]))
            for b in t.bars
            if b.lane == f"unit {unit}"
        )
        assert inside == pytest.approx(demand[unit], rel=0.03)


def test_accuracy_names_how_near_and_counts_every_point(review: Review) -> None:
    published, own = review.regions
    for region in (published, own):
        assert region.count == len(region.points) > 0
        assert region.mean == pytest.approx(sum(abs(q.error) for q in region.points) / region.count)
        assert region.nearness.startswith("on h200-sxm, 16 bit, head_dim 128")
    assert all(q.machine == "h200-sxm" for q in (*published.points, *own.points))


def test_accuracy_is_honest_where_nobody_measured() -> None:
    p = predict(Workload(), "gb10", interval=False)
    for region in regions(p):
        assert region.count == 0 and region.points == ()
        assert "gb10" in region.note


def test_distance_orders_shapes() -> None:
    assert distance(WORK, WORK) == 0.0
    twice = replace(WORK, seqlen_q=8192, seqlen_k=8192)
    assert distance(WORK, twice) == pytest.approx(2.0)
    assert distance(WORK, twice) > distance(WORK, replace(WORK, mask="none")) > distance(WORK, replace(WORK, batch=8))


def test_risks_are_found_by_their_rules(review: Review, small: Review) -> None:
    titles = [risk.title for risk in review.risks]
    assert "Clock regimes differ" in titles
    assert [r.weight for r in review.risks] == sorted((r.weight for r in review.risks), reverse=True)
    found = {risk.title: risk.sentence for risk in small.risks}
    assert "seqlen 256" in found["Outside what was checked"]
    assert "No measured point" in found and "Clock regimes differ" not in found


class _Page(html.parser.HTMLParser):
    """What the page would load, its identifiers and headings."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.ids: list[str] = []
        self.headings: list[int] = []
        self.images = 0
        self.in_script = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag in ("script", "img", "link", "iframe", "source", "object", "embed") or "srcset" in values:
            self.loads += [v for k, v in attrs if k in ("src", "href", "data", "srcset") and v]
        if tag == "a":
            assert str(values["href"]).startswith("#")
        if "id" in values:
            self.ids.append(str(values["id"]))
        if re.fullmatch(r"h[1-6]", tag):
            self.headings.append(int(tag[1]))
        if tag == "img":
            self.images += 1
            assert values.get("alt")


def test_the_page_is_one_file_under_6_mb_that_loads_nothing(page: str) -> None:
    assert len(page.encode()) < 6_000_000
    parsed = _Page()
    parsed.feed(page)
    assert all(load.startswith("data:image/svg+xml;base64,") for load in parsed.loads)
    assert len(parsed.ids) == len(set(parsed.ids))
    assert parsed.headings[0] == 1 and parsed.headings.count(1) == 1
    assert all(b - a <= 1 for a, b in pairwise(parsed.headings))
    style = page[page.index("<style>") : page.index("</style>")]
    assert "url(" not in style and "@import" not in style
    assert "default-src 'none'" in page


def test_every_chart_has_its_drawing_and_every_section_numbers(review: Review, page: str) -> None:
    for ident, chart in charts(review).items():
        assert f'id="plot-{ident}"' in page and f'id="spec-plot-{ident}"' in page
        ElementTree.fromstring(svg(chart))
    for section in document(review).sections:
        assert section.tables or section.bullets, section.title
        for table in section.tables:
            assert all(len(row) == len(table.header) for row in table.rows)


def test_drawings_keep_the_digits_of_labels(review: Review) -> None:
    chart = charts(review)["change"]
    assert isinstance(chart, Bars)
    read = {
        "".join(e.itertext()).strip()
        for e in ElementTree.fromstring(svg(chart)).iter("{http://www.w3.org/2000/svg}text")
    }
    assert {mark.text for mark in chart.marks if mark.text} <= read


def test_text_from_outside_is_escaped(review: Review) -> None:
    text = html_page(replace(review, provenance=replace(review.provenance, date="</script><b>now")))
    assert "<b>now" not in text and "&lt;/script&gt;&lt;b&gt;now" in text


def test_the_same_question_gives_the_same_bytes(review: Review, page: str) -> None:
    svg.cache_clear()
    assert html_page(review) == page


def test_markdown_says_what_the_page_says(review: Review) -> None:
    files = review.markdown("r")
    text = files["r.md"]
    pictures = re.findall(r"!\[[^]]*]\(([^)]+)\)", text)
    assert sorted(pictures) == sorted(name for name in files if name.endswith(".svg"))
    assert sum(len(t.encode()) for t in files.values()) < 400_000
    for sentence in review.verdict:
        assert sentence in text
    for section in document(review).sections:
        assert f"\n## {section.title}\n" in text
        for table in section.tables:
            assert "| " + " | ".join(table.header) + " |" in text
    # Every table row has as many cells as its header.
    for block in re.findall(r"(?:^\|.*\n)+", text, flags=re.M):
        assert re.fullmatch(r"\|(---:?\|)+", block.splitlines()[1])
        counts = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
        assert len(counts) == 1, block[:200]


def test_markdown_of_an_a100(golden, small: Review) -> None:
    # What made it changes with every line of the model; what it says does not.
    fixed = replace(small, provenance=replace(small.provenance, version="0", source="0" * 12))
    golden("report-a100.md", fixed.markdown("report-a100")["report-a100.md"])


def test_digests_tell_machines_apart() -> None:
    machine = load_machine("b200")
    assert machine_digest(machine) == machine_digest(load_machine("b200"))
    assert machine_digest(machine) != machine_digest(machine.with_facts({"mufu.ex2_per_clk": 17}))


def test_break_even_points_stay_inside_the_schema() -> None:
    # 64 times this machine's shared memory rate is beyond what a machine file may say.
    assert break_evens(Workload(dtype="fp8"), "rtx-5090")


@pytest.mark.parametrize("width", [8, 20, 34])
def test_labels_break_where_names_do(width: int) -> None:
    for label in ("power.tensor_pj_per_flop_bf16", "score elements outside the mask or the tensor's edge", "L2"):
        lines = lines_of(label, width)
        assert "".join(lines).replace(" ", "") == label.replace(" ", "")
        pieces = max(len(piece) for piece in re.findall(r"[^ ._]*[ ._]?", label))
        assert max(len(line) for line in lines) <= max(width, pieces)


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    with pytest.raises(SystemExit) as stopped:
        main(["report", *arguments])
    return int(stopped.value.code or 0), capsys.readouterr().err.strip()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["-o", "{dir}/review.pdf"], "expected a name that ends in .html"),
        (["-o", "{dir}/no/review.html"], "folder {dir}/no does not exist"),
        (["-o", "{dir}/r.md", "--markdown", "{dir}"], "is Markdown already"),
        (["-o", "{dir}/r.html", "--markdown", "{dir}/absent"], "does not exist"),
        (["-o", "{dir}/r.html", "--whatif", "mufu.ex3=32"], "did you mean mufu"),
        (["-o", "{dir}/r.html", "--whatif", "mufu.ex2"], "expected fact=number"),
        (["-o", "{dir}/r.html", "--whatif", "mufu.ex2=-1"], "takes 1 to 1024"),
        (["-o", "{dir}/r.html", "--measured", "{dir}/absent.csv"], "cannot read the measurements"),
        (["-o", "{dir}/r.html", "--clock", "turbo"], "expected sustained, short"),
        (["-o", "{dir}/r.html", "--variant", "tile_n=17"], "multiples of 16"),
    ],
)
def test_wrong_input_is_one_sentence_and_leaves_nothing(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = run(["--machine", "a100", "--seqlen", "512", *(a.format(dir=tmp_path) for a in arguments)], capsys)
    assert code == 2
    assert says.format(dir=tmp_path) in text and text.count("\n") == 0
    assert list(tmp_path.iterdir()) == []


def test_the_command_in_the_report_makes_the_report_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import shlex

    machine = tmp_path / "mine.toml"
    machine.write_text('name = "mine"\ninherits = "a100"\n', encoding="utf-8")
    first = tmp_path / "one.md"
    asked = [
        "--machine",
        str(machine),
        "--seqlen",
        "512",
        "--heads",
        "8",
        "--heads-kv",
        "2",
        "--window",
        "128,0",
        "--clock",
        "1100",
        "--scale",
        "hbm.tbps_achieved=1.5",
    ]
    assert run([*asked, "-o", str(first)], capsys)[0] == 0
    text = first.read_text(encoding="utf-8")
    command = next(line for line in text.splitlines() if line.startswith("tilecast report"))
    again = shlex.split(command)[2:]
    second = tmp_path / "two" / "one.md"
    second.parent.mkdir()
    assert again[-2:] == ["-o", "review.html"]
    assert run([*again[:-1], str(second)], capsys)[0] == 0
    for name in sorted(p.name for p in tmp_path.glob("one*")):
        assert (second.parent / name).read_bytes() == (tmp_path / name).read_bytes(), name


def test_bars_know_their_rows(review: Review) -> None:
    for chart in charts(review).values():
        if isinstance(chart, Bars):
            assert {mark.row for mark in chart.marks} <= set(range(len(chart.rows)))
            assert all(mark.hover for mark in chart.marks)
