"""What ships as a kernel of the Hugging Face Hub: a folder that the `kernels` package loads, with nothing of tilecast installed.

``build/torch-universal`` holds the operator, the calls to serve with and flash-attn's functions (`kernels/engines/flash.py`), all that they
import, and the generated kernels of attention, as plain Python, beside the C of launches.  Imports become relative and operators get a namespace
of their own, named after what the files say, for several versions may be loaded beside each other and beside tilecast.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path

from tilecast.base.files import OutputError, write_text_atomically
from tilecast.codegen.shipping.ship import KERNELS, read_append_list, read_copy_list

VARIANT = "torch-universal"
#: Modules of `kernels/` that a user of the folder calls, and the names of theirs that it gives.
ENTRY = {
    "engines/flash.py": ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"),
    "operator.py": ("attention",),
    "serving/calls.py": ("attention_kvcache", "attention_mla", "attention_varlen"),
    "errors.py": ("AttentionError", "UnsupportedError"),
}
#: What `native/library.py` compiles where it can.
_LAUNCH = "native/launch.c"
#: Of the Hub's versions, which count up where callers must change.
_VERSION = 1
_IMPORT = re.compile(r"^(\s*)from tilecast\.kernels((?:\.\w+)*) import ", re.MULTILINE)
_NAMESPACE = re.compile(r'(Library\(")tilecast(?=")|(torch\.ops\.)tilecast\b|(")tilecast(?=::)')


class HubError(RuntimeError):
    """A module that would not stand on its own in the folder: a defect, not bad input."""


def hub_files(version: str) -> dict[Path, str]:
    """(path in the folder) -> text of everything in it; ``version`` is tilecast's."""
    sources = {path: (KERNELS / path).read_text(encoding="utf-8") for path in _needed()}
    digest = hashlib.sha256()
    for path in sorted(sources):
        digest.update(f"{path}\0{sources[path]}\0".encode())
    name = f"_tilecast_{digest.hexdigest()[:12]}"
    build = Path("build") / VARIANT
    out = {build / path: _standing_alone(path, text, name) for path, text in sources.items()}
    packages = {parent for path in sources for parent in Path(path).parents if str(parent) != "."}
    for package in packages:
        out.setdefault(build / package / "__init__.py", "")
    out[build / "__init__.py"] = _front(version)
    metadata = {
        "id": name, "name": "tilecast", "version": _VERSION, "license": "Apache-2.0", "python-depends": [],
        "backend": {"type": "cuda"},
    }  # fmt: skip
    out[build / "metadata.json"] = json.dumps(metadata, indent=1) + "\n"
    out[Path("README.md")] = _page(version)
    return dict(sorted(out.items()))


def write_hub(folder: Path, version: str) -> int:
    """Write the folder, over what it has of these files; how many there are.  OutputError where nothing can be written."""
    files = hub_files(version)
    for path, text in files.items():
        try:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(
                f"--hub: expected a folder to write to, got {folder}: {error.strerror or error}"
            ) from None
        write_text_atomically(str(folder / path), text)
    return len(files)


def _needed() -> set[str]:
    """Files of `kernels/` that those of `ENTRY` import, wherever in them, and the generated kernels that they find by their index."""
    index = json.loads((KERNELS / "generated" / "index.json").read_text(encoding="utf-8"))
    modules = [row["module"] for row in index] + [kernel.module for kernel in (*read_append_list(), *read_copy_list())]
    found = {
        _LAUNCH,
        "generated/index.json",
        "generated/__init__.py",
        *(f"generated/{module}.py" for module in modules),
    }
    open_files = list(ENTRY)
    while open_files:
        path = open_files.pop()
        if path in found:
            continue
        found.add(path)
        for node in ast.walk(ast.parse((KERNELS / path).read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[:2] == ["tilecast", "kernels"]:
                inside = str(node.module).split(".")[2:]
                open_files += [
                    file for file in _files_of(inside, [alias.name for alias in node.names]) if file not in found
                ]
    return found


def _files_of(inside: list[str], names: list[str]) -> list[str]:
    """Files that ``from tilecast.kernels.<inside> import <names>`` reads: a module, or a package's modules."""
    module = "/".join(inside)
    if inside and (KERNELS / f"{module}.py").is_file():
        return [f"{module}.py"]
    return [str(Path(module) / f"{name}.py") for name in names if (KERNELS / module / f"{name}.py").is_file()]


def _standing_alone(path: str, text: str, name: str) -> str:
    """A file with relative imports, and operators in the namespace ``name``."""
    if not path.endswith(".py") or (path.startswith("generated/")):
        return text
    dots = "." * len(Path(path).parts)
    text = _IMPORT.sub(lambda m: f"{m[1]}from {dots}{m[2][1:]} import ", text)
    text = _NAMESPACE.sub(lambda m: f"{m[1] or m[2] or m[3]}{name}", text)
    text = text.replace('PACKAGE = "tilecast.kernels.generated"', 'PACKAGE = f"{__package__}.generated"')
    for node in ast.walk(ast.parse(text)):
        named = [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
        named += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if any(str(module).partition(".")[0] == "tilecast" for module in named):
            raise HubError(f"{path}: expected imports that become relative, got one of {named[0]}")
    return text


def _front(version: str) -> str:
    """What the folder gives."""
    lines = [f'"""Attention of tilecast {version}: flash-attn\'s functions, and tilecast\'s own."""', ""]
    lines += [
        f"from .{path.removesuffix('.py').replace('/', '.')} import {', '.join(names)}" for path, names in _by_module()
    ]
    names = sorted(name for given in ENTRY.values() for name in given)
    return "\n".join([*lines, "", f"__all__ = {json.dumps(names)}", ""])


def _by_module() -> list[tuple[str, tuple[str, ...]]]:
    return sorted(ENTRY.items())


def _page(version: str) -> str:
    names: Mapping[str, tuple[str, ...]] = ENTRY
    given = ", ".join(f"`{name}`" for path in names for name in names[path])
    return f"""---
license: apache-2.0
tags: [kernels]
---
# tilecast {version}: attention

Kernels in Triton and Gluon for NVIDIA GPUs from Ampere on, as Python; needs torch and Triton 3.6 or newer.

```python
from kernels import get_local_kernel
attention = get_local_kernel(folder)  # of a copy of this repository
out = attention.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, block_table=table, causal=True)
```

It gives {given}. Written by `tilecast ship --hub`.
"""
