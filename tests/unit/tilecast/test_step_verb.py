"""tilecast step and predict --batch-file: what they print, what-if on facts, and one sentence for what makes no sense."""

from __future__ import annotations

import json

import pytest

from tilecast.cli import main
from tilecast.model.forecast import checked_range
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import load_machine


def run(capsys, *words: str) -> tuple[int, str, str]:  # type: ignore[no-untyped-def]
    with pytest.raises(SystemExit) as end:
        main([*words])
    out = capsys.readouterr()
    return int(end.value.code or 0), out.out, out.err


STEP = ("step", "h200", "--preset", "llama3-8b", "--no-splits")


def test_a_file_and_requests_are_one_answer(capsys, tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "lens.csv"
    path.write_text("seqlen_k,seqlen_q,count\n2048,1,16\n512,64,1\n")
    answers = []
    for words in (
        (*STEP, "--requests", "16x2048,1x64:512", "--json"),
        (*STEP, "--batch-file", str(path), "--json"),
        ("predict", "h200", "--preset", "llama3-8b", "--batch-file", str(path), "--json"),
    ):
        code, out, _ = run(capsys, *words)
        assert code == 0
        answers.append(json.loads(out))
    assert len({answer["attention_us"] for answer in answers}) == 1
    assert answers[0]["requests"] == "16x2048,1x64:512"
    assert [launch["sequences"] for launch in answers[0]["launches"]] == [16, 1, 0, 0]
    # predict is about a kernel, step about the decoder too.
    assert answers[2]["decoder"] is None and answers[0]["decoder"]["layers"] == 32


def test_what_if_and_more_requests(capsys) -> None:  # type: ignore[no-untyped-def]
    code, out, _ = run(
        capsys, *STEP, "--requests", "32x8192", "--set", "hbm.tbps_achieved=2.113", "--clock", "1980", "--next", "2x1024", "--json"
    )  # fmt: skip
    answer = json.loads(out)
    assert code == 0 and answer["binding"]["kind"] == "memory"
    assert answer["attention_us"] / answer["before"]["attention_us"] == pytest.approx(2.0, rel=0.1)
    assert answer["next_request"]["requests"] == "2x1024"
    assert sum(part["share"] for part in answer["parts"]) == pytest.approx(1.0)


def test_several_machines_each_answer(capsys, tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "lens.csv"
    path.write_text("seqlen_k\n4096\n")
    code, out, _ = run(capsys, "predict", "h200,b200", "--preset", "llama3-8b", "--batch-file", str(path))
    assert code == 0 and "NVIDIA H200" in out and "NVIDIA B200" in out


def test_a_model_without_a_known_decoder_has_no_step(capsys) -> None:  # type: ignore[no-untyped-def]
    code, out, _ = run(capsys, "step", "h200", "--preset", "deepseek-v3", "--requests", "4x4096", "--no-splits")
    assert code == 0 and "at least" not in out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("step", "h200"), "--requests and --batch-file: expected one of the two, got neither"),
        ((*STEP, "--requests", "8by8"), "--requests: expected COUNTxKEYS or COUNTxQUERIES:KEYS"),
        ((*STEP, "--requests", "8x8", "--next", "x"), "--next: expected COUNTxKEYS"),
        ((*STEP, "--requests", "8x8", "--within", "soon"), "--within: expected a time above 0 with its unit"),
        ((*STEP, "--requests", "8x8", "--page", "24"), "page: expected 0, 16, 32, 64, 128, 256 tokens, got 24"),
        ((*STEP, "--requests", "8x8", "--dtype", "fp8"), "family serving-hopper-runs is written for bf16 and fp16"),
        (
            (*STEP, "--requests", "8x8", "--variant", "split_keys=100"),
            "split_keys must be a power of two and a multiple of tile_n 64, got 100",
        ),
        (("predict", "h200", "--batch-file", "none.csv"), "none.csv: cannot read the batch: No such file"),
        (("predict", "h200", "--batch-file", "x.csv", "--trace", "t.json"), "drop --trace"),
    ],
)
def test_what_makes_no_sense_is_a_sentence(words, sentence, capsys) -> None:  # type: ignore[no-untyped-def]
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "") and sentence in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "shape",
    (
        ("--batch", "32", "--heads", "32", "--heads-kv", "8", "--seqlen", "1", "--seqlen-k", "32768"),
        ("--heads", "32", "--heads-kv", "8", "--seqlen", "4", "--seqlen-k", "8192", "--causal"),
        ("--batch", "3", "--seqlen", "1", "--seqlen-k", "2000", "--window", "700,0", "--dtype", "fp16"),
        ("--batch", "2", "--heads", "8", "--head-dim", "192", "--head-dim-v", "128", "--seqlen", "1", "--seqlen-k", "5000"),
    ),
)  # fmt: skip
def test_predict_names_the_step_that_decodes_so_few_queries(capsys, shape: tuple[str, ...]) -> None:  # type: ignore[no-untyped-def]
    code, out, err = run(capsys, "predict", "h200", *shape, "--clock", "short")
    assert code == 0, err
    (note,) = (line for line in out.splitlines() if "tilecast.attention launches one here" in line)
    told = float(note.split("one here: ")[1].split(" ms")[0])
    command = note[note.index("(tilecast step ") + 1 : note.rindex(")")].split()[1:]
    code, out, err = run(capsys, *command, "--clock", "short", "--no-splits", "--json")
    assert code == 0, err
    assert told == pytest.approx(json.loads(out)["attention_us"] / 1e3, rel=1e-3)


def test_few_queries_are_those_that_the_operator_gives_to_serving_kernels() -> None:
    pytest.importorskip("torch")
    from tilecast.kernels.serving import few_rows

    assert (few_rows.QUERIES, few_rows.ROWS, few_rows.KEYS) == (
        checked_range.FEW_QUERIES, checked_range.FEW_ROWS, checked_range.FEW_KEYS
    )  # fmt: skip
    assert checked_range.few_rows(Workload(1, 16, 16, 16, 512), machine := load_machine("h200-sxm")) is not None
    for other in (Workload(1, 16, 16, 17, 512), Workload(1, 16, 16, 16, 511), Workload(1, 16, 1, 16, 512)):
        assert checked_range.few_rows(other, machine) is None
