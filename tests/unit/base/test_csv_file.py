"""CSV files that users name: rows by column, and one sentence of the caller's own class for what is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tilecast.base.csv_file import check_whole, numbered_rows, read_rows


class _OwnError(ValueError):
    pass


def test_rows_come_by_column_with_line_breaks_inside_quotes(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text('id,said\n1,"two\nlines"\n2,\n', encoding="utf-8")
    assert read_rows(file, "the table", _OwnError) == [{"id": "1", "said": "two\nlines"}, {"id": "2", "said": ""}]
    check_whole(file, numbered_rows(file, "the table", _OwnError)[1], _OwnError)


@pytest.mark.parametrize(("line", "fields"), [("3", 1), ("3,4,5", 3)])
def test_a_row_with_other_fields_than_the_header_is_refused_with_its_line(
    line: str, fields: int, tmp_path: Path
) -> None:
    file = tmp_path / "a.csv"
    file.write_text(f"id,said\n1,2\n{line}\n", encoding="utf-8")
    with pytest.raises(_OwnError, match=rf"^{file}: line 3: expected 2 fields, got {fields}$"):
        check_whole(file, numbered_rows(file, "the table", _OwnError)[1], _OwnError)
    # The line that an editor shows: empty lines and line breaks inside quotes count.
    file.write_text(f'id,said\n\n1,"a\nb"\n{line}\n', encoding="utf-8")
    with pytest.raises(_OwnError, match=rf"^{file}: line 5: expected 2 fields, got {fields}$"):
        check_whole(file, numbered_rows(file, "the table", _OwnError)[1], _OwnError)


def test_what_is_no_csv_is_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text('id\n"' + "x" * 200_000 + '"\n', encoding="utf-8")
    with pytest.raises(_OwnError, match="cannot read the table: field larger than field limit"):
        read_rows(file, "the table", _OwnError)
    with pytest.raises(_OwnError, match="cannot read the table: No such file"):
        read_rows(tmp_path / "none.csv", "the table", _OwnError)
    file.write_text('id\n"1\n', encoding="utf-8")
    with pytest.raises(_OwnError, match="cannot read the table: unexpected end of data"):
        read_rows(file, "the table", _OwnError)


def test_rows_carry_their_line_and_a_byte_order_mark_is_none_of_the_header(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text('\ufeffid,said\n1,"two\nlines"\n\n2,x\n', encoding="utf-8")
    assert numbered_rows(file, "the table", _OwnError) == (
        ["id", "said"],
        [(3, {"id": "1", "said": "two\nlines"}), (5, {"id": "2", "said": "x"})],
    )
    file.write_text("")
    assert numbered_rows(file, "the table", _OwnError) == ([], [])
