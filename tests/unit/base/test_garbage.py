"""The cyclic garbage collector stands still inside the block and is as before after it."""

from __future__ import annotations

import gc

import pytest

from tilecast.base.garbage import collect_rarely, no_collections


def test_nothing_is_collected_inside_and_the_collector_is_back_after() -> None:
    assert gc.isenabled()
    with no_collections():
        assert not gc.isenabled()
        with no_collections():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_an_error_does_not_leave_it_off() -> None:
    with pytest.raises(KeyError), no_collections():
        raise KeyError("x")
    assert gc.isenabled()


def test_a_collector_that_its_user_turned_off_stays_off() -> None:
    gc.disable()
    try:
        with no_collections():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_process_may_collect_rarely_and_still_collects() -> None:
    before = gc.get_threshold()
    try:
        gc.set_threshold(700, 10, 10)
        collect_rarely()
        assert gc.get_threshold()[0] > 10_000
        assert gc.isenabled()
        gc.set_threshold(10**6, 30, 10**6)
        collect_rarely()
        assert gc.get_threshold() == (10**6, 30, 10**6)
    finally:
        gc.set_threshold(*before)


def test_what_the_block_made_is_old_after_it_and_what_its_user_froze_stays_frozen() -> None:
    gc.collect(0)
    with no_collections():
        made = [[i] for i in range(5000)]
    assert gc.get_count()[0] < len(made)
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with no_collections():
            made.append([])
        # What nobody holds any longer is gone from there; all of it only when it was unfrozen.
        assert gc.get_freeze_count() > frozen // 2
    finally:
        gc.unfreeze()
