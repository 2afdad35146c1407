"""A Python file as a module of its own, wherever it lies."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def module_of(path: str | Path, name: str = "", registered: bool = False, beside: bool = False) -> ModuleType:
    """Run ``path`` as module ``name`` (default: the file's own name).

    registered: it is entered in `sys.modules`, which dataclasses and the like in it ask; beside: it may import files beside it.
    Its bytecode is kept nowhere: no folder appears beside a user's file.
    ImportError for what is no Python file, or ends the program when it is loaded; what else the file raises passes through.
    """
    file = Path(path)
    spec = importlib.util.spec_from_file_location(name or file.stem, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise ImportError(f"{path}: expected a Python file, found none")
    module = importlib.util.module_from_spec(spec)
    if registered:
        sys.modules[spec.name] = module
    if beside:
        sys.path.insert(0, str(file.resolve().parent))
    kept, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        spec.loader.exec_module(module)
    except SystemExit as end:
        raise ImportError(f"{path}: loading it ends the program (exit {end.code})") from None
    finally:
        sys.dont_write_bytecode = kept
        if beside:
            sys.path.pop(0)
    return module
