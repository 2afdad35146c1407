"""A CSV of shapes as workloads.

Columns: batch, heads, heads_kv, seqlen, seqlen_k, head_dim, head_dim_v, causal, window, dtype, preset.  Only seqlen
and either heads and head_dim or a preset are needed; the rest default (batch 1, heads_kv = heads, seqlen_k = seqlen,
head_dim_v = head_dim, causal 0, dtype bf16).  ``window`` is "left,right" quoted, or one number for (n, 0).
"""

from __future__ import annotations

import csv
from pathlib import Path

from tilecast.model.kernel.presets import preset
from tilecast.model.kernel.workload import Workload, WorkloadError

COLUMNS = (
    "batch",
    "heads",
    "heads_kv",
    "seqlen",
    "seqlen_k",
    "head_dim",
    "head_dim_v",
    "causal",
    "window",
    "dtype",
    "preset",
)
_TRUE, _FALSE = ("1", "true", "yes"), ("0", "false", "no", "")


def read_shapes(path: str | Path) -> list[Workload]:
    """Workloads of every row; WorkloadError names file, row (the header is row 1), column, expected and got."""
    file = Path(path)
    try:
        with file.open(newline="", encoding="utf-8-sig") as handle:
            reader = csv.DictReader(handle)
            header = [name.strip() for name in reader.fieldnames or ()]
            unknown = [name for name in header if name not in COLUMNS]
            if not header or "seqlen" not in header or unknown:
                got = f"unknown column '{unknown[0]}'" if unknown else "no 'seqlen' column"
                raise WorkloadError(f"{file.name}: row 1: expected columns out of {', '.join(COLUMNS)}, got {got}")
            out = []
            for row in reader:
                values = {(k or "").strip(): (v or "").strip() if isinstance(v, str) else v for k, v in row.items()}
                try:
                    if None in row or None in row.values():
                        raise WorkloadError(f"expected {len(header)} fields, got a different number")
                    out.append(_workload(values))
                except WorkloadError as error:
                    raise WorkloadError(f"{file.name}: row {reader.line_num}: {error}") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise WorkloadError(f"{path}: cannot read the shapes: {getattr(error, 'strerror', None) or error}") from None
    if not out:
        raise WorkloadError(f"{file.name}: expected at least one row of shapes, got none")
    return out


def _workload(row: dict[str, str]) -> Workload:
    model = preset(row["preset"]) if row.get("preset") else None
    heads = _whole(row, "heads", model.heads_q if model else None)
    dim = _whole(row, "head_dim", model.head_dim_qk if model else None)
    length = _whole(row, "seqlen", model.seqlen if model else None)
    causal = row.get("causal", "").lower()
    if causal not in (*_TRUE, *_FALSE):
        raise WorkloadError(f"column 'causal': expected 0 or 1, got '{row['causal']}'")
    window = parse_window(row.get("window", ""), causal in _TRUE)
    mask = "window" if window else "causal" if causal in _TRUE else "none"
    if model and not row.get("causal") and not window:
        mask, window = model.mask, model.window
    return Workload(
        batch=_whole(row, "batch", 1),
        heads_q=heads,
        # A preset's key/value heads go with its own query heads only.
        heads_kv=_whole(row, "heads_kv", model.heads_kv if model and not row.get("heads") else heads),
        seqlen_q=length,
        seqlen_k=_whole(row, "seqlen_k", length),
        head_dim_qk=dim,
        head_dim_v=_whole(row, "head_dim_v", model.head_dim_v if model and not row.get("head_dim") else dim),
        mask=mask,
        window=window,
        dtype=row.get("dtype") or "bf16",
    )


def _whole(row: dict[str, str], column: str, default: int | None) -> int:
    text = row.get(column, "")
    if not text:
        if default is None:
            raise WorkloadError(f"column '{column}': expected a whole number, got nothing")
        return default
    try:
        return int(text)
    except ValueError:
        raise WorkloadError(f"column '{column}': expected a whole number, got '{text}'") from None


def parse_window(text: str, causal: bool) -> tuple[int, int] | None:
    """(left, right) from "left,right" or "n" (n keys back); with causal the right side is 0."""
    if not text:
        return None
    parts = text.replace(" ", "").split(",")
    try:
        numbers = [int(p) for p in parts]
    except ValueError:
        raise WorkloadError(f"window: expected 'left,right' or one number, got '{text}'") from None
    if len(numbers) == 1:
        numbers.append(0)
    if len(numbers) != 2 or min(numbers) < -1:
        raise WorkloadError(f"window: expected two numbers of at least -1, got '{text}'")
    return numbers[0], 0 if causal else numbers[1]
