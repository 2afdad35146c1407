"""Results are written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tilecast.base.files import OutputError, cache_folder, check_writable, write_bytes_atomically, write_text_atomically


class OtherError(ValueError):
    pass


def test_write_is_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "out.json"
    write_text_atomically(target, "first")
    assert target.read_text() == "first"

    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for step in ("replace", "fsync"):
        with monkeypatch.context() as broken:
            broken.setattr(os, step, full_disk)
            with pytest.raises(OutputError, match=r"out.json: cannot write: No space left on device"):
                write_text_atomically(target, "second")
        assert target.read_text() == "first"
        assert list(tmp_path.iterdir()) == [target]


def test_bytes_and_text_arrive_as_given(tmp_path: Path) -> None:
    write_bytes_atomically(tmp_path / "b", b"\r\n\x00\xff")
    write_text_atomically(tmp_path / "t", "µ\r\n")
    assert (tmp_path / "b").read_bytes() == b"\r\n\x00\xff"
    assert (tmp_path / "t").read_bytes() == b"\xc2\xb5\r\n"


def test_writing_keeps_the_usual_permissions(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("")
    write_text_atomically(tmp_path / "out", "")
    assert (tmp_path / "out").stat().st_mode == plain.stat().st_mode


def test_the_caller_chooses_the_error(tmp_path: Path) -> None:
    for name, sentence in (("", "expected a file name, got a folder"), ("none/x", "folder .*none does not exist")):
        with pytest.raises(OtherError, match=sentence):
            write_text_atomically(tmp_path / name, "text", OtherError)
        with pytest.raises(OutputError, match=sentence):
            check_writable(tmp_path / name)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_no_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(OutputError, match="no permission"):
        check_writable(tmp_path / "out")


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("TILECAST_CACHE", raising=False)
    assert cache_folder("a") == tmp_path / "xdg" / "tilecast" / "a"
    monkeypatch.setenv("TILECAST_CACHE", str(tmp_path / "own"))
    assert cache_folder("a") == tmp_path / "own" / "tilecast" / "a"


def test_a_link_stays_and_a_pipe_is_written_to(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    write_text_atomically(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_text_atomically(tmp_path / "pipe", "through")
    assert os.read(reader, 100) == b"through"
    os.close(reader)
    assert (tmp_path / "pipe").is_fifo()


def test_a_circle_of_links_and_a_name_too_long_are_refused(tmp_path: Path) -> None:
    (tmp_path / "circle").symlink_to("circle")
    for name in ("circle", "x" * 300):
        with pytest.raises(OutputError, match=r"cannot write: (Too many levels of symbolic links|File name too long)"):
            write_text_atomically(tmp_path / name, "text")
    assert [path.name for path in tmp_path.iterdir()] == ["circle"]
