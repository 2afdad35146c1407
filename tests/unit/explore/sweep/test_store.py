"""The store of a sweep: what it keeps, and what happens when it cannot."""

from __future__ import annotations

import resource
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from tilecast.cli import main
from tilecast.explore.sweep.errors import StoreError
from tilecast.explore.sweep.run import store as stores
from tilecast.explore.sweep.run.store import SCHEMA, Store

OK = {"status": "ok", "reason": "", "time_ms": 1.5}
SPEC = 'machines = ["a100"]\ninterval = false\n[[workload]]\nbatch = [{batches}]\nseqlen = 1024\n'


def spec(folder: Path, batches: int) -> Path:
    path = folder / "spec.toml"
    path.write_text(SPEC.format(batches=", ".join(map(str, range(1, batches + 1)))), encoding="utf-8")
    return path


def command(*arguments: object, limit_bytes: int = 0) -> subprocess.CompletedProcess[str]:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))

    return subprocess.run(
        [sys.executable, "-m", "tilecast.cli", "sweep", *map(str, arguments)], capture_output=True, text=True,
        check=False, preexec_fn=limit if limit_bytes else None,
    )  # fmt: skip


def refusal(path: Path, *, write: bool = True) -> str:
    with pytest.raises(StoreError) as caught:
        Store(path, write=write)
    sentence = str(caught.value)
    assert sentence.startswith(f"{path}: ") and "\n" not in sentence
    return sentence


def test_results_come_back_as_they_went_in_also_while_another_reads(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    with Store(path) as store:
        store.begin([("sha", {"name": "m"})], ("0.1", "hash", "command", 2, 0))
        store.put("a" * 64, '{"x":1}', OK, 0.25)
        with Store(path, write=False) as reader:
            assert reader.known(["a" * 64, "b" * 64]) == {"a" * 64: "ok"}
        store.put("b" * 64, '{"x":2}', {"status": "failed", "reason": "é"}, 0.5)
        store.put("b" * 64, '{"x":2}', {"status": "infeasible", "reason": "é"}, 0.5)
    with Store(path, write=False) as reader:
        found = reader.get([*(f"{n:064d}" for n in range(1200)), "b" * 64, "a" * 64])
        assert found["a" * 64].fields() == OK and found["a" * 64].seconds == 0.25
        assert found["b" * 64].fields() == {"status": "infeasible", "reason": "é"} and len(found) == 2
    with Store(None) as memory:
        memory.put("a" * 64, "{}", OK, 0.0)
        assert memory.known(["a" * 64]) == {"a" * 64: "ok"}


def test_files_that_are_no_store_are_refused_and_left_alone(tmp_path: Path) -> None:
    text = tmp_path / "text.db"
    text.write_text("a shopping list, longer than a header of SQLite is, and then some more of it\n" * 20)
    before = text.read_bytes()
    assert "damaged or not a sweep store" in refusal(text)
    assert text.read_bytes() == before
    other = tmp_path / "other.db"
    with sqlite3.connect(other) as base:
        base.execute("CREATE TABLE recipes (name TEXT)")
    base.close()
    assert "not a sweep store" in refusal(other)
    assert "expected a file for the store, got a folder" in refusal(tmp_path)
    assert "folder" in refusal(tmp_path / "none" / "s.db")
    assert "no such store" in refusal(tmp_path / "s.db", write=False)
    assert not (tmp_path / "s.db").exists()


def test_a_store_of_a_newer_tilecast_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    Store(path).close()
    with sqlite3.connect(path) as base:
        base.execute(f"PRAGMA user_version={SCHEMA + 1}")
    base.close()
    assert f"schema {SCHEMA + 1}, expected {SCHEMA}" in refusal(path)


def test_a_damaged_store_is_refused_wherever_the_damage_is(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    with Store(path) as store:
        for n in range(400):
            store.put(f"{n:064d}", "{}", OK, 0.0)
    whole = path.read_bytes()
    path.write_bytes(whole[:4096] + b"\xff" * 8192 + whole[12288:])
    with pytest.raises(StoreError, match=r"s.db: (damaged|cannot be used)"), Store(path) as store:
        store.known(f"{n:064d}" for n in range(400))
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(StoreError, match=r"s.db: (damaged|cannot be used)"), Store(path) as store:
        store.known(f"{n:064d}" for n in range(400))


def test_two_sweeps_do_not_write_to_one_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s.db"
    with Store(path) as store:
        assert "another sweep is writing to it" in refusal(path)
        store.put("a" * 64, "{}", OK, 0.0)
    with Store(path) as store:
        assert store.known(["a" * 64])
    # A program that knows nothing of our lock.
    monkeypatch.setattr(stores, "_PATIENCE_S", 0.05)
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    try:
        with Store(path) as store, pytest.raises(StoreError, match="locked by another program"):
            store.put("b" * 64, "{}", OK, 0.0)
    finally:
        holder.close()


def test_no_lock_file_stays(tmp_path: Path) -> None:
    path, text = tmp_path / "s.db", tmp_path / "notadb"
    with Store(path) as store:
        store.put("a" * 64, "{}", OK, 0.0)
        assert (tmp_path / "s.db.lock").exists()
    text.write_text("a file of something else", encoding="utf-8")
    assert "notadb" in refusal(text)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["notadb", "s.db"]
    # What a killed sweep leaves locks nothing.
    (tmp_path / "s.db.lock").touch()
    with Store(path) as store:
        assert store.known(["a" * 64])
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["notadb", "s.db"]


def test_a_full_disk_and_a_store_that_turned_read_only_say_so(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    with Store(path) as store:
        store.put("a" * 64, "{}", OK, 0.0)
        # What SQLite answers when the disk is full, from SQLite itself.
        store._base.execute("PRAGMA max_page_count=12")
        with pytest.raises(StoreError, match=r"s.db: the disk is full: results so far are kept"):
            for n in range(200):
                store.put(f"{n:064d}", "{}", {**OK, "reason": "long " * 200}, 0.0)
    with Store(path) as store:
        assert store.known(["a" * 64, f"{0:064d}"]).keys() == {"a" * 64, f"{0:064d}"}
        store._base.execute("PRAGMA query_only=1")
        with pytest.raises(StoreError, match="cannot be opened for writing"):
            store.put("c" * 64, "{}", OK, 0.0)


def test_a_disk_that_fills_in_the_middle_loses_nothing_that_was_kept(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    wanted = spec(tmp_path, 40)
    full = command(wanted, "--store", path, "--workers", 1, limit_bytes=90_000)
    assert full.returncode == 2 and full.stdout == ""
    sentence = full.stderr.splitlines()[-1]
    assert sentence.startswith(f"tilecast: {path}: ") and "results so far are kept" in sentence
    assert "Traceback" not in full.stderr
    with Store(path, write=False) as store:
        kept = store._base.execute("SELECT count(*) FROM results").fetchone()[0]
    assert 0 < kept < 40
    after = command(wanted, "--store", path, "--workers", 1)
    assert after.returncode == 0 and f"40 items: {kept} from the store, {40 - kept} computed" in after.stdout


def test_no_store_is_left_where_none_could_be_made(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    full = command(spec(tmp_path, 2), "--store", path, limit_bytes=2048)
    assert full.returncode == 2 and full.stderr.startswith(f"tilecast: {path}: ") and full.stderr.count("\n") == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["spec.toml"]


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--engine", "slurm"], ("engine", "local or ray", "'slurm'")),
        (["--ray-address", "auto"], ("ray_address", "engine ray")),
        (["--export", "t.xlsx"], ("--export", ".parquet", "'t.xlsx'")),
        (["--export", "none/t.csv"], ("none/t.csv", "does not exist")),
        (["--no-run"], ("s.db", "no such store")),
    ],
)
def test_wrong_options_are_refused_before_anything_is_written(
    arguments: list[str], parts: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    wanted = spec(tmp_path, 2)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(["sweep", str(wanted), "--store", "s.db", *arguments])
    out, err = capsys.readouterr()
    assert end.value.code == 2 and out == "" and err.count("\n") == 1
    for part in parts:
        assert part in err
    assert [entry.name for entry in tmp_path.iterdir()] == ["spec.toml"]


def test_a_wrong_specification_makes_no_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "spec.toml"
    bad.write_text('machines = ["b200"]\n[[workload]]\nseqln = 1\n', encoding="utf-8")
    with pytest.raises(SystemExit) as end:
        main(["sweep", str(bad), "--store", str(tmp_path / "s.db")])
    assert end.value.code == 2
    assert "unknown field 'seqln'" in capsys.readouterr().err
    assert [entry.name for entry in tmp_path.iterdir()] == ["spec.toml"]
