"""Who imports whom in the checkout, read from the source: imports inside functions and under TYPE_CHECKING count too."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "tilecast"


@dataclass(frozen=True)
class Import:
    """A name that a file imports, or that it hands to something that will (a string that names a module)."""

    name: str
    line: int


def imports(source: Path) -> tuple[Import, ...]:
    """Every absolute name a module imports, each once as the module and once with the name taken from it."""
    return _read(source)[0]


def module_strings(source: Path, known: Mapping[str, Path]) -> Iterator[Import]:
    """String constants that are a module's whole name, such as those given to ``python -m`` or `importlib`."""
    return (entry for entry in _read(source)[1] if entry.name in known)


@functools.cache  # several tests ask about every file, and generated kernels are long
def _read(source: Path) -> tuple[tuple[Import, ...], tuple[Import, ...]]:
    """What a file imports, and its strings that may name a module."""
    imported, strings = [], []
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported += [Import(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{source}:{node.lineno}: relative import"
            imported += [Import(f"{node.module}.{alias.name}", node.lineno) for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(f"{PACKAGE}."):
            strings.append(Import(node.value, node.lineno))
    return tuple(imported), tuple(strings)


def modules(root: Path, rooms: Iterable[str]) -> dict[str, Path]:
    """Import name -> file of every module in the rooms; a package is its ``__init__``."""
    found = {}
    for room in rooms:
        for path in sorted((root / room).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            if any((root / Path(*parts[: n + 1])).is_symlink() for n in range(len(parts))):
                continue  # a room under its import name: the same files again
            parts = parts if parts[0] == PACKAGE else (PACKAGE, *parts)
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def module_of(name: str, known: Mapping[str, Path]) -> str | None:
    """The module of the tree that an imported name is or lies in; None for what is not ours."""
    while name:
        if name in known:
            return name
        name = name.rpartition(".")[0]
    return None


def arrows(known: Mapping[str, Path]) -> set[tuple[str, str]]:
    """(importer, imported) of all modules."""
    found = set()
    for module, path in known.items():
        for entry in imports(path):
            target = module_of(entry.name, known)
            if target is not None and target != module:
                found.add((module, target))
    return found


def circles(found: Iterable[tuple[str, str]], known: Mapping[str, Path]) -> list[tuple[str, ...]]:
    """Circles among the modules and sub-folders of each folder, as import names; a folder stands for all that is in it.

    Two modules that import each other are a circle of the folder both lie in, and so are two folders in one of which
    something imports something of the other, and the other way round.
    """
    levels: dict[str, dict[str, set[str]]] = {}
    for importer, imported in found:
        here, there = _path(importer, known), _path(imported, known)
        shared = next(n for n, (a, b) in enumerate(zip(here, there, strict=False)) if a != b)
        edges = levels.setdefault(".".join(here[:shared]), {})
        edges.setdefault(".".join(here[: shared + 1]), set()).add(".".join(there[: shared + 1]))
    return sorted(circle for edges in levels.values() for circle in _components(edges))


def _path(module: str, known: Mapping[str, Path]) -> list[str]:
    """A module's place; the ``__init__`` of a package is a file of its folder like any other."""
    return [*module.split("."), *(["__init__"] if known[module].name == "__init__.py" else [])]


def _components(edges: Mapping[str, set[str]]) -> Iterator[tuple[str, ...]]:
    """Strongly connected components of more than one node."""
    reached = {node: _reachable(node, edges) for node in edges}
    left = set(edges)
    while left:
        node = left.pop()
        circle = {other for other in reached[node] if other in reached and node in reached[other]}
        left -= circle
        if len(circle) > 1:
            yield tuple(sorted(circle))


def _reachable(start: str, edges: Mapping[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        for node in edges.get(waiting.pop(), ()):
            if node not in seen:
                seen.add(node)
                waiting.append(node)
    return seen
