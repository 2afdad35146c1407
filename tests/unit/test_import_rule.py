"""Who may import whom, that no imports go in circles, and what must not load before it is used."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.import_graph import arrows, circles, imports, module_of, module_strings, modules
from support.paths import ROOT

_BELOW = {"validation", "emulator", "model", "codegen", "kernels", "base"}
MAY = {
    "base": {"base"},
    "model": {"model", "base"},
    "codegen": {"codegen", "model", "base"},
    "kernels": {"kernels"},
    "emulator": {"emulator", "model", "base"},
    "validation": _BELOW,
    "explore": {"explore", *_BELOW},
    "tilecast": {"tilecast", "explore", *_BELOW},
    "tools": {"tilecast", "explore", *_BELOW},
}
ROOMS = [room for room in MAY if room != "tools"]
#: The rooms that run on a GPU, the two files that compile for one, and the one that takes tensors of torch on a CPU.
_MAY_NEED_TORCH = (
    "kernels",
    "validation",
    "explore",
    "tools",
    "codegen/compiler/assembling.py",
    "codegen/compiler/compile.py",
    "emulator/values/outside.py",
    "emulator/cuda_on_cpu.py",
)
#: Circles that still stand, to be cut: nothing else may be in one, and what is no longer one must go from here.
CIRCLES_LEFT: list[tuple[str, ...]] = []
#: Modules a folder of `model` may hold, `__init__` not counted.
MOST_MODULES = 10

KNOWN = modules(ROOT, ROOMS)


def files(room: str) -> list[Path]:
    if room == "tools":
        return sorted((ROOT / room).rglob("*.py"))
    return [path for path in KNOWN.values() if path.relative_to(ROOT).parts[0] == room]


def room_of(module: str) -> str:
    part = module.split(".")[1:2]
    return part[0] if part and part[0] in MAY else "tilecast"


def faults(path: Path, room: str) -> list[str]:
    """What a file imports and may not."""
    where = path.relative_to(ROOT).as_posix()
    found = []
    for entry in (*imports(path), *module_strings(path, KNOWN)):
        ours = module_of(entry.name, KNOWN)
        if ours is not None and room_of(ours) not in MAY[room]:
            found.append(f"{where}:{entry.line} imports {entry.name}")
        if entry.name.split(".")[0] in ("torch", "triton") and not where.startswith(_MAY_NEED_TORCH):
            found.append(f"{where}:{entry.line} imports {entry.name}")
    return found


@pytest.mark.parametrize("room", MAY)
def test_imports_follow_the_house_rule(room: str) -> None:
    checked = files(room)
    assert checked
    assert [fault for path in checked for fault in faults(path, room)] == []


def test_no_imports_go_in_circles() -> None:
    assert circles(arrows(KNOWN), KNOWN) == sorted(CIRCLES_LEFT)


def test_folders_of_the_model_stay_small() -> None:
    folders = {path.parent for path in files("model")}
    sizes = {folder: sum(p.suffix == ".py" and p.name != "__init__.py" for p in folder.iterdir()) for folder in folders}
    assert {str(folder.relative_to(ROOT)): n for folder, n in sizes.items() if n > MOST_MODULES} == {}


@pytest.mark.parametrize(
    ("room", "line", "allowed"),
    [
        ("model", "import tilecast", False),
        ("model", "from tilecast import Workload", False),
        ("model", "import tilecast.model.kernel.workload", True),
        ("model", "from tilecast.base import files", True),
        ("base", "def f():\n    from tilecast.model import machine", False),
        (
            "codegen",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import tilecast.validation.lab.tuning",
            False,
        ),
        ("emulator", "PLACE = 'tilecast.kernels.generated'", False),
        ("emulator", "import triton", False),
        ("kernels", "from tilecast import kernels", True),
        ("kernels", "from tilecast.base.words import nearest", False),
        ("tools", "import tilecast", True),
    ],
)
def test_the_rule_sees_every_kind_of_import(room: str, line: str, allowed: bool, tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    path = tmp_path / room / "x.py"
    path.parent.mkdir()
    path.write_text(line)
    assert (faults(path, room) == []) is allowed


def test_circles_of_modules_and_of_folders_are_found(tmp_path: Path) -> None:
    """a.one <-> a.two; then folders b and c through two pairs that are no circle of modules; d is a line."""
    written = {
        "r/__init__.py": "",
        "r/a/one.py": "def f():\n    from tilecast.r.a.two import g",
        "r/a/two.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from tilecast.r.a import one",
        "r/b/low.py": "",
        "r/b/high.py": "import tilecast.r.c.low",
        "r/c/low.py": "",
        "r/c/high.py": "from tilecast.r.b.low import x",
        "r/d/errors.py": "",
        "r/d/inner/deep.py": "from tilecast.r.d.errors import E",
        "r/d/top.py": "from tilecast.r.d.inner.deep import y",
    }
    for name, text in written.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    known = modules(tmp_path, ["r"])
    assert circles(arrows(known), known) == [
        ("tilecast.r.a.one", "tilecast.r.a.two"),
        ("tilecast.r.b", "tilecast.r.c"),
    ]


def loaded_after(code: str) -> set[str]:
    script = f"import sys\n{code}\nprint('\\n'.join(sorted(m.split('.')[0] for m in sys.modules)), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    return set(done.stderr.split())


def test_import_works_from_the_folder_above_a_clone(tmp_path: Path) -> None:
    """There, the clone's folder `tilecast` is a namespace package of its own, and must not win."""
    (tmp_path / "tilecast").symlink_to(ROOT)
    code = "import tilecast; print(tilecast.Workload().label())"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("bf16 full attention")


def test_import_tilecast_loads_nothing_heavy() -> None:
    loaded = loaded_after("import tilecast")
    assert "tilecast" in loaded
    assert not loaded & {"numpy", "sympy", "ortools", "torch", "triton", "matplotlib", "networkx", "typer"}


@pytest.mark.parametrize("arguments", [["--help"], ["predict", "--machine", "b200", "--seqlen", "512"]])
def test_command_line_loads_no_solver_sympy_or_torch(arguments: list[str]) -> None:
    loaded = loaded_after(
        "from tilecast.cli import main\n"
        "import contextlib, io\n"
        f"with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()): main({arguments!r})"
    )
    assert "tilecast" in loaded
    assert not loaded & {"sympy", "ortools", "torch", "triton", "matplotlib", "networkx"}
