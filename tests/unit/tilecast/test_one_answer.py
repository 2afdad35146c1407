"""One question, one answer: every verb names the same kernel and the same time for a workload, a machine and a clock."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
from support.whole import is_whole, whole

from tilecast.cli.gpu import measured_item
from tilecast.cli.workload_options import Kernel
from tilecast.codegen.generate import generate
from tilecast.explore.review import build
from tilecast.explore.sweep.spec.items import canonical, forecast_item, run_item
from tilecast.explore.sweep.spec.variants import Choice, measured_variants
from tilecast.model.chip.evaluate import PredictError
from tilecast.model.compiled.loops.shelf import loops_at_hand
from tilecast.model.families import native_family
from tilecast.model.forecast.answer import COMPILED
from tilecast.model.forecast.level import at_hand, compiler_of, search_of, settled
from tilecast.model.forecast.predict import Prediction, predict
from tilecast.model.kernel.variant import variant_text
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine, load_machine, machine_names
from tilecast.model.schedule import report as schedules
from tilecast.model.whatif import sensitivity
from tilecast.model.whatif.asymmetry import asymmetry_map
from tilecast.model.whatif.break_even import break_evens
from tilecast.model.whatif.sensitivity import sensitivities
from tilecast.model.whatif.what_if import what_if
from tilecast.validation.lab.tuning import tune

_SHAPES = 60 if is_whole() else 33
_SEED = 20261


@dataclass(frozen=True)
class Question:
    """One workload, machine and clock."""

    workload: Workload
    machine: Machine
    clock: str | float

    def answer(self) -> Prediction:
        return predict(self.workload, self.machine, clock=self.clock, interval=False)

    def __str__(self) -> str:
        return f"{self.machine.name}: {self.workload.label()} at {self.clock}"


def _question(rng: random.Random, machine: Machine, *, with_loops: bool = False) -> Question:
    """A random problem that the machine can run, ``with_loops`` one of whose head dimensions and mask loops are at hand."""
    dtypes = ["bf16", "bf16", "fp16", *(["fp8"] if machine.has("tensor.fp8_flop_per_clk") else [])]
    while True:
        heads_kv = rng.choice((1, 2, 4, 8, 16))
        queries = rng.choice((1, 200, 512, 1000, 2048, 4096, 8192, 20000))
        mask = rng.choice(("none", "causal", "window"))
        work = Workload(
            rng.choice((1, 2, 3, 8)), heads_kv * rng.choice((1, 1, 2, 4, 8)), heads_kv, queries,
            rng.choice((queries, queries, 64, 3000, 16384)), rng.choice((64, 64, 80, 96, 128, 128, 128, 192)), None, mask,
            rng.choice(((127, 0), (1023, 0), (256, 256))) if mask == "window" else None, rng.choice(dtypes),
        )  # fmt: skip
        clock: str | float = rng.choice(("sustained", "sustained", "short", 1000.0, 1300.0))
        question = Question(work, machine, clock)
        if with_loops and not loops_at_hand(work.reduced(), machine):
            continue
        try:
            question.answer()
        except PredictError:
            continue
        return question


@pytest.fixture(scope="module")
def seed(request: pytest.FixtureRequest) -> int:
    """What questions are drawn from: one number, and with --fresh another one in every run."""
    return random.SystemRandom().getrandbits(64) if request.config.getoption("--fresh") else _SEED


@cache
def _questions(machine: str, seed: int, count: int) -> list[Question]:
    """``count`` questions to a machine."""
    rng = random.Random(f"{seed} {machine}")
    return [_question(rng, load_machine(machine)) for _ in range(count)]


def _share(machine: str, shapes: int = _SHAPES) -> int:
    """How many of so many shapes a machine is dealt."""
    names = machine_names()
    return len(range(names.index(machine), shapes, len(names)))


def test_every_machine_is_asked_of_several_shapes() -> None:
    assert sum(map(_share, machine_names())) == _SHAPES >= 3 * len(machine_names())


@pytest.mark.parametrize("machine", machine_names())
def test_verbs_that_take_the_best_kernel_take_the_same_one(
    machine: str, seed: int, request: pytest.FixtureRequest
) -> None:
    """Shapes dealt to the machines; with --fresh sixty to each, which takes minutes."""
    for question in _questions(machine, seed, 60 if request.config.getoption("--fresh") else _share(machine)):
        work, chip, clock = question.workload, question.machine, question.clock
        answer = question.answer()
        expected, family = variant_text(answer.variant), native_family(chip)
        found = search_of(at_hand)(work, chip, family.name, clock)
        assert (variant_text(found.variant), found.scope) == (expected, answer.variant_origin), question
        assert found.seconds * 1e3 == pytest.approx(answer.time_ms, rel=1e-9), question
        # The kernel named by hand is the kernel chosen.
        assert predict(work, chip, answer.variant, clock=clock, interval=False).time_ms == answer.time_ms, question
        assert schedules._kernel(work.reduced(), chip, None, None, clock) == (answer.variant, answer.variant_origin), (
            question
        )
        item = run_item(canonical(forecast_item(work, chip, f"best:{family.name}", clock, False)), {chip.name: chip})
        assert (item["variant"], item["time_ms"]) == (expected, answer.time_ms), question
        if "writes none" in found.scope:
            continue
        made = generate(work, chip, family, clock=clock)
        assert (variant_text(made.variant), made.prediction.time_ms) == (expected, answer.time_ms), question
        if clock == "sustained":
            assert measured_item(work, chip, Kernel(None, None)).variant == expected, question
            assert measured_variants(Choice("best", ""), work, chip) == (family.template, [expected]), question


#: One question a machine of each kernel class, at every kind of clock, for the verbs that forecast by the hundred.
_MAPPED = ("b200", "h100-sxm", "a100")
_FEW = [("b200", 0), ("h200-sxm", 0), ("h100-sxm", 1), ("b300", 1), ("rtx-5090", 0), ("a100", 0)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Verbs that take seconds are asked a few of the questions; with --fresh all sixty."""
    if "few" in metafunc.fixturenames:
        places: list[Any] = [(machine, number) for machine in machine_names() for number in range(_share(machine, 60))]
        if not metafunc.config.getoption("--fresh"):
            # A map searches again and again: one a kernel class.
            rare = metafunc.function is test_the_maps_own_cell_is_the_forecast_at_its_clock
            places = [pytest.param(place, marks=whole) if rare and place[0] not in _MAPPED else place for place in _FEW]
        metafunc.parametrize("few", places, ids=lambda place: f"{place[0]}-{place[1]}")


@pytest.fixture
def question(few: tuple[str, int], seed: int) -> Question:
    machine, number = few
    return _questions(machine, seed, number + 1)[number]


def test_verbs_that_explore_start_from_the_same_answer(question: Question) -> None:
    work, chip, clock = question.workload, question.machine, question.clock
    answer = question.answer()
    moved = what_if(work, chip, {"launch.kernel_us": chip["launch.kernel_us"]} if chip.has("launch.kernel_us") else {"chip.tdp_w": chip["chip.tdp_w"] + 1}, clock=clock)  # fmt: skip
    assert (moved.before.variant, moved.before.time_ms) == (answer.variant, answer.time_ms), question
    rows = sensitivities(work, chip, clock=clock, reoptimised=False)
    assert rows.variant == answer.variant, question
    assert {row.base_ms for row in rows} == {answer.time_ms}, question
    points = break_evens(work, chip, facts=("mufu.ex2",), clock=clock)
    assert points.variant == answer.variant, question


def test_the_maps_own_cell_is_the_forecast_at_its_clock(question: Question) -> None:
    work, chip = question.workload, question.machine
    found = asymmetry_map(work, chip, grid=3, shown=(), clock=1200.0)
    answer = predict(work, chip, clock=found.clock_mhz, interval=False)
    assert found.variant == found.variants[1][1] == variant_text(answer.variant), question
    assert found.base_tflops == found.tflops[1][1] == answer.tflops, question


def test_the_tuners_first_is_the_forecasts_kernel(question: Question) -> None:
    answer = question.answer()
    try:
        found = tune(question.workload, question.machine, clock=question.clock, candidates=4, budget=0, compile=False)
    except PredictError:
        assert "writes none" in answer.variant_origin
        return
    assert found.winner.variant == answer.variant, question
    seconds = found.winner.forecast_s if answer.compiled is None else found.winner.compiled_s
    assert seconds == pytest.approx(answer.time_ms / 1e3, rel=1e-9), question
    assert answer.compiled is not None or found.shortlist[0].variant == answer.variant, question


def test_the_review_is_of_the_forecasts_kernel(question: Question, monkeypatch: pytest.MonkeyPatch) -> None:
    # The map and the tornado have tests of their own; here they would take most of the time.
    monkeypatch.setattr(build, "_map", lambda *_: None)
    monkeypatch.setattr(build, "_tornado", lambda *_: build.Tornado(0.05, (), (), ()))
    monkeypatch.setattr(build, "considered", lambda *_: None)
    monkeypatch.setattr(build, "verdict", lambda _: ("", ""))
    monkeypatch.setattr(build, "risks", lambda _: ())
    answer = question.answer()
    content = build.report(question.workload, question.machine, clock=question.clock)
    assert content.variant == variant_text(answer.variant), question
    assert (content.regimes[0].time_ms, content.regimes[0].clock_mhz) == (answer.time_ms, answer.clock_mhz), question


@pytest.mark.parametrize(
    ("place", "level"), [(("h200-sxm", 2), "kept"), (("h100-sxm", 1), "auto")], ids=["h200-sxm-kept", "h100-sxm-auto"]
)
def test_at_every_level_all_verbs_give_one_answer(
    place: tuple[str, int], level: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From machine code as before compilation: the same kernel and time, to the last digit."""
    monkeypatch.setattr(build, "_map", lambda *_: None)
    monkeypatch.setattr(build, "_tornado", lambda *_: build.Tornado(0.05, (), (), ()))
    monkeypatch.setattr(build, "considered", lambda *_: None)
    monkeypatch.setattr(build, "verdict", lambda _: ("", ""))
    monkeypatch.setattr(build, "risks", lambda _: ())
    # Of the many facts one is enough: what is asked is where the rows start.
    ends = sensitivity.ends_of
    monkeypatch.setattr(
        sensitivity, "ends_of", lambda key, *args: ends(key, *args) if key == "mufu.ex2_per_clk" else None
    )
    question = _at_hand(place, seed)
    work, chip, clock = question.workload, question.machine, question.clock
    compiler, family = compiler_of(level), native_family(chip)
    answer = predict(work, chip, clock=clock, compiler=compiler, interval=False)
    assert answer.level == COMPILED
    expected = variant_text(answer.variant)
    found = search_of(compiler)(work, chip, family.name, clock)
    assert (variant_text(found.variant), found.scope) == (expected, answer.variant_origin), question
    assert found.seconds * 1e3 == pytest.approx(answer.time_ms, rel=1e-12), question
    moved = what_if(work, chip, {"chip.tdp_w": chip["chip.tdp_w"] + 1}, clock=clock, compiler=compiler)
    assert (moved.before.variant, moved.before.time_ms) == (answer.variant, answer.time_ms), question
    rows = sensitivities(work, chip, clock=clock, reoptimised=False, compiler=compiler)
    assert (rows.variant, {row.base_ms for row in rows}) == (answer.variant, {answer.time_ms}), question
    assert break_evens(work, chip, facts=("mufu.ex2",), clock=clock, compiler=compiler).variant == answer.variant
    scheduled = schedules._kernel(work.reduced(), chip, None, None, clock, compiler)
    assert scheduled == (answer.variant, answer.variant_origin), question
    item = forecast_item(work, chip, f"best:{family.name}", clock, False, level)
    row = run_item(canonical(item), {chip.name: chip})
    assert (row["variant"], row["time_ms"], row["level"]) == (expected, answer.time_ms, COMPILED), question
    tuned = tune(work, chip, clock=clock, budget=0, compiler=compiler)
    assert tuned.winner.variant == answer.variant and tuned.by == "machine code", question
    assert tuned.winner.compiled_s == pytest.approx(answer.time_ms / 1e3, rel=1e-12), question
    made = generate(work, chip, family, clock=clock, compiler=compiler)
    assert (made.variant, made.prediction.time_ms) == (answer.variant, answer.time_ms), question
    drawn = asymmetry_map(work, chip, grid=3, shown=(), clock=1200.0, compiler=compiler)
    own = predict(work, chip, clock=1200.0, compiler=compiler, interval=False)
    assert (drawn.variant, drawn.tflops[1][1]) == (variant_text(own.variant), own.tflops), question
    content = build.report(work, chip, clock=clock, compiler=compiler)
    assert (content.variant, content.regimes[0].time_ms) == (expected, answer.time_ms), question
    assert ("--level kept" in content.provenance.command) and any("from machine code" in c for c in content.conditions)


def _at_hand(place: tuple[str, int], seed: int) -> Question:
    """The ``place``-th question to a machine of which a loop is at hand."""
    machine, number = place
    rng = random.Random(f"{seed} {machine} at hand")
    while True:
        question = _question(rng, load_machine(machine), with_loops=True)
        if settled(compiler_of("auto"), question.workload.reduced(), question.machine, clock=question.clock) is None:
            continue
        if not number:
            return question
        number -= 1


def test_the_command_line_gives_the_answer_of_python(capsys: pytest.CaptureFixture[str]) -> None:
    from tilecast.cli import main

    question = [
        "h200",
        "--seqlen",
        "1000",
        "--seqlen-k",
        "3000",
        "--heads",
        "8",
        "--heads-kv",
        "2",
        "--causal",
        "--clock",
        "1300",
    ]
    answer = predict(Workload(1, 8, 2, 1000, 3000, mask="causal"), "h200-sxm", clock=1300.0, interval=False)

    def said(*arguments: str) -> dict:
        with pytest.raises(SystemExit) as end:
            main([*arguments, "--json"])
        assert end.value.code == 0
        return json.loads(capsys.readouterr().out)

    assert said("predict", *question)["time_ms"] == answer.time_ms
    expected = variant_text(answer.variant)
    assert said("whatif", *question, "--set", "chip.tdp_w=701")["before"]["time_ms"] == answer.time_ms
    assert said("schedule", *question, "--time-limit", "0.1")["variant"] == expected
    assert said("generate", *question)["variant"] == expected
    assert said("tune", *question, "--no-compile", "--budget", "0")["winner"] == expected
    assert said("breakeven", *question, "--fact", "mufu.ex2")["variant"] == expected

    kept = predict(Workload(1, 8, 2, 1000, 3000, mask="causal"), "h200-sxm", clock=1300.0, compiler=compiler_of("kept"))
    question += ["--level", "kept"]
    assert said("predict", *question)["time_ms"] == kept.time_ms != answer.time_ms
    expected = variant_text(kept.variant)
    assert said("whatif", *question, "--set", "chip.tdp_w=701")["before"]["time_ms"] == kept.time_ms
    assert said("schedule", *question, "--time-limit", "0.1")["variant"] == expected
    assert said("generate", *question)["variant"] == expected
    assert said("tune", *question, "--budget", "0")["winner"] == expected
    assert said("breakeven", *question, "--fact", "mufu.ex2")["variant"] == expected
