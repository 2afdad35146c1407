"""Read a CSV file that a user names: rows by column, one sentence of the caller's own error class when that cannot be done."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tilecast.base.text_file import read_text

Row = dict[str, str]


def read_rows(path: Path, what: str, error: type[Exception]) -> list[Row]:
    """Every row under the header; ``error`` that says ``what`` ("the points") cannot be read, and why."""
    return [row for _, row in numbered_rows(path, what, error)[1]]


def numbered_rows(path: str | Path, what: str, error: type[Exception]) -> tuple[list[str], list[tuple[int, Row]]]:
    """The header, empty for an empty file, and every row under it with the line of the file that it ends on; ``error`` as `read_rows`."""
    # Spreadsheets put a byte order mark first.
    text = read_text(path, what, error).removeprefix("\ufeff")
    try:
        reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
        return list(reader.fieldnames or ()), [(reader.line_num, row) for row in reader]
    except csv.Error as failure:
        raise error(f"{path}: cannot read {what}: {failure}") from None


def miscounted(row: Mapping[Any, Any]) -> str:
    """What is wrong with a row that has more or fewer fields than the header ("expected 4 fields, got 3"); "" where nothing is."""
    # `csv.DictReader` keeps fields beyond the header under None and gives None to columns that the row does not reach.
    columns = [name for name in row if name is not None]
    found = sum(row[name] is not None for name in columns) + len(row.get(None, ()))
    return "" if found == len(columns) else f"expected {len(columns)} fields, got {found}"


def whole_in(row: Row, name: str) -> int:
    """The whole number in a row's column ``name``; ValueError that says what stands there instead."""
    try:
        return int(row[name])
    except (TypeError, ValueError):
        raise ValueError(f"{name}: expected a whole number, got '{row[name]}'") from None


def number_in(row: Row, name: str) -> float:
    """The number in a row's column ``name``; ValueError that says what stands there instead."""
    try:
        return float(row[name])
    except (TypeError, ValueError):
        raise ValueError(f"{name}: expected a number, got '{row[name]}'") from None


def check_whole(path: Path, rows: Sequence[tuple[int, Row]], error: type[Exception]) -> None:
    """``error`` with the line of the first of `numbered_rows` that has more or fewer fields than the header."""
    for number, row in rows:
        wrong = miscounted(row)
        if wrong:
            raise error(f"{path}: line {number}: {wrong}")
