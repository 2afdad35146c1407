"""Hints for unknown words."""

from __future__ import annotations

from tilecast.base.words import close_matches, did_you_mean, nearest

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
