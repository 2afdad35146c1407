"""From a template and its context to formatted source."""

from __future__ import annotations

import shutil
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import jinja2

_TEMPLATES = Path(__file__).parent / "templates"
#: Generated files look the same wherever they are made.
_LINE_LENGTH = "120"
#: The entry of a launch's options that asks the assembler for its best allocation of registers, which releases of Triton
#: differ in; templates write it as ``BEST_ALLOCATION``.
BEST_ALLOCATION = '"ptx_options": "--regAllocOptLevel=4"'


class RenderError(RuntimeError):
    """A template that asks for a name its context lacks, or a result that is not Python: a defect, not bad input."""


class MissingToolError(ValueError):
    """A program that generating needs and that is not installed."""


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.globals["BEST_ALLOCATION"] = BEST_ALLOCATION
    return environment


def render(template: str, context: dict[str, object]) -> str:
    """``template`` (a file of ``codegen/templates``) filled from ``context`` and formatted by ruff.

    Raises RenderError for an undefined name and for text that is not valid Python.
    """
    try:
        text = _environment().get_template(template).render(context)
    except jinja2.TemplateError as error:
        raise RenderError(f"{template}: {error}") from error
    return format_source(text, template)


def format_source(text: str, name: str = "generated source") -> str:
    """``text`` as ruff formats it, whatever configuration surrounds the caller."""
    command = [_ruff(), "format", "--isolated", "--line-length", _LINE_LENGTH, "--target-version", "py311", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RenderError(f"{name}: ruff could not format it: {done.stderr.strip()}")
    return done.stdout


@lru_cache(maxsize=1)
def _ruff() -> str:
    beside = Path(sys.executable).with_name("ruff")
    found = str(beside) if beside.exists() else shutil.which("ruff")
    if found is None:
        raise MissingToolError("formatting generated kernels needs ruff: pip install ruff")
    return found
