"""The progress screen: what a log gets, and when."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tilecast.cli import progress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The time that the screen sees, in seconds; stderr is no terminal."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    yield now


def test_a_short_stage_says_nothing(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with progress.Screen() as screen:
        screen("forecasts", 0, 2)
        clock[0] += 1.9
        screen("forecasts", 2, 2)
    assert capsys.readouterr().err == ""


def test_a_long_stage_tells_its_share_every_ten_seconds_and_its_end(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with progress.Screen() as screen:
        screen("profile", 0, 40)
        for done in range(1, 41):
            clock[0] += 1.0
            screen("profile", done, 40, f"kernel {done}")
    assert capsys.readouterr().err.splitlines() == [
        "profile: 2 of 40 (5%), about 38 s left: kernel 2",
        "profile: 12 of 40 (30%), about 28 s left: kernel 12",
        "profile: 22 of 40 (55%), about 18 s left: kernel 22",
        "profile: 32 of 40 (80%), about 8 s left: kernel 32",
        "profile: 40 of 40 (100%): kernel 40",
    ]


def test_stages_have_clocks_of_their_own(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with progress.Screen() as screen:
        screen("compile", 0, 0, "one.py")
        clock[0] += 3.0
        screen("compile", 0, 0, "two.py")
        screen("time", 0, 4)
        clock[0] += 1.0
        screen("time", 1, 4)
    assert capsys.readouterr().err == "compile: two.py\n"


@pytest.mark.parametrize(("seconds", "words"), [(0.4, "0 s"), (99.4, "99 s"), (100.0, "2 min"), (3600.0, "60 min")])
def test_durations_in_words(seconds: float, words: str) -> None:
    assert progress.in_words(seconds) == words
