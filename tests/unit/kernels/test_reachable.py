"""No kernel ships that no problem is given to."""

from __future__ import annotations

from tilecast.kernels.registry import CACHES, COVERED_BY, DTYPES, INDEX, PASSES, candidates, read_index, usable

CAPABILITIES = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1))
#: The oldest release that is supported, and one that compiles every kernel.
RELEASES = ((3, 6), (99, 0))


def reached(family: str = "") -> set[str]:
    """Modules that some device, dtype, head, mask and length is given to where ``family`` goes first."""
    found = set()
    for release in RELEASES:
        known = usable(read_index(INDEX), release, family)
        for direction in PASSES:
            for cache in CACHES:
                some = tuple(entry for entry in known if (entry.direction, entry.cache) == (direction, cache))
                heads = {(entry.head_dim_qk, entry.head_dim_v) for entry in some}
                found |= {
                    module
                    for capability in CAPABILITIES for dtype in DTYPES for mask in COVERED_BY for head in heads
                    for entry in candidates(capability, dtype, *head, mask, some)
                    for module in (entry.module, *(entry.taller or ())[:1])
                }  # fmt: skip
    return found


def test_every_shipped_kernel_is_the_best_for_something() -> None:
    entries = read_index(INDEX)
    asked_for = {entry.family for entry in entries if entry.direction in ("fwd", "serve")}
    met = reached().union(*map(reached, asked_for))
    assert sorted({entry.module for entry in entries} - met) == []


def test_an_entry_behind_a_better_one_is_not_reached() -> None:
    entries = read_index(INDEX)
    one = next(entry for entry in entries if entry.direction == "bwd" and entry.mask == "causal")
    assert [e.module for e in candidates((9, 0), "bf16", one.head_dim_qk, one.head_dim_v, "causal", (one,))]
    from dataclasses import replace

    twin = replace(one, module="twin", preference=one.preference + 1)
    found = candidates((9, 0), "bf16", one.head_dim_qk, one.head_dim_v, "causal", (one, twin))
    assert [e.module for e in found] == ["twin"]
