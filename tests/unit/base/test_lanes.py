"""Bars and axes in characters, against pictures drawn by hand."""

from __future__ import annotations

import pytest

from tilecast.base.lanes import draw_bar, ruler


@pytest.mark.parametrize(
    ("start", "end", "picture"),
    [
        (2, 10, "..[==ab==].."),
        (0, 6, "[=ab=]......"),
        (-3, 6, "<=ab=]......"),
        (6, 15, "......[=ab=>"),
        (-0.4, 6, "[=ab=]......"),
        (6, 12.4, "......[=ab=]"),
        (2, 5, "..[a]......."),
        (2, 4, "..##........"),
        (2, 2.2, "..#........."),
        (-5, -1, "............"),
        (13, 15, "............"),
    ],
)
def test_a_bar(start: float, end: float, picture: str) -> None:
    row = list("." * 12)
    draw_bar(row, start, end, "ab")
    assert "".join(row) == picture


def test_a_long_label_gives_way_to_its_short_form() -> None:
    row = list("." * 8)
    draw_bar(row, 0, 6, "exp0a.1", short="exp0a")
    assert "".join(row) == "[exp0].."


def test_bars_of_no_width_can_be_left_out() -> None:
    row = list("." * 4)
    draw_bar(row, 1, 1.3, "x", least=0)
    assert row == list("....")
    draw_bar(row, 1, 2, "x", least=0, narrow="|")
    assert row == list(".|..")


@pytest.mark.parametrize(
    ("length", "cells", "parts", "text"),
    [
        (2435, 40, 5, " 0       487     974     1461    1948 2435"),
        (10.4, 22, 4, " 0    3     5    8    10"),
    ],
)
def test_a_ruler_spans_the_row_and_its_frame(length: float, cells: int, parts: int, text: str) -> None:
    drawn = ruler(length, cells, parts)
    assert drawn == text
    assert len(drawn) == cells + 2
