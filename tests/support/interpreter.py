"""Triton's interpreter, for tests: a process of its own that runs a file's tests marked ``interpreted``, and runs them twice as fast.

TRITON_INTERPRET counts when triton is imported, so what the interpreter runs cannot share a process with what is compiled.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from support.paths import ROOT

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def environment() -> dict[str, str]:
    """Of a process that interprets; BLAS keeps to one thread, the test workers have the other cores.

    Plugins of other packages stay out: with ours pytest would rewrite the assertions of all of tilecast.
    """
    path = [str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    mine = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return {**os.environ, **mine, "PYTHONPATH": os.pathsep.join(path)}


def run_interpreted(file: str, folder: Path) -> list[str]:
    """Names of the tests of ``file`` that ran in the interpreter, all of them without a failure; ``folder`` is for the report."""
    report = folder / "report.xml"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-p", "no:unraisableexception", "-W", "ignore",
         f"--junitxml={report}", str(Path(file).resolve())],
        env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return [case.get("name", "") for case in ElementTree.parse(report).iter("testcase") if case.find("skipped") is None]


def quicken() -> None:
    """Take out of Triton's interpreter three things that cost half its time and decide nothing.

    Each call of a jitted function by another puts the interpreter's operations in place of the language's again, though the
    kernel's own start has put them there; and integer operations are done a second time in 64 bits for an assertion that is
    made only with debugging on, and a table of all types is built for each type that is looked up.  A release whose interpreter is another one is left as it is.
    """
    from triton import language as tl
    from triton.runtime import interpreter

    def known(*names: str) -> bool:
        return all(hasattr(interpreter, name) for name in names)

    if known("interpreter_builder", "InterpreterOptions") and not interpreter.interpreter_builder.options.debug:
        options = interpreter.interpreter_builder.options
        interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
    if known("_get_np_dtype"):
        of, of_element = interpreter._get_np_dtype, cache(interpreter._get_np_dtype)
        interpreter._get_np_dtype = lambda kind: (of if kind.scalar.is_ptr() else of_element)(kind.scalar)
    if not known("_patch_lang", "_LangPatchScope"):
        return
    patch, active = interpreter._patch_lang, set[str]()

    def patch_once(function: Any) -> Any:
        wanted = {value.__name__ for value in function.__globals__.values() if value is tl or value is tl.core}
        if wanted and wanted <= active:
            return interpreter._LangPatchScope()
        scope, before = patch(function), set(active)
        active.update(wanted)
        restore = scope.restore

        def restored() -> None:
            active.intersection_update(before)
            restore()

        scope.restore = restored
        return scope

    interpreter._patch_lang = patch_once
