"""Text files that users name: what cannot be read is one sentence of the caller's own class."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tilecast.base import text_file
from tilecast.base.text_file import parsed, read_text


class _OwnError(ValueError):
    pass


def test_text_is_read_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes("µs\n\n".encode())
    assert read_text(str(file), "the plan", _OwnError) == "µs\n\n"


@pytest.mark.parametrize("kind", ["absent", "folder", "bytes"])
def test_what_cannot_be_read_is_refused_in_one_sentence(tmp_path: Path, kind: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    reason = {"absent": "No such file or directory", "folder": "Is a directory", "bytes": "expected text in UTF-8"}[
        kind
    ]
    with pytest.raises(_OwnError) as refused:
        read_text(tmp_path / kind, "the plan", _OwnError)
    assert str(refused.value) == f"{tmp_path / kind}: cannot read the plan: {reason}"


def test_an_error_of_the_parser_names_the_file(tmp_path: Path) -> None:
    def refuses(text: str) -> int:
        raise _OwnError(f"expected a number, got {text!r}")

    file = tmp_path / "a.txt"
    file.write_text("12")
    assert parsed(file, "the plan", _OwnError, int) == 12
    with pytest.raises(_OwnError) as refused:
        parsed(file, "the plan", _OwnError, refuses)
    assert str(refused.value) == f"{file}: expected a number, got '12'"


def test_a_device_without_an_end_is_refused_and_a_pipe_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_file, "MOST_BYTES", 1 << 20)
    with pytest.raises(_OwnError, match=r"^/dev/zero: cannot read the plan: more than 1 MB$"):
        read_text("/dev/zero", "the plan", _OwnError)
    reader, writer = os.pipe()
    os.write(writer, b"a\r\nb")
    os.close(writer)
    assert read_text(f"/dev/fd/{reader}", "the plan", _OwnError) == "a\nb"
    os.close(reader)
