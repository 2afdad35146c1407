"""C sources compiled once and kept, and what happens without a compiler."""

from __future__ import annotations

from pathlib import Path

import pytest

from tilecast.base import native
from tilecast.base.native import load_native

SOURCE = "int twice(int n) { return 2 * n; }\n"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    load_native.cache_clear()
    monkeypatch.setenv("TILECAST_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "some.c"
    path.write_text(SOURCE, encoding="utf-8")
    return path


def kept(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache").rglob("*.so"))


def test_a_source_is_compiled_once(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = load_native(source)
    if made is None:
        pytest.skip("no C compiler at hand")
    assert made.twice(21) == 42
    assert len(kept(tmp_path)) == 1
    # What is kept needs no compiler.
    load_native.cache_clear()
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    again = load_native(source)
    assert again is not None and again.twice(4) == 8
    # Another source is another library.
    source.write_text(SOURCE.replace("2 *", "3 *"), encoding="utf-8")
    load_native.cache_clear()
    assert load_native(source) is None


def test_a_compiler_that_fails_is_no_library(source: Path, tmp_path: Path) -> None:
    source.write_text("int broken(\n", encoding="utf-8")
    assert load_native(source) is None
    assert kept(tmp_path) == []


def test_a_damaged_library_is_made_again(source: Path, tmp_path: Path) -> None:
    if load_native(source) is None:
        pytest.skip("no C compiler at hand")
    load_native.cache_clear()
    kept(tmp_path)[0].unlink()
    kept_as = native._kept_as(source)
    kept_as.write_bytes(b"damaged")
    made = load_native(source)
    assert made is not None and made.twice(5) == 10


def test_a_cache_that_cannot_be_written_is_no_failure(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("TILECAST_CACHE", str(tmp_path / "file"))
    assert load_native(source) is None
