"""What the emulator takes for granted of Triton's compiler: which barriers it puts between the warps of a role, and how
it allocates shared memory.  Fails when a release does it in another way."""

from __future__ import annotations

import re
from itertools import groupby

import pytest

pytest.importorskip("triton")

import triton
from support import gluon_kernels as kernels

MEETING = "bar.sync"
#: Instructions that matter, in the order of the text.
_KINDS = re.compile(
    r"\b(bar\.sync|atom\.global|ld\.global|st\.global|ld\.shared|st\.shared|mbarrier\.arrive|tcgen05\.mma|tcgen05\.ld)\b"
)


def between(ptx: str, first: str, second: str) -> list[str]:
    """What stands between the last ``first`` before the last ``second``, and that."""
    found = [kind.group(1) for kind in _KINDS.finditer(ptx)]
    end = len(found) - 1 - found[::-1].index(second)
    while found[end - 1] == second:
        end -= 1
    begin = end - 1 - found[:end][::-1].index(first)
    return found[begin + 1 : end]


@pytest.mark.parametrize("capability", [90, 100])
def test_nothing_orders_warps_that_meet_in_global_memory(capability: int) -> None:
    ptx = kernels.compiled(kernels.through_global_memory, capability).asm["ptx"]
    assert MEETING not in ptx


def test_an_atomic_that_releases_waits_for_the_other_warps_since_3_9() -> None:
    meets = between(kernels.compiled(kernels.counts_itself_in, 90).asm["ptx"], "st.global", "atom.global") == [MEETING]
    release = tuple(int(n) for n in triton.__version__.split(".")[:2])
    assert meets == (release >= (3, 9)) or (3, 6) < release < (3, 9)


def test_shared_memory_and_arrivals_are_ordered() -> None:
    assert between(kernels.compiled(kernels.through_shared_memory, 90).asm["ptx"], "st.shared", "ld.shared") == [
        MEETING
    ]
    arrivals = kernels.compiled(kernels.arrivals, 90).asm["ptx"]
    assert between(arrivals, "ld.global", "mbarrier.arrive")[-1] == MEETING


def test_shared_memory_is_ordered_whichever_threads_have_the_elements() -> None:
    ptx = kernels.compiled(kernels.in_place_in_shared_memory, 90).asm["ptx"]
    kinds = [kind.group(1) for kind in _KINDS.finditer(ptx)]
    in_order = [kind for kind, _ in groupby(kind for kind in kinds if kind in {"st.shared", "ld.shared", MEETING})]
    assert in_order == ["st.shared", MEETING, "ld.shared", MEETING, "st.shared", MEETING, "ld.shared"]


def test_a_product_waits_for_loads_of_what_it_overwrites_since_3_9() -> None:
    ptx = kernels.compiled(kernels.overwritten_by_a_product, 100).asm["ptx"]
    first_load = ptx.index("tcgen05.ld")
    found = [kind.group(1) for kind in _KINDS.finditer(ptx[first_load:])]
    meets = MEETING in found[: found.index("tcgen05.mma")]
    release = tuple(int(n) for n in triton.__version__.split(".")[:2])
    assert meets == (release >= (3, 9)) or (3, 6) < release < (3, 9)


def test_shared_memory_is_allocated_by_liveness() -> None:
    assert kernels.compiled(kernels.one_after_the_other, 90).metadata.shared == 64 * 64 * 2
    assert kernels.compiled(kernels.at_the_same_time, 90).metadata.shared == 2 * 64 * 64 * 2
