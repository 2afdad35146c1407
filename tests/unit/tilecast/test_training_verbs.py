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
        "lower bounds: smem 3088",
    ):
        assert words in text
    data = json.loads(out("predict", "h200", "--pass", "bwd", "--head-dim", "256", "--json", *SMALL))
    assert [one["name"] for one in data["launches"]] == ["row terms", "key gradients", "query gradients"]
    assert data["pass"] == "bwd" and data["written"] and data["time_ms"] > 0


def test_machines_and_passes_side_by_side(out) -> None:  # type: ignore[no-untyped-def]
    text = out("predict", "h200,a100", "--pass", "bwd", *SMALL)
    assert "fa3_bwd" in text and "fa2_bwd" in text
    assert "forward and backward pass of" in out("predict", "h200", "--pass", "both", "--level", "fluid", *SMALL)


def test_generate_takes_the_class_built_for_the_machine(out, tmp_path) -> None:  # type: ignore[no-untyped-def]
    def family(machine: str, *more: str) -> str:
        text = out("generate", machine, "--pass", "bwd", "-o", str(tmp_path / "backward.py"), *more)
        return text.partition("family=")[2].partition(",")[0]

    # No template writes fa4_bwd; head_dim 256 and 96 have classes of their own.
    assert [family(m) for m in ("h200", "b200", "a100")] == ["fa3_bwd", "fa2_bwd", "fa2_bwd"]
    assert [family("h200", "--head-dim", d) for d in ("256", "96")] == ["fa3_bwd_apart", "fa2_bwd"]


def test_other_verbs_know_the_pass(out) -> None:  # type: ignore[no-untyped-def]
    data = json.loads(out("schedule", "h200", "--pass", "bwd", "--head-dim", "256", "--json"))
    keys, queries = data["kernels"]
    assert keys["best_order"]["ii_cycles"] <= keys["own_order"]["ii_cycles"] and queries["name"] == "query gradients"
    assert "1." in out(
        "whatif", "h200", "--pass", "bwd", "--set", "smem.bytes_per_clk=256", "--variant", "dq_slots=2", *SMALL
    )
    assert "smem.bytes_per_clk" in out("sensitivity", "h200", "--pass", "bwd", "--head-dim", "256", *SMALL)


def test_break_evens_are_of_the_loop_that_takes_longest(out) -> None:  # type: ignore[no-untyped-def]
    """At head_dim 128 the port of shared memory needs 3088 cycles a step where the tensor core needs 2624."""
    asked = ("breakeven", "h200", "--pass", "bwd", "--fact", "smem.bytes_per_clk", "--clock", "1500", "--variant", "fragments=true")  # fmt: skip
    data = json.loads(out(*asked, "--json"))
    (row,) = data["facts"]
    assert data["pass"] == "bwd" and row["bound_now"] == "recurrence"
    # A port as much faster as it is busier leaves the array.
    assert row["solved"]["unit"] == "smem" and row["solved"]["other"] == "tensor"
    assert row["solved"]["value"] == pytest.approx(128 * 3088 / 2624)
    assert row["simulated"]["below"] == "smem" and row["simulated"]["value"] < 128
    assert row["useful_until"] > row["value"] and 10 < row["at_most_percent"] < 40
    assert "backward pass of bf16 full attention" in out(*asked)


def test_a_map_of_the_backward_pass_holds_its_forecast(out) -> None:  # type: ignore[no-untyped-def]
    asked = ("--pass", "bwd", "--head-dim", "256", "--clock", "1500", "--seqlen", "1024", "--json")
    data = json.loads(out("map", "h200", "--grid", "3", *asked))
    own = json.loads(out("predict", "h200", *asked))
    assert data["pass"] == "bwd" and data["variant"] == own["variant"]
    assert data["tflops"][1][1] == data["base_tflops"] == pytest.approx(own["tflops"])
    # Of a quarter of the matrix rate the pass gets at most a quarter of the peak; more of both rates is no slower.
    assert data["tflops"][1][0] < 0.25 * 4096 * 132 * 1500e6 / 1e12 and data["tflops"][2][2] >= data["base_tflops"]


def test_a_trace_has_the_roles_of_every_kernel(out, tmp_path) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "trace.json"
    out("predict", "h200", "--pass", "both", "--head-dim", "256", "--level", "fluid", "--trace", str(file), *SMALL)
    events = json.loads(file.read_text())["traceEvents"]
    titles = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert [title.partition(",")[0] for title in titles[::2]] == ["kernel", "key gradients", "query gradients"]
    drawn = {(event["pid"], event["cat"]) for event in events if event["ph"] in "Xb"}
    # The keys' kernel is processes 3 and 4, that of the queries 5 and 6: who has which product.
    assert {(3, "dk"), (3, "dv"), (5, "dq")} <= drawn and (3, "dq") not in drawn


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["predict", "h200", "--pass", "back"], "--pass: expected fwd, bwd or both, got 'back'"),
        (["schedule", "h200", "--pass", "both"], "--pass: expected fwd or bwd, got 'both': each pass has kernels of its own"),
        (["predict", "h200,b200", "--pass", "bwd", "--trace", "x.json"], "--trace goes with one shape and one machine, got 2"),
        (["map", "h200", "--pass", "bwd", "--level", "kept"], "backward passes are forecast before compilation"),
        (["tune", "h200", "--pass", "bwd"], "tune compiles and times forward kernels: 'tilecast generate --pass bwd' writes"),
        (["demand", "h200", "--pass", "both"], "--pass: expected fwd or bwd, got 'both': each pass has kernels of its own"),
        (["demand", "h200", "--pass", "bwd", "--dtype", "int3"], "dtype"),
        (["breakeven", "h200", "--pass", "bwd", "--family", "fa3", "--dtype", "fp8"], "written for bf16 and fp16"),
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
