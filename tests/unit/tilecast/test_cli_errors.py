"""Wrong input on the command line: one sentence on stderr, exit code 2, nothing written."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest

from tilecast.cli import main

MLA = ["--heads", "128", "--heads-kv", "1", "--head-dim", "576", "--head-dim-v", "512"]
B200 = ("predict", "--machine", "b200")
#: A machine file that parses but says almost nothing.
POOR_MACHINE = 'name = "poor"\ntitle = "Poor"\narch = "sm_100a"\nfamily = "blackwell"\ntensor_kind = "tcgen05"\n'


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The sentence, after checking that it is one, stands alone, and came with exit code 2."""
    with pytest.raises(SystemExit) as end:
        main(arguments)
    out, err = capsys.readouterr()
    assert end.value.code == 2
    assert out == ""
    assert err.startswith("tilecast: ")
    assert err.count("\n") == 1
    return err.removeprefix("tilecast: ").rstrip("\n")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([*B200, "--preset", "llama3-8"], ("unknown preset 'llama3-8'", "llama3-8b")),
        ([*B200, "--dtype", "bf61"], ("dtype", "'bf61'", "bf16")),
        (["predict", "--machine", "b2000"], ("unknown machine 'b2000'", "b200")),
        (["predict", "--machine", "/none/x.toml"], ("/none/x.toml", "cannot read")),
        (["predict"], ("--machine",)),
        ([*B200, "--heads", "16", "--heads-kv", "3"], ("16 query heads", "3 key/value heads")),
        ([*B200, "--seqlen", "-4"], ("--seqlen:", "at least 1", "-4")),
        ([*B200, "--seqlen-k", "0"], ("--seqlen-k:", "at least 1", "0")),
        ([*B200, "--batch", "0"], ("batch", "at least 1", "0")),
        ([*B200, "--batch", "many"], ("--batch: expected a whole number, got 'many'",)),
        (["map", "b200", "--span", "wide"], ("--span",)),
        ([*B200, "--seqlen", "9" * 23], ("--seqlen:", "at most", "9" * 23)),
        ([*B200, "--window", "9" * 23], ("window", "at most")),
        ([*B200, "--window", "wide"], ("window", "'left,right'", "wide")),
        ([*B200, "--head-dim", "100"], ("--head-dim:", "multiple of 8", "100")),
        ([*B200, "--head-dim", "512"], ("tensor memory", "512", "over by")),
        ([*B200, "--variant", "tile_q=64"], ("no knob 'tile_q'", "tile_m")),
        ([*B200, "--variant", "tile_m"], ("--variant", "knob=value", "tile_m")),
        ([*B200, "--variant", "tile_m=many"], ("tile_m", "many")),
        ([*B200, "--variant", "family=fa9"], ("unknown family 'fa9'", "fa4")),
        (
            ["predict", "h200", *MLA, "--seqlen", "1", "--seqlen-k", "8192"],
            ("fa3 cannot run", "tilecast step --latent"),
        ),
        (
            ["step", "h200", *MLA, "--requests", "1x8192"],
            ("no serving kernel", "where V is the first columns of the key: --latent"),
        ),
        ([*B200, "--family", "fa9"], ("fa9", "fa4")),
        (["predict", "--machine", "a100", "--dtype", "fp8"], ("a100", "fp8")),
        ([*B200, "--clock", "fast"], ("clock", "sustained", "fast")),
        ([*B200, "--clock", "nan"], ("clock", "MHz", "nan")),
        ([*B200, "--shapes", "/none.csv"], ("/none.csv", "cannot read")),
        ([*B200, "--shapes", "x.csv", "--seqlen", "64"], ("--shapes", "--seqlen")),
        ([*B200, "--sequence", "64"], ("--sequence",)),
        (["foretell"], ("foretell",)),
        (["machine", "show", "b300x"], ("unknown machine 'b300x'", "b300")),
        (["machine", "check", "/none/x.toml"], ("/none/x.toml", "cannot read")),
        (["machine", "check", "b200"], (".toml", "b200")),
        (["demand", "--tile-m", "0"], ("--tile-m",)),
        (["schedule", "--time-limit", "-1"], ("--time-limit", "above 0", "-1")),
        (["schedule", "--time-limit", "nan"], ("--time-limit", "above 0", "nan")),
        (["validate", "published", "--clock", "fast"], ("--clock", "sustained", "fast")),
        (["validate", "published", "--picture", "x.gif"], ("--picture", ".png", "x.gif")),
        (["validate", "published", "--picture", "/none/x.png"], ("/none/x.png", "does not exist")),
    ],
    ids=lambda v: " ".join(a[:12] for a in v[-2:]) if isinstance(v, list) else "",
)
def test_one_sentence(arguments: list[str], parts: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    sentence = refusal(arguments, capsys)
    missing = [part for part in parts if part not in sentence]
    assert not missing, f"{sentence!r} does not say {missing}"


def test_bad_csv_row_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shapes = tmp_path / "shapes.csv"
    shapes.write_text("seqlen,heads,head_dim\n1024,16,128\n1024,sixteen,128\n")
    sentence = refusal([*B200, "--shapes", str(shapes)], capsys)
    assert sentence == "shapes.csv: row 3: column 'heads': expected a whole number, got 'sixteen'"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("name = ", ("not valid TOML",)),
        (POOR_MACHINE, ("poor.toml",)),
        (POOR_MACHINE.replace("tcgen05", "mma"), ("tensor_kind", "mma", "tcgen05")),
        ('inherits = "b200x"\nname = "poor"\n', ("b200x", "b200")),
        ('inherits = "b200"\nname = "poor"\n[mufu]\nex2_per_clok = 16\n', ("poor.toml", "mufu.ex2_per_clok", "ex2_per_clk")),
        ('inherits = "b200"\nname = "poor"\n[mufu]\nex2_per_clk = 16\n', ("poor.toml", "mufu.ex2_per_clk", "source")),
    ],
)  # fmt: skip
def test_bad_machine_file(
    text: str, parts: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "poor.toml"
    file.write_text(text)
    for arguments in (["machine", "check", str(file)], ["predict", "--machine", str(file)]):
        sentence = refusal(arguments, capsys)
        assert all(part in sentence for part in parts), sentence


@pytest.mark.parametrize("where", ["none/trace.json", ".", "file.txt/trace.json"])
def test_output_that_cannot_be_written(where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file.txt").write_text("kept")
    sentence = refusal([*B200, "--trace", str(tmp_path / where)], capsys)
    assert str(tmp_path / where) in sentence
    assert [p.name for p in tmp_path.iterdir()] == ["file.txt"]


def test_a_refused_forecast_leaves_the_old_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.json"
    trace.write_text("old")
    refusal([*B200, "--head-dim", "512", "--trace", str(trace)], capsys)
    assert trace.read_text() == "old"
    assert list(tmp_path.iterdir()) == [trace]


def test_the_shell_sees_exit_code_2(tmp_path: Path) -> None:
    code = "from tilecast.cli import main; main()"
    run = subprocess.run(
        [sys.executable, "-c", code, *B200, "--dtype", "fp7"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert (run.returncode, run.stdout, run.stderr.count("\n")) == (2, "", 1)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def nobody() -> Iterator[TextIO]:
    """A pipe that nobody reads."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as end:
        yield end


@pytest.mark.parametrize("arguments", [["--help"], [], ["map", "--help"], ["machine", "list"], [*B200, "--json"]])
def test_a_reader_who_leaves_ends_the_command(
    arguments: list[str], nobody: TextIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Help is printed by Rich, answers by Typer, what to type by Python: each ends in its own way where nobody reads."""
    monkeypatch.setattr(sys, "stdout", nobody)
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 0


def test_the_shell_hears_nothing_of_a_reader_who_leaves(nobody: TextIO) -> None:
    run = subprocess.run([sys.executable, "-m", "tilecast.cli"], stdout=nobody, stderr=subprocess.PIPE, timeout=60)
    assert (run.returncode, run.stderr) == (0, b"")


def test_no_standard_output_is_one_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(SystemExit) as end:
        main([*B200])
    assert (end.value.code, capsys.readouterr().err) == (
        2,
        "tilecast: cannot write the output: standard output is closed\n",
    )
