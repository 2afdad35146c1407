"""The cyclic garbage collector stands still inside the block and is as before after it."""

from __future__ import annotations

import gc

import pytest

from tilecast.base.garbage import no_collections


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
