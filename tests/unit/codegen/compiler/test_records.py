"""Records of compiled kernels: their names, and caches that are damaged or cannot be written."""

from __future__ import annotations

from pathlib import Path

import pytest

from tilecast.codegen.compiler.records import keep, kept, record_file


def registers(record: dict[str, int]) -> int:
    return record["registers"]


def test_a_record_comes_back(tmp_path: Path) -> None:
    file = record_file(tmp_path / "made", "fa3", "source", "sm_90a")
    keep(file, {"registers": 168})
    assert kept(file, registers) == 168
    assert kept(record_file(tmp_path / "made", "fa3", "source", "sm_100a"), registers) is None


def test_names_tell_apart_what_is_said_and_of_whom(tmp_path: Path) -> None:
    names = {record_file(tmp_path, *said) for said in (("fa3", "a", "b"), ("fa3", "b", "a"), ("fa4", "a", "b"))}
    assert len(names) == 3


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"stack_bytes": 0}'])
def test_a_damaged_record_is_none(tmp_path: Path, text: str) -> None:
    file = record_file(tmp_path, "fa3", "source")
    file.write_text(text, encoding="utf-8")
    assert kept(file, registers) is None


def test_a_cache_that_cannot_be_written_is_no_reason_to_fail(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    file = record_file(tmp_path / "file" / "folder", "fa3", "source")
    keep(file, {"registers": 168})
    assert kept(file, registers) is None
