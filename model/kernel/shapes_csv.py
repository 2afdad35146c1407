"""A CSV of shapes as workloads.

Columns: batch, heads, heads_kv, seqlen, seqlen_k, head_dim, head_dim_v, causal, window, dtype, preset.  Each may be left
out; defaults are those of the command line (batch 1, heads 16, heads_kv = heads, seqlen 4096, seqlen_k = seqlen, head_dim
128, head_dim_v = head_dim, causal 0, dtype bf16), or the preset's.  ``window`` is "left,right" quoted, or one number for
(n, 0).
"""

from __future__ import annotations

from pathlib import Path

from tilecast.base.csv_file import miscounted, numbered_rows
from tilecast.model.kernel.presets import Preset, preset
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
_COLUMN_OF = {"heads_q": "heads", "seqlen_q": "seqlen", "head_dim_qk": "head_dim"}
_FIELDS = (*COLUMNS, *_COLUMN_OF)
_TRUE, _FALSE = ("1", "true", "yes"), ("0", "false", "no", "")


def read_shapes(path: str | Path) -> list[Workload]:
    """Workloads of every row; WorkloadError names file, row (the header is row 1), column, expected and got."""
    file = Path(path)
    fields, rows = numbered_rows(path, "the shapes", WorkloadError)
    header = [name.strip() for name in fields]
    unknown = [name for name in header if name not in COLUMNS]
    twice = [name for i, name in enumerate(header) if name in header[:i]]
    if not header or twice or unknown:
        got = f"unknown column '{unknown[0]}'" if unknown else f"'{twice[0]}' twice" if twice else "an empty file"
        raise WorkloadError(f"{file.name}: row 1: expected columns out of {', '.join(COLUMNS)}, got {got}")
    out = []
    for line, row in rows:
        values = {(k or "").strip(): (v or "").strip() if isinstance(v, str) else v for k, v in row.items()}
        try:
            if wrong := miscounted(row):
                raise WorkloadError(wrong)
            out.append(_workload(values))
        except WorkloadError as error:
            raise WorkloadError(f"{file.name}: row {line}: {_in_columns(str(error))}") from None
    if not out:
        raise WorkloadError(f"{file.name}: expected at least one row of shapes, got none")
    return out


def _in_columns(sentence: str) -> str:
    """A refusal that begins with a field's name, with the column's name instead."""
    field, colon, rest = sentence.partition(":")
    return f"column '{_COLUMN_OF.get(field, field)}':{rest}" if colon and field in _FIELDS else sentence


def model_heads_kv(model: Preset | None, heads: int) -> int:
    """Key/value heads of ``heads`` query heads: as many share one as in ``model`` (None: one each).

    WorkloadError where they do not divide so.
    """
    if model is None:
        return heads
    group = model.heads_q // model.heads_kv
    if heads > 0 and heads % group:
        raise WorkloadError(
            f"heads: {heads} query heads are no multiple of the {group} that share a key/value head in {model.name}: "
            "give heads_kv too"
        )
    return max(1, heads // group)


def _workload(row: dict[str, str]) -> Workload:
    model = preset(row["preset"]) if row.get("preset") else None
    heads = _whole(row, "heads", model.heads_q if model else 16)
    dim = _whole(row, "head_dim", model.head_dim_qk if model else 128)
    length = _whole(row, "seqlen", model.seqlen if model else 4096)
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
        heads_kv=_whole(row, "heads_kv", None) if row.get("heads_kv") else model_heads_kv(model, heads),
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
    """(left, right) from "left,right" or "n" (n keys back), None from ""; with ``causal`` the right side is 0 (or -1)."""
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
    if causal and numbers[1] > 0:
        raise WorkloadError(
            f"window: causal attention sees no key after the diagonal: expected '{numbers[0]},0', got '{text}'"
        )
    return numbers[0], 0 if causal else numbers[1]
