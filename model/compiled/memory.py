"""Bytes a launch moves: by its SMs, and from and to memory (Q and O once, K and V again whenever L2 has lost them); the share of one SM."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from tilecast.model.compiled.counts import Tile, key_blocks
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.machine.schema import KEYS

#: Share of L2 that keeps K and V for later waves: the two halves of the chip hold copies of what both read.
_KEPT = 0.5
#: Bytes of an element of O, whatever the inputs are.
_OUT = 2


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of one launch: between memory and L2, and between L2 and SMs; and the share of copied K and V from memory."""

    memory_bytes: float
    l2_bytes: float
    missed_share: float


def memory_traffic(work: Workload, waves: Iterable[Sequence[Tile]], rows: int, l2_bytes: float) -> Traffic:
    """What one launch moves through an L2 of ``l2_bytes``.

    The tiles (query block, head) of ``rows`` rows run in ``waves``, each on all SMs at once.
    """
    size = work.dtype_bytes
    per_key = (work.head_dim_qk + work.head_dim_v) * size
    per_query = work.head_dim_qk * size + work.head_dim_v * _OUT
    room = _KEPT * l2_bytes
    #: Head -> bytes of it that were read, and how much all SMs had read before the wave that did.
    last: dict[int, tuple[float, float]] = {}
    passed = 0.0
    once = float(work.batch * work.heads_q * work.seqlen_q * per_query)
    missed = copied = 0.0
    seen = [key_blocks(work, row, rows, 1) for row in range(0, work.seqlen_q, rows)]
    needs = [float(end - first) * per_key for first, end, _, _ in seen]
    size_of_group = work.group_size
    for wave in waves:
        wanted: dict[int, float] = {}
        for block, head in wave:
            group, need = head // size_of_group, needs[block]
            copied += need
            if need > wanted.get(group, 0.0):
                wanted[group] = need
        # Every wave walks its heads side by side and in the same direction, so what one read comes up again when as much
        # has passed through the cache as lies between the two waves' beginnings: all of a head is there, or nothing.
        for group, need in wanted.items():
            have, before = last.get(group, (0.0, passed))
            if passed - before > room:
                have = 0.0
            missed += max(0.0, need - have)
            last[group] = (max(need, have), passed)
        passed += sum(wanted.values()) + len(wave) * rows * per_query
    return Traffic(once + missed, once + copied, min(1.0, missed / copied))


@lru_cache(maxsize=256)
def shared_by(machine: Machine, busy: int, mhz: float) -> Machine:
    """``machine`` as each of ``busy`` SMs at work sees it: the memory, which others leave to it, as fast as its copy engine takes."""
    sms = int(machine["chip.sm_count"])
    if busy >= sms:
        return machine
    engine = machine["tma.bytes_per_clk"] * mhz * 1e6 * sms / 1e12
    rates = {
        key: max(machine[key], min(machine[key] * sms / busy, engine, KEYS[key].high))
        for key in ("hbm.tbps_achieved", "l2.store_tbps")
        if machine.has(key)
    }
    return machine.with_facts(rates)
