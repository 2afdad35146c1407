"""Lengths of a batch from text and files, and the refusals of both."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilecast.model.kernel.workload import Workload, WorkloadError
from tilecast.model.step.batch import Batch, parse_requests, read_batch, requests_text

HEADS = Workload(heads_q=32, heads_kv=8, seqlen_q=1, head_dim_qk=128, mask="causal")
PAIRS = st.integers(1, 4096).flatmap(lambda q: st.tuples(st.just(q), st.integers(q, 1 << 20)))


def test_text_of_requests() -> None:
    assert parse_requests("3x8192, 2x512:4096,7") == ((1, 8192),) * 3 + ((512, 4096),) * 2 + ((1, 7),)


@given(st.lists(PAIRS, min_size=1, max_size=20))
def test_text_round_trip(lengths: list[tuple[int, int]]) -> None:
    assert parse_requests(requests_text(lengths)) == tuple(lengths)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "got ''"),
        ("64*8192", "got '64*8192'"),
        ("2x512:", "got '2x512:'"),
        ("0x8192", "count: expected 1 to 65536"),
        ("70000x8", "got 70000"),
        ("1x600:512", "at least the 600 queries"),
        ("1x0", "seqlen_k: expected 1 to"),
    ],
)
def test_requests_that_make_no_sense(text: str, words: str) -> None:
    with pytest.raises(WorkloadError, match=None) as refusal:
        parse_requests(text)
    assert words in str(refusal.value)


def test_file_of_lengths(tmp_path) -> None:
    path = tmp_path / "lens.csv"
    path.write_text("seqlen_k,seqlen_q,count\n8192,,3\n4096,512,\n")
    assert read_batch(path) == ((1, 8192),) * 3 + ((512, 4096),)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "row 1: expected seqlen_k and, if wanted, seqlen_q and count, got an empty file"),
        ("seqlen_q\n4\n", "row 1: expected seqlen_k and, if wanted, seqlen_q and count, got no seqlen_k"),
        ("seqlen_k,keys\n4,5\n", "got unknown column 'keys'"),
        ("seqlen_k,seqlen_k\n4,5\n", "got 'seqlen_k' twice"),
        ("seqlen_k\n8\nmany\n", "row 3: seqlen_k: expected a whole number, got 'many'"),
        ("seqlen_k,seqlen_q\n8,4\n8,9\n", "row 3: seqlen_k: expected at least the 9 queries"),
        ("seqlen_k,count\n8,0\n", "row 2: count: expected 1 to 65536"),
        ("seqlen_k,count\n8\n", "row 2: expected 2 fields, got 1"),
        ("seqlen_k\n", "expected at least one row of lengths, got none"),
    ],
)
def test_files_that_make_no_sense(content: str, words: str, tmp_path) -> None:
    path = tmp_path / "lens.csv"
    path.write_text(content)
    with pytest.raises(WorkloadError) as refusal:
        read_batch(path)
    assert str(refusal.value).startswith("lens.csv: ") and words in str(refusal.value)


def test_a_missing_file_is_a_sentence(tmp_path) -> None:
    with pytest.raises(WorkloadError, match="cannot read the batch: No such file"):
        read_batch(tmp_path / "none.csv")


def test_bytes_of_a_batch_count_whole_pages() -> None:
    batch = Batch(((1, 65), (4, 128)), HEADS, page=64)
    token = 8 * (128 + 128) * 2
    assert batch.token_bytes == token
    assert batch.cache_bytes == (128 + 128) * token
    assert Batch(batch.lengths, HEADS, page=0).cache_bytes == (65 + 128) * token
    assert (batch.queries, batch.keys) == (5, 193)


def test_pages_that_no_kernel_takes() -> None:
    with pytest.raises(WorkloadError, match="page: expected 0, 16, 32, 64, 128, 256 tokens, got 48"):
        Batch(((1, 8),), HEADS, page=48)
    with pytest.raises(WorkloadError, match="at least one sequence"):
        Batch((), HEADS)
