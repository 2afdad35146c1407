"""The header of a generated kernel: TILECAST, a literal dict that says which kernel a file is.

It names family, machine, variant and workload, from which the forecast can be made again, so the file needs nothing
beside it.  Code that reads or leaves out a header does it here, without importing the file.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

from tilecast.model.kernel.workload import Workload

_NAME = "TILECAST"
_FIRST_LINE = ("tilecast", "family", "machine", "targets")
#: A header as `header_text` writes it: found so, a file of a thousand lines need not be parsed.
_WRITTEN = re.compile(rf"^{_NAME} = (\{{\n(?:    .*\n)*\}})  # fmt: skip\n", re.MULTILINE)


class HeaderError(ValueError):
    """A text without a header."""


def dims_text(workload: Workload) -> str:
    """Head dimensions as titles of files say them."""
    if workload.head_dim_v == workload.head_dim_qk:
        return f"{workload.head_dim_qk}"
    return f"{workload.head_dim_qk} (queries, keys) and {workload.head_dim_v} (values)"


def header_text(header: Mapping[str, Any]) -> str:
    """The header as a Python assignment: who made it for what on the first line, then one line to each entry."""
    first = [key for key in _FIRST_LINE if key in header]
    groups = [first, *([key] for key in header if key not in first)]
    lines = [", ".join(f"{_literal(key)}: {_literal(header[key])}" for key in group) for group in groups if group]
    return "\n".join([f"{_NAME} = {{", *(f"    {line}," for line in lines), "}  # fmt: skip"])


def _literal(value: Any) -> str:
    """A value of plain types as Python, strings in double quotes."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_literal(key)}: {_literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return json.dumps(value) if isinstance(value, str) else repr(value)


def read_header(text: str, path: object) -> dict[str, Any]:
    """The header of a kernel's source; HeaderError, naming ``path``, where it has none."""
    written = _WRITTEN.search(text)
    node = None if written else _assignment(text)
    literal = written[1] if written else node and node.value
    try:
        found = ast.literal_eval(literal) if literal else None
    except (SyntaxError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise HeaderError(f"{path}: expected a file written by 'tilecast generate', found no {_NAME} header")
    return found


def without_header(text: str) -> str:
    """The source without its header: the same for all workloads that one kernel serves."""
    if written := _WRITTEN.search(text):
        return text[: written.start()] + text[written.end() :]
    node = _assignment(text)
    if node is None or node.end_lineno is None:
        return text
    lines = text.splitlines(keepends=True)
    return "".join(lines[: node.lineno - 1] + lines[node.end_lineno :])


def header_workload(header: Mapping[str, Any]) -> Workload:
    """The workload a kernel was generated for."""
    return Workload.from_dict(dict(header["workload"]))


def header_window(header: Mapping[str, Any]) -> tuple[int, int]:
    """(left, right) keys beside the diagonal that the header's workload sees, -1 for no limit."""
    workload = header["workload"]
    if workload["mask"] == "window":
        left, right = workload["window"]
        return int(left), int(right)
    return (-1, 0) if workload["mask"] == "causal" else (-1, -1)


def _assignment(text: str) -> ast.Assign | None:
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == _NAME:
            return node
    return None
