"""Who may import whom, and what must not load before it is used."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT

MAY = {
    "base": {"base"},
    "model": {"model", "base"},
    "codegen": {"codegen", "model", "base"},
    "kernels": {"kernels"},
    "emulator": {"emulator", "model", "base"},
    "validation": {"validation", "emulator", "model", "codegen", "kernels", "base"},
    "explore": {"explore", "validation", "model", "codegen", "kernels", "base"},
    "tilecast": {"tilecast", "explore", "validation", "emulator", "model", "codegen", "kernels", "base"},
}


def imported(path: Path) -> set[str]:
    """Absolute module names a file imports, at any depth; names under TYPE_CHECKING count too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return names


def files() -> list[Path]:
    return [p for folder in MAY for p in sorted((ROOT / folder).rglob("*.py")) if not p.is_symlink()]


@pytest.mark.parametrize("path", files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_follow_the_house_rule(path: Path) -> None:
    folder = path.relative_to(ROOT).parts[0]
    for name in imported(path):
        top, _, rest = name.partition(".")
        if top == "tilecast" and rest:
            part = rest.split(".")[0]
            home = part if part in MAY else "tilecast"
            assert home in MAY[folder], f"{path.name} imports {name}"
        if top in ("torch", "triton"):
            allowed = (
                folder in ("kernels", "emulator", "validation", "explore")
                or path == ROOT / "codegen" / "compiler" / "compile.py"
            )
            assert allowed, f"{path.name} imports {name}"


def loaded_after(code: str) -> set[str]:
    script = f"import sys\n{code}\nprint('\\n'.join(sorted(m.split('.')[0] for m in sys.modules)), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    return set(done.stderr.split())


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
