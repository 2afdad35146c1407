"""--pass bwd and --pass both on the command line."""

from __future__ import annotations

import json

import pytest

from tilecast.cli import main

SMALL = ("--seqlen", "1024", "--heads", "8", "--clock", "short")


@pytest.fixture
def out(capsys):  # type: ignore[no-untyped-def]
    def run(*words: str) -> str:
        with pytest.raises(SystemExit) as end:
            main([*words])
        text = capsys.readouterr()
        assert not end.value.code, text.err
        return str(text.out)

    return run


def test_a_forecast_names_its_launches_and_what_they_wait_for(out) -> None:  # type: ignore[no-untyped-def]
    text = out("predict", "h200", "--pass", "bwd", *SMALL)
    for words in (
        "backward pass of bf16 full attention",
        "row terms",
        "round dQ",
        "What gradients waits for",
        "lower bounds: smem 3072",
    ):
        assert words in text
    data = json.loads(out("predict", "h200", "--pass", "bwd", "--head-dim", "256", "--json", *SMALL))
    assert [one["name"] for one in data["launches"]] == ["row terms", "key gradients", "query gradients"]
    assert data["pass"] == "bwd" and data["written"] and data["time_ms"] > 0


def test_machines_and_passes_side_by_side(out) -> None:  # type: ignore[no-untyped-def]
    text = out("predict", "h200,a100", "--pass", "bwd", *SMALL)
    assert "fa3_bwd" in text and "fa2_bwd" in text
    assert "forward and backward pass of" in out("predict", "h200", "--pass", "both", "--level", "fluid", *SMALL)


def test_other_verbs_know_the_pass(out) -> None:  # type: ignore[no-untyped-def]
    data = json.loads(out("schedule", "h200", "--pass", "bwd", "--head-dim", "256", "--json"))
    keys, queries = data["kernels"]
    assert keys["best_order"]["ii_cycles"] <= keys["own_order"]["ii_cycles"] and queries["name"] == "query gradients"
    assert "1." in out(
        "whatif", "h200", "--pass", "bwd", "--set", "smem.bytes_per_clk=256", "--variant", "dq_slots=2", *SMALL
    )
    assert "smem.bytes_per_clk" in out("sensitivity", "h200", "--pass", "bwd", "--head-dim", "256", *SMALL)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["predict", "h200", "--pass", "back"], "--pass: expected fwd, bwd or both, got 'back'"),
        (["schedule", "h200", "--pass", "both"], "--pass: expected fwd or bwd, got 'both'"),
        (["predict", "h200", "--pass", "bwd", "--level", "kept"], "backward passes are forecast before compilation"),
        (["predict", "h200", "--pass", "bwd", "--measured", "1ms"], "--measured goes with one forward pass: drop --pass bwd"),
        (["predict", "h200", "--pass", "bwd", "--family", "fa2", "--variant", "fa3_bwd:adders=1"], "contradict each other"),
        (["predict", "h200", "--pass", "both", "--family", "fa3"], "--family and --variant go with --pass fwd or bwd"),
        (["predict", "h200", "--family", "fa3_bwd"], "--pass bwd forecasts it and writes it"),
        (["predict", "h200", "--pass", "bwd", "--dtype", "fp8"], "written for bf16 and fp16"),
    ],
)  # fmt: skip
def test_refusals_are_one_sentence(arguments: list[str], words: str, capsys) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(SystemExit) as end:
        main(arguments)
    said = capsys.readouterr().err
    assert end.value.code == 2 and words in said and said.count("\n") == 1
