"""The command line as a user meets it: output, exit codes, one sentence for each mistake, nothing half-written."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from tilecast.cli import main

PREDICT = ["predict", "--machine", "b200", "--batch", "4", "--heads", "16", "--heads-kv", "16", "--seqlen", "8192",
           "--head-dim", "128", "--causal", "--dtype", "bf16"]  # fmt: skip


def from_a_shell(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tilecast.cli", *arguments], capture_output=True, text=True, check=False
    )


def tilecast(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The same without the second that a process takes to begin."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as end:
        main(list(arguments))
    return subprocess.CompletedProcess(arguments, int(end.value.code or 0), out.getvalue(), err.getvalue())


def test_a_shell_sees_what_python_sees() -> None:
    for arguments in (["machine", "list"], ["predict", "b20"], ["emulate", "no_such_kernel"], ["--version"]):
        shell, python = from_a_shell(*arguments), tilecast(*arguments)
        assert (shell.returncode, shell.stdout, shell.stderr) == (python.returncode, python.stdout, python.stderr)


def test_main_job_prints_the_forecast() -> None:
    done = from_a_shell(*PREDICT)
    assert done.returncode == 0
    assert done.stderr == ""
    assert "NVIDIA B200" in done.stdout
    assert "TFLOP/s" in done.stdout


def test_json_and_trace(tmp_path: Path) -> None:
    trace = tmp_path / "tile.json"
    done = tilecast(*PREDICT, "--json", "--trace", str(trace))
    data = json.loads(done.stdout)
    assert data["machine"] == "b200"
    events = json.loads(trace.read_text())["traceEvents"]
    lanes = {e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert {"softmax0", "softmax1", "correction", "mma", "load", "tensor", "mufu"} <= lanes
    begun = [e["id"] for e in events if e["ph"] == "b"]
    ended = [e["id"] for e in events if e["ph"] == "e"]
    assert sorted(begun) == sorted(ended)
    for lane in ("softmax0", "softmax1"):  # a warpgroup does one thing at a time
        tid = next(e["tid"] for e in events if e["ph"] == "M" and e["args"].get("name") == lane)
        slices = sorted((e["ts"], e["dur"]) for e in events if e["ph"] == "X" and e["tid"] == tid)
        assert all(a + d <= b + 1e-6 for (a, d), (b, _) in pairwise(slices))


def test_preset_and_shapes(tmp_path: Path) -> None:
    done = tilecast("predict", "--machine", "gb300", "--preset", "llama3-8b", "--json")
    assert json.loads(done.stdout)["workload"]["heads_kv"] == 8
    shapes = tmp_path / "s.csv"
    shapes.write_text("heads,seqlen,head_dim,causal\n16,2048,128,1\n16,4096,64,0\n")
    table = tilecast("predict", "--machine", "h200-sxm", "--shapes", str(shapes))
    assert table.returncode == 0
    # A row for each shape; the name of its kernel may take two lines.
    assert table.stdout.count("from machine code") == 2
    assert len(json.loads(tilecast("predict", "--machine", "h200-sxm", "--shapes", str(shapes), "--json").stdout)) == 2


@pytest.mark.parametrize("arguments", [["machine", "list"], ["machine", "show", "b200"], ["presets"], ["variants"],
                                       ["machine", "schema"], ["demand"], ["demand", "--json"], ["--version"],
                                       ["schedule", "--machine", "b300"]])  # fmt: skip
def test_other_verbs_work(arguments: list[str]) -> None:
    done = tilecast(*arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


BAD_CSV = "heads,seqlen,head_dim\n16,4096,128\n16,abc,128\n"


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["predict", "--machine", "b20"], "unknown machine 'b20'; did you mean b200"),
        (["predict", "--machine", "b200", "--preset", "lama3-8b"], "unknown preset 'lama3-8b'; did you mean llama3-8b"),
        (["predict", "--machine", "b200", "--dtype", "bf61"], "got 'bf61'; did you mean bf16"),
        (["predict", "--machine", "b200", "--heads", "10", "--heads-kv", "4"], "10 query heads do not divide among 4"),
        (["predict", "--machine", "b200", "--head-dim", "512"], "tensor memory"),
        (["predict", "--machine", "b200", "--seqlen", "0"], "--seqlen: expected at least 1, got 0"),
        (["predict", "--machine", "b200", "--batch", "-1"], "--batch: expected at least 1, got -1"),
        (["predict", "--machine", "b200", "--seqlen", "many"], "--seqlen"),
        (["predict", "--machine", "b200", "--variant", "cta=2"], "has no knob 'cta'; did you mean cta_group"),
        (["predict", "--machine", "b200", "--clock", "fast"], "--clock: expected sustained, short"),
        (["predict", "--machine", "b200", "--family", "fa9"], "unknown kernel family 'fa9'"),
        (["predict", "--machine", "b200", "--shapes", "BAD"], "row 3: column 'seqlen'"),
        (["predict", "--machine", "b200", "--shapes", "MISSING"], "cannot read the shapes"),
        (["predict", "--machine", "b200", "--trace", "/nowhere/trace.json"], "folder /nowhere does not exist"),
        (["predict", "--machine", "b200", "--trace", "FOLDER"], "expected a file name, got a folder"),
        (["predict", "--machine", "b200", "--window", "a,b"], "--window: expected 'left,right'"),
        (["predict"], "--machine"),
        (["machine", "check", "HALF"], "lacks"),
        (["machine", "check", "BROKEN"], "not valid TOML"),
        (["machine", "show", "h300"], "unknown machine 'h300'"),
        (["validate", "published", "--picture", "plot.gif"], "ending in .svg or .png"),
        (["validate", "published", "--clock", "noon"], "expected sustained, short or run"),
        (["--colour"], "No such option"),
        (["predcit"], "No such command"),
    ],
)
def test_mistakes_are_one_sentence_and_exit_code_2(tmp_path: Path, arguments: list[str], part: str) -> None:
    (tmp_path / "bad.csv").write_text(BAD_CSV)
    (tmp_path / "half.toml").write_text(
        'name = "half"\ntitle = "h"\narch = "x"\nfamily = "hopper"\ntensor_kind = "wgmma"\n'
    )
    (tmp_path / "broken.toml").write_text("name = \n")
    places = {
        "BAD": tmp_path / "bad.csv", "MISSING": tmp_path / "no.csv", "FOLDER": tmp_path, "HALF": tmp_path / "half.toml",
        "BROKEN": tmp_path / "broken.toml",
    }  # fmt: skip
    before = sorted(p.name for p in tmp_path.iterdir())
    done = tilecast(*(str(places.get(a, a)) for a in arguments))
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert part in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""
    assert sorted(p.name for p in tmp_path.iterdir()) == before


# --- emulate ------------------------------------------------------------------------------------------------------------


def test_emulate_prints_correctness_races_and_cycles(tmp_path: Path) -> None:
    trace = tmp_path / "timeline.json"
    done = tilecast("emulate", "hopper_ws_d64_full", "--seqlen", "200", "--seqlen-k", "1100", "--heads", "2",
                    "--heads-kv", "1", "--trace", str(trace))  # fmt: skip
    assert done.returncode == 0, done.stderr
    for word in ("correct ", "races      none", "cycles ", "pipeline simulation"):
        assert word in done.stdout
    assert json.loads(trace.read_text())["traceEvents"]


def test_emulate_reports_a_bug_with_its_line_and_fails(tmp_path: Path) -> None:
    from tilecast.emulator.run import kernel_path

    text = kernel_path("hopper_ws_d64_full").read_text(encoding="utf-8")
    wait = "    wait(tile.v, n)\n    o = issue_pv"
    assert wait in text
    broken = tmp_path / "broken.py"
    broken.write_text(text.replace(wait, "    o = issue_pv"))
    done = tilecast("emulate", str(broken), "--mode", "random", "--seed", "2")
    assert done.returncode == 1
    assert "line " in done.stdout and "copy_tile(desc" in done.stdout and "not ordered" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["no_such_kernel"], "expected a kernel file"),
        (["hopper_ws_d64_full", "--machine", "b200"], "needs wgmma"),
        (["hopper_ws_d64_full", "--mode", "early"], "late or random"),
        (["hopper_ws_d64_full", "--dtype", "fp8"], "bf16 and fp16"),
        (["hopper_ws_d64_full", "--window", "10,10"], "written for no mask"),
        (["hopper_ws_d64_full", "--trace", "/no/such/folder/t.json"], "does not exist"),
        (["triton_d64_causal"], "family 'triton'"),
    ],
)
def test_emulate_refuses_in_one_sentence(arguments: list[str], says: str) -> None:
    done = tilecast("emulate", *arguments)
    assert done.returncode == 2
    assert says in done.stderr and len(done.stderr.splitlines()) == 1
