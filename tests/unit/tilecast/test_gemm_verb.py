"""tilecast gemm: what it prints, what-if on facts, and one sentence for what makes no sense."""

from __future__ import annotations

import json

import pytest

from tilecast.cli import main


def run(capsys, *words: str) -> tuple[int, str, str]:  # type: ignore[no-untyped-def]
    with pytest.raises(SystemExit) as end:
        main(["gemm", *words])
    out = capsys.readouterr()
    return int(end.value.code or 0), out.out, out.err


SHAPE = ("--m", "2048", "--n", "2048", "--k", "256")


def test_answer_and_what_if(capsys) -> None:  # type: ignore[no-untyped-def]
    code, out, _ = run(capsys, "h200", *SHAPE, "--c-dtype", "fp32", "--clock", "1200", "--json")
    answer = json.loads(out)
    assert code == 0 and answer["gemm"]["d_dtype"] == "fp32"
    assert answer["tflops"] == pytest.approx(2 * 2048 * 2048 * 256 / answer["time_ms"] / 1e9)
    assert answer["memory_gbps"] == pytest.approx(answer["hbm_bytes"] / answer["time_ms"] / 1e6)
    code, out, _ = run(capsys, "h200", "--m", "8192", "--n", "8192", "--k", "64", "--clock", "1200", "--set", "hbm.tbps_achieved=2.1", "--json")  # fmt: skip
    slower = json.loads(out)
    assert slower["binding"] == {"kind": "memory", "name": "HBM bandwidth"}
    assert slower["time_ms"] / slower["before"]["time_ms"] == pytest.approx(4.226 / 2.1, rel=0.05)


def test_a_portable_kernel_has_no_second_accumulator(capsys) -> None:  # type: ignore[no-untyped-def]
    code, out, _ = run(capsys, "a100", *SHAPE, "--variant", "tile_n=64,warps=4")
    assert code == 0 and "Second accumulator" not in out and "gemm_triton 128x64" in out


def test_it_writes_the_kernel(capsys, tmp_path) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "product.py"
    code, out, _ = run(capsys, "h200", *SHAPE, "--variant", "accumulators=1", "-o", str(file), "--json")
    assert code == 0 and json.loads(out)["file"] == str(file)
    text = file.read_text(encoding="utf-8")
    assert "accumulators=1" in text and "halves of a tile" in text
    # What is forecast but not written is passed over.
    code, out, _ = run(capsys, "b200", *SHAPE, "-o", str(file))
    assert code == 0 and "sm_100a, sm_103a" in out and "cta_group=1" in file.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("h200", "--m", "0", "--n", "1", "--k", "1"), "m: expected 1 to"),
        (("h200", *SHAPE, "--dtype", "fp4"), "dtype: expected bf16, fp16, fp8"),
        (("h200", *SHAPE, "--family", "gemm_blackwell"), "needs tcgen05"),
        (("h200", *SHAPE, "--family", "gemm"), "unknown GEMM family 'gemm'"),
        (("h200", *SHAPE, "--variant", "tile_n=256"), "consumer thread needs"),
        (("h200", *SHAPE, "--variant", "family=gemm_triton"), "does not run here"),
        (("h200", *SHAPE, "--by-k", "--variant", "stages=3"), "drop --variant"),
        (("h200", *SHAPE, "--dtype", "fp8", "-o", "never.py"), "got dtype 'fp8'"),
        (("h200", *SHAPE, "-o", "no/such/folder/k.py"), "no/such/folder"),
        (("h200", *SHAPE, "--by-k", "-o", "never.py"), "drop -o"),
        (("a100", *SHAPE, "--by-k"), "has one accumulator"),
        (("a100", *SHAPE, "--dtype", "fp8"), "no fp8 matrix rate"),
        (("h200", *SHAPE, "--in-place", "--beta", "0"), "no C to write over"),
        (("h200", *SHAPE, "--clock", "9000"), "clock"),
    ],
)
def test_bad_input_is_one_sentence(capsys, words: tuple[str, ...], sentence: str) -> None:  # type: ignore[no-untyped-def]
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert sentence in err
