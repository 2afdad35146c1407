"""CSV of shapes: what columns mean, what defaults are, and how a bad row is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from tilecast.model.kernel.shapes_csv import parse_window, read_shapes
from tilecast.model.kernel.workload import Workload, WorkloadError


def write(folder: Path, text: str) -> Path:
    file = folder / "shapes.csv"
    file.write_text(text, encoding="utf-8")
    return file


def test_every_column(tmp_path: Path) -> None:
    header = "batch,heads,heads_kv,seqlen,seqlen_k,head_dim,head_dim_v,causal,window,dtype"
    file = write(tmp_path, f'{header}\n4,32,8,1024,2048,192,128,1,,fp8\n2,16,16,512,512,64,64,0,"100,3",bf16\n')
    assert read_shapes(file) == [
        Workload(4, 32, 8, 1024, 2048, 192, 128, "causal", None, "fp8"),
        Workload(2, 16, 16, 512, 512, 64, 64, "window", (100, 3), "bf16"),
    ]


def test_defaults(tmp_path: Path) -> None:
    file = write(tmp_path, "seqlen,heads,head_dim\n4096,16,128\n")
    assert read_shapes(file) == [Workload(1, 16, 16, 4096, 4096, 128, 128, "none", None, "bf16")]


def test_spaces_blank_lines_and_a_byte_order_mark(tmp_path: Path) -> None:
    file = write(tmp_path, "\ufeffseqlen, heads ,head_dim,causal\n\n 4096 , 16,128, TRUE\n\n")
    assert read_shapes(file) == [Workload(seqlen_q=4096, seqlen_k=4096, mask="causal")]


def test_preset_fills_what_the_row_leaves_out(tmp_path: Path) -> None:
    file = write(tmp_path, "preset,seqlen,causal\nllama3-8b,2048,\nllama3-8b,,0\ngpt-oss-120b-window,1024,\n")
    first, second, third = read_shapes(file)
    assert first == Workload(1, 32, 8, 2048, 2048, 128, 128, "causal")
    assert (second.seqlen_q, second.mask) == (8192, "none")
    assert (third.mask, third.window) == ("window", (127, 0))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "shapes.csv: row 1: expected columns"),
        ("seqlen,heads,seqlen\n1,2,3\n", "shapes.csv: row 1: .*'seqlen' twice"),
        ("seqlen,heads,head_dim,hedz\n", "shapes.csv: row 1: .*unknown column 'hedz'"),
        ("seqlen,heads,head_dim\n", "shapes.csv: expected at least one row"),
        ("seqlen,heads,head_dim\n1,2,64\n1,2\n", "shapes.csv: row 3: expected 3 fields, got 2"),
        ("seqlen,heads,head_dim\n1,2,64,9\n", "shapes.csv: row 2: expected 3 fields, got 4"),
        ("seqlen,heads,head_dim\n1k,2,64\n", "shapes.csv: row 2: column 'seqlen': expected a whole number, got '1k'"),
        ("preset,heads\nllama3-8b,6\n", "shapes.csv: row 2: column 'heads': 6 query heads are no multiple of the 4"),
        ("seqlen,heads,head_dim\n1024,2,65\n", "shapes.csv: row 2: column 'head_dim': expected a multiple of 8"),
        ("seqlen,heads,heads_kv,head_dim\n64,8,3,64\n", "shapes.csv: row 2: .*8 query heads do not divide among 3"),
        ("seqlen,heads,head_dim\n-4,2,64\n", "shapes.csv: row 2: column 'seqlen': expected at least 1, got -4"),
        ("seqlen,heads,head_dim,causal\n4,2,64,maybe\n", "shapes.csv: row 2: column 'causal': expected 0 or 1"),
        ("seqlen,heads,head_dim,window\n4,2,64,x\n", "shapes.csv: row 2: column 'window': expected"),
        ("seqlen,heads,head_dim,dtype\n4,2,64,bf61\n", "shapes.csv: row 2: column 'dtype': .*did you mean bf16"),
        ("seqlen,preset\n4,llama3-8\n", "shapes.csv: row 2: unknown preset 'llama3-8'; did you mean llama3-8b"),
        (f"seqlen,heads,head_dim\n4,2,{'6' * 200_000}\n", "shapes.csv: "),
    ],
)
def test_bad_files(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=message) as caught:
        read_shapes(write(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="cannot read the shapes"):
        read_shapes(tmp_path / "none.csv")
    with pytest.raises(WorkloadError, match="cannot read the shapes"):
        read_shapes(tmp_path)
    (tmp_path / "binary.csv").write_bytes(b"seqlen\xff\xfe\n")
    with pytest.raises(WorkloadError, match="cannot read the shapes"):
        read_shapes(tmp_path / "binary.csv")


@pytest.mark.parametrize(
    ("text", "causal", "window"),
    [("", True, None), ("128", False, (128, 0)), ("128,5", False, (128, 5)), ("128,-1", True, (128, 0)), ("-1,7", False, (-1, 7))],
)  # fmt: skip
def test_parse_window(text: str, causal: bool, window: tuple[int, int] | None) -> None:
    assert parse_window(text, causal) == window


def test_a_causal_window_with_keys_after_the_diagonal_is_refused() -> None:
    with pytest.raises(WorkloadError, match="causal attention sees no key after the diagonal: expected '128,0'"):
        parse_window("128,5", True)


def test_defaults_are_those_of_the_command_line(tmp_path: Path) -> None:
    assert read_shapes(write(tmp_path, "batch\n3\n")) == [Workload(batch=3)]
    assert read_shapes(write(tmp_path, "preset,heads\nllama3-8b,64\n"))[0].heads_kv == 16


@pytest.mark.parametrize("text", ["a", "1,2,3", "-2", ","])
def test_parse_window_refuses(text: str) -> None:
    with pytest.raises(WorkloadError, match="window: expected"):
        parse_window(text, False)
