"""The review of a backward pass says what `predict --pass bwd` says, of every kernel of the pass."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from support.whole import whole

from tilecast.cli import main
from tilecast.explore.review.build import report
from tilecast.explore.review.page.charts import charts
from tilecast.explore.review.page.document import document
from tilecast.explore.review.passes.backward import regions
from tilecast.explore.review.review import Review
from tilecast.model.backward import BACKWARD_FAMILIES, family_of, parse_backward
from tilecast.model.kernel.variants.fa3_backward_apart import Fa3BackwardApartVariant
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine
from tilecast.model.training.forecast import predict_backward
from tilecast.model.training.passes import BACKWARD
from tilecast.model.training.whatif import backward_sensitivities, backward_what_if

H200 = load_machine("h200")
WORK = Workload(4, 16, 8, 4096, head_dim_qk=256, mask="causal")


@pytest.fixture(scope="module")
def review() -> Review:
    """Two kernels with loops: one of the keys, one of the queries."""
    return report(WORK, H200, changes={"smem.bytes_per_clk": 256}, map_grid=3, asked_pass=BACKWARD)


@pytest.fixture(scope="module")
def chosen(review: Review) -> Fa3BackwardApartVariant:
    return parse_backward(review.variant, Fa3BackwardApartVariant())


def test_forecast_and_launches_are_those_of_predict(review: Review, chosen: Fa3BackwardApartVariant) -> None:
    for regime in review.regimes:
        again = predict_backward(WORK, H200, chosen, clock=regime.name)
        assert (regime.time_ms, regime.tflops, regime.low, regime.high) == (
            again.time_ms, again.tflops, *again.tflops_interval,
        )  # fmt: skip
    assert [x.name for x in review.launches] == ["row terms", "key gradients", "query gradients"]
    assert sum(x.time_ms for x in review.launches) == pytest.approx(review.regimes[0].time_ms)
    assert sum(x.share for x in review.launches) == pytest.approx(1.0)
    assert sum(step.share for step in review.waterfall) == pytest.approx(1.0)
    assert review.asked_pass == "bwd" and "backward pass of" in review.title and "backward pass" in review.question


def test_ceilings_hold_the_work_of_all_kernels(review: Review, chosen: Fa3BackwardApartVariant) -> None:
    first, machine = review.regimes[0], H200
    for row in review.ceilings:
        assert first.tflops <= row.tflops * (1 + 1e-9), row.unit
        assert row.tflops * row.busy == pytest.approx(first.tflops, rel=1e-9)
    # Seven products of 64 x 64 and 128 x 64 blocks where five are counted; the tensor core does nothing else.
    run = predict_backward(WORK, machine, chosen, interval=False).run
    executed = sum(
        x.kernel.flop_per_score * 64 * x.kernel.pipeline.rows_per_cta * x.loop.chip.iterations  # type: ignore[union-attr]
        for x in run.launches if x.loop is not None
    )  # fmt: skip
    tensor = next(row for row in review.ceilings if row.unit == "tensor")
    cycles = tensor.busy * first.time_ms * 1e-3 * first.clock_mhz * 1e6
    assert cycles == pytest.approx(executed / machine["tensor.bf16_flop_per_clk"] / machine["chip.sm_count"], rel=1e-6)


def test_every_kernel_has_its_timeline(review: Review, chosen: Fa3BackwardApartVariant) -> None:
    keys, queries = predict_backward(WORK, H200, chosen, interval=False).kernels
    (other,) = review.other_timelines
    for shown, kernel in ((review.timeline, keys), (other, queries)):
        assert shown.ii_cycles == kernel.trace.ii_cycles
        assert kernel.name in shown.title
        names = {bar.name for bar in shown.bars if bar.kind not in ("unit", "wait")}
        assert names == {op.name for op in kernel.pipeline.ops}
    drawn = charts(review)
    assert {"before", "after", "timeline-2"} <= set(drawn)
    schedule = next(section for section in document(review).sections if section.ident == "schedule")
    assert "key gradients" in schedule.paragraphs[0] and "query gradients" in schedule.paragraphs[0]


def test_what_a_change_brings_is_the_what_if(review: Review) -> None:
    found = backward_what_if(WORK, H200, {"smem.bytes_per_clk": 256})
    assert review.change is not None
    assert review.change.speed_up == found.speedup and review.change.speed_up_kept == found.speedup_kept
    assert review.change.after.time_ms == found.after.time_ms


def test_sensitivities_and_alternatives_are_the_models(review: Review, chosen: Fa3BackwardApartVariant) -> None:
    rows = backward_sensitivities(WORK, H200, chosen, step=review.tornado.step)
    assert [row.fact for row in review.tornado.rows] == [row.fact for row in rows][: len(review.tornado.rows)]
    for row in review.variants.rows:
        if row.slower is None or row.verdict == "chosen":
            continue
        family = next(f for f in BACKWARD_FAMILIES if row.variant.startswith(f"family={f.name},"))
        variant = parse_backward(row.variant, family.variant())
        assert family_of(variant) is family
        other = predict_backward(WORK, H200, variant, interval=False)
        assert other.time_ms / review.regimes[0].time_ms - 1 == pytest.approx(row.slower, abs=1e-9)
    assert {"another family: fa2_bwd"} <= {row.change for row in review.variants.rows}
    assert review.variants.space == review.variants.legal == 6  # heads_abreast 1 to 32


def test_it_is_held_against_backward_passes_alone(review: Review) -> None:
    published, own = review.regions
    assert published.count and own.count
    assert own.nearness.startswith("on h200-sxm, 16 bit, head_dim 256")
    assert all(point.kernel.startswith("hopper_bwd") for point in own.points)
    nowhere = regions(predict_backward(WORK, "a100", interval=False))
    assert [region.count for region in nowhere] == [0, 0] and all("a100" in region.note for region in nowhere)


def test_words_are_those_of_the_pass(review: Review) -> None:
    words = next(section for section in document(review).sections if section.ident == "words").bullets
    assert any("dS" in word for word in words) and not any("row max" in word for word in words)


def test_the_page_says_what_it_said(golden, review: Review) -> None:  # type: ignore[no-untyped-def]
    fixed = replace(review, provenance=replace(review.provenance, version="0", source="0" * 12))
    golden("report-h200-backward.md", fixed.markdown("report-h200-backward")["report-h200-backward.md"])


def command(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    with pytest.raises(SystemExit) as stopped:
        main(["report", *arguments])
    return int(stopped.value.code or 0), capsys.readouterr().err.strip()


@whole  # two reports; that of a forward pass is made again in test_review.py
def test_the_command_in_it_makes_it_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = tmp_path / "one.md", tmp_path / "two" / "one.md"
    asked = ["b200", "--pass", "bwd", "--seqlen", "1024", "--heads", "8", "--heads-kv", "2", "--clock", "1100", "--family", "fa2"]  # fmt: skip
    assert command([*asked, "-o", str(first)], capsys)[0] == 0
    line = next(text for text in first.read_text("utf-8").splitlines() if text.startswith("tilecast report"))
    again = shlex.split(line)[2:]
    assert again[again.index("--pass") + 1] == "bwd" and "fa2_bwd" in again
    second.parent.mkdir()
    assert command([*again[:-1], str(second)], capsys)[0] == 0
    for path in tmp_path.glob("one*"):
        assert (second.parent / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--pass", "both"], "--pass: expected fwd or bwd, got 'both': each pass has kernels of its own"),
        (["--pass", "bwd", "--level", "kept"], "backward passes are forecast before compilation"),
        (["--pass", "bwd", "--measured", "{data}/h200_points.csv"], "not a table of backward passes: no column head_dim,"),
        (["--pass", "bwd", "--family", "fa4"], "fa4_bwd cannot run the backward pass of"),
    ],
)  # fmt: skip
def test_refusals_are_one_sentence(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tilecast.base.data import MEASURED

    page = tmp_path / "r.html"
    code, text = command(["h200", *(a.format(data=MEASURED) for a in arguments), "-o", str(page)], capsys)
    assert code == 2 and says in text and text.count("\n") == 0 and not page.exists()
