"""Public names say what they are: modules, classes, functions and methods of the package and the tools have docstrings."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.paths import ROOT

ROOMS = ("base", "codegen", "emulator", "explore", "kernels", "model", "tilecast", "tools", "validation")
#: Written by templates, of which a test of its own asks for them.
GENERATED = ROOT / "kernels" / "generated"

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def files() -> list[Path]:
    """Python files of all rooms; `tilecast/` holds links to the others."""
    found = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
    return [path for path in found if GENERATED not in path.parents and not path.parent.is_symlink()]


def definitions(
    tree: ast.AST, inside: tuple[ast.ClassDef, ...] = ()
) -> Iterator[tuple[tuple[ast.ClassDef, ...], Definition]]:
    """Every class and function that is not inside a function, with the classes around it."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield inside, node
            yield from definitions(node, (*inside, node))
        elif isinstance(node, Definition):
            yield inside, node
        else:
            yield from definitions(node, inside)


def decorators(node: Definition) -> set[str]:
    return {getattr(one, "attr", getattr(one, "id", "")) for one in node.decorator_list}


def undocumented(trees: dict[str, ast.Module]) -> set[str]:
    """ "file: name" of every public name without a docstring, but for setters, overloads, `main` of a script, and methods that a base documents."""
    known = {
        node.name
        for tree in trees.values()
        for inside, node in definitions(tree)
        if inside and ast.get_docstring(node) is not None
    }
    found = {f"{file}: module" for file, tree in trees.items() if tree.body and ast.get_docstring(tree) is None}
    for file, tree in trees.items():
        for inside, node in definitions(tree):
            names = [one.name for one in (*inside, node)]
            inherited = bool(inside and inside[-1].bases) and node.name in known
            script = file.startswith("tools/") and names == ["main"]
            if (
                any(name.startswith("_") for name in names)
                or decorators(node) & {"setter", "overload"}
                or inherited
                or script
            ):
                continue
            if ast.get_docstring(node) is None:
                found.add(f"{file}: {'.'.join(names)}")
    return found


def test_public_names_have_docstrings() -> None:
    trees = {str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8")) for path in files()}
    assert len(trees) > 500
    assert undocumented(trees) == set()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('"""m"""\ndef f(): ...', {"a.py: f"}),
        ('"""m"""\nclass A:\n    """a"""\n    def f(self): ...', {"a.py: A.f"}),
        (
            '"""m"""\nclass A:\n    """a"""\n    def f(self):\n        """f"""\nclass B(A):\n    """b"""\n    def f(self): ...',
            set(),
        ),
        ('"""m"""\ndef _f(): ...\nclass _A:\n    def f(self): ...', set()),
        ('"""m"""\nif True:\n    def f(): ...', {"a.py: f"}),
        ("x = 1", {"a.py: module"}),
    ],
)
def test_the_rule_finds_what_lacks_one(text: str, found: set[str]) -> None:
    assert undocumented({"a.py": ast.parse(text)}) == found
