"""The workloads of a specification: tables whose lists cross, presets, and CSV files of shapes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from tilecast.base.words import nearest
from tilecast.explore.sweep.errors import SpecError
from tilecast.model.kernel.presets import preset as find_preset
from tilecast.model.kernel.shapes_csv import parse_window, read_shapes
from tilecast.model.kernel.workload import MASKS, Workload, WorkloadError

_WHOLE = ("batch", "tokens", "heads", "heads_kv", "seqlen", "seqlen_k", "head_dim", "head_dim_v")
_TEXT = ("preset", "mask", "dtype")
FIELDS = (*_TEXT, *_WHOLE, "window", "shapes")
#: Names people know from elsewhere.
_ELSEWHERE = {"causal": 'mask = "causal"', "sequence": "seqlen", "shape": "shapes"}


def read_workloads(where: str, raw: dict[str, Any], folder: Path, most: int) -> tuple[Workload, ...]:
    """Workloads of all ``[[workload]]`` tables in order, each once; SpecError names table, field, expected, got.

    ``most`` bounds how many a table may cross to, before anything is built.
    """
    tables = raw.get("workload")
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise SpecError(
            f"{where}: expected at least one [[workload]] table, got {'none' if tables is None else repr(tables)}"
        )
    found: dict[Workload, None] = {}
    for number, table in enumerate(tables, start=1):
        for workload in _table(f"{where}: workload {number}", table, folder, most):
            found[workload] = None
    return tuple(found)


def _table(where: str, table: dict[str, Any], folder: Path, most: int) -> Iterator[Workload]:
    for field in table:
        if field not in FIELDS:
            known = f"; did you mean {_ELSEWHERE[field]}?" if field in _ELSEWHERE else nearest(field, FIELDS)
            raise SpecError(f"{where}: unknown field '{field}'{known}")
    if "shapes" in table:
        if len(table) > 1 or not isinstance(table["shapes"], str):
            raise SpecError(f"{where}: shapes takes one CSV file, and its columns say the rest, got {table!r}")
        try:
            yield from read_shapes(folder / table["shapes"])
        except WorkloadError as error:
            raise SpecError(f"{where}: {error}") from None
        return
    axes = {field: _values(where, field, table[field]) for field in FIELDS if field in table}
    if "tokens" in axes and "batch" in axes:
        raise SpecError(f"{where}: tokens divides itself among sequences: drop batch")
    if "window" in axes:
        axes.setdefault("mask", ["window"])
    if ("window" in axes) != ("window" in axes.get("mask", [])):
        raise SpecError(f"{where}: mask 'window' and the field window go together, got only one of them")
    count = 1
    for values in axes.values():
        count *= len(values)
    if count > most:
        raise SpecError(f"{where}: crosses to {count} workloads, at most {most} expected: split the sweep")
    for combination in product(*axes.values()):
        chosen = dict(zip(axes, combination, strict=True))
        try:
            yield _workload(chosen)
        except WorkloadError as error:
            raise SpecError(f"{where}: {error}") from None


def _values(where: str, field: str, value: object) -> list[Any]:
    listed = value if isinstance(value, list) else [value]
    if not listed:
        raise SpecError(f"{where}: {field} takes a value or a list of values, got an empty list")
    for one in listed:
        if field in _WHOLE and (isinstance(one, bool) or not isinstance(one, int)):
            raise SpecError(f"{where}: {field} takes whole numbers, got {one!r}")
        if field in _TEXT and not isinstance(one, str):
            raise SpecError(f"{where}: {field} takes text, got {one!r}")
        if field == "mask" and one not in MASKS:
            raise SpecError(f"{where}: mask takes {', '.join(MASKS)}, got '{one}'{nearest(str(one), MASKS)}")
        if field == "window" and (isinstance(one, bool) or not isinstance(one, (int, str))):
            raise SpecError(f"{where}: window takes 'left,right' or one number, got {one!r}")
    return listed


def _workload(chosen: dict[str, Any]) -> Workload:
    """One workload; what a table leaves out comes from its preset, else from the defaults of `tilecast predict`."""
    model = find_preset(chosen["preset"]) if "preset" in chosen else None
    heads = chosen.get("heads", model.heads_q if model else 16)
    # A preset's key/value heads and head_dim_v go with its own query heads and head_dim only.
    shared = chosen.get("heads_kv", model.heads_kv if model and "heads" not in chosen else heads)
    dim = chosen.get("head_dim", model.head_dim_qk if model else 128)
    dim_v = chosen.get("head_dim_v", model.head_dim_v if model and "head_dim" not in chosen else dim)
    length = chosen.get("seqlen", model.seqlen if model else 4096)
    mask = chosen.get("mask", model.mask if model else "none")
    window = model.window if model and "mask" not in chosen else None
    if mask == "window" and "window" in chosen:
        window = parse_window(str(chosen["window"]), False)
    if chosen.get("tokens", 1) < 1 or length < 1:
        raise WorkloadError(f"tokens and seqlen: expected at least 1, got {chosen.get('tokens', 1)} and {length}")
    batch = max(1, chosen["tokens"] // length) if "tokens" in chosen else chosen.get("batch", 1)
    return Workload(
        batch, heads, shared, length, chosen.get("seqlen_k", length), dim, dim_v, mask, window,
        chosen.get("dtype", "bf16"),
    )  # fmt: skip
