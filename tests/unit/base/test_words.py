"""Hints for unknown words, numbers in few digits, and lines that fit."""

from __future__ import annotations

from tilecast.base.words import close_matches, did_you_mean, fitted, nearest, percent_more, significant

KNOWN = ("causal", "none", "window")


def test_the_nearest_words_are_offered_best_first() -> None:
    assert nearest("casual", KNOWN) == "; did you mean causal?"
    assert did_you_mean("windoe", KNOWN, most=1) == "; did you mean window?"
    assert nearest("tile_k", ("tile_m", "tile_n", "stages")) == "; did you mean tile_n or tile_m?"


def test_without_a_near_word_all_are_named_or_nothing_is_said() -> None:
    assert nearest("zzz", KNOWN) == "; known: causal, none, window"
    assert did_you_mean("zzz", KNOWN) == ""
    assert close_matches(7, KNOWN) == []


def test_known_words_may_come_once() -> None:
    assert nearest("zzz", iter(KNOWN)) == "; known: causal, none, window"


def test_long_lines_go_on_under_the_text_behind_their_label() -> None:
    text = "A title that is too long for the width\n  kernel     fa3 128x64 overlap  (the best of all of them)\n  short"
    assert fitted(text, 39).split("\n") == [
        "A title that is too long for the width",
        "  kernel     fa3 128x64 overlap  (the",
        "             best of all of them)",
        "  short",
    ]
    assert fitted(text, 30).split("\n")[:2] == ["A title that is too long for", "  the width"]
    assert fitted(text, 60) == text


def test_bars_give_way_together_or_not_at_all() -> None:
    first = "  one   60.0%  ██████\n  two    9.0%  █"
    second = "  mufu  ███··  60.0%"
    assert fitted(f"{first}\n\n{second}", 21) == f"{first}\n\n{second}"
    assert fitted(f"{first}\n\n{second}", 20) == f"  one   60.0%\n  two    9.0%\n\n{second}"


def test_numbers_keep_three_digits_and_nothing_has_no_minus() -> None:
    assert [significant(x) for x in (1234.5, 99.96, 1.117, 0.000109)] == ["1234", "100", "1.12", "0.000109"]
    assert [percent_more(x) for x in (0.126, -0.0004, 0.0, -0.5)] == ["+12.6%", "+0.0%", "+0.0%", "-50.0%"]
