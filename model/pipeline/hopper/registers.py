"""What registers cost Hopper's forward kernels that ask for more than a thread has: spills, before anything is compiled.

A kernel of so many warps is compiled for as many registers a thread as the file holds for all of them.  S, P and O of a
warpgroup stay in registers, beside values of more keys; what does not fit is stored to L2 in every step and read again.  Counted
in the machine code of generated kernels: 85 words a step and thread with two warpgroups and 256 keys (the rule: 94), 59 to 67
with one (86), 15 to 21 with three and 128 keys (13), 3 to 6 with two, 128 keys and head_dim 128 (5), none of head_dim 256 (8).
E4m3 kernels that add a block's product to O before S is made spill none where they can be written: 128 and 256 keys, head_dim 64, 128 and 256.
"""

from __future__ import annotations

from tilecast.model.kernel.variants.fa3 import CONSUMER_REGISTERS, Fa3Variant, registers, written_registers
from tilecast.model.kernel.workload import Workload
from tilecast.model.machine.machine import Machine
from tilecast.model.pipeline.hopper.order import adds_first

#: Keys for each of which a loop holds a fifth of a register beside S, P and O are those beyond 64; the most that Triton gives a thread.
_FREE_KEYS, _OF_A_KEY, _MOST = 64, 0.2, 240
#: Bytes of a word of all threads of a warpgroup.
_WORD = 512


def spilled_words(w: Workload, v: Fa3Variant, m: Machine) -> float:
    """Words a thread spills in a step."""
    if _by_hand(w, v) or adds_first(w, v):
        return 0.0
    threads = 128 * (v.warpgroups + 1)  # a warpgroup's worth of warps copy
    given = min(_MOST, int(m["reg.file_bytes"]) // 4 // threads // 8 * 8)
    # A warpgroup alone packs P only behind the next QK, as compiled; the others before it where registers are short.
    p = v.tile_n / (2 if v.warpgroups == 1 else 4)
    others = _OF_A_KEY * max(0, v.tile_n - _FREE_KEYS)
    return max(0.0, v.tile_n / 2 + p + w.head_dim_v / 2 + others - given)


def _by_hand(w: Workload, v: Fa3Variant) -> bool:
    """Whether it is one of FlashAttention-3's own kernels, which hand consumers the registers of producers and spill none.

    Their tiles are no powers of two, or their e4m3 products, added to O by the matrix unit, fit where Triton's, added to it outside, do not.
    """
    if v.tile_n & (v.tile_n - 1):
        return True
    limit = CONSUMER_REGISTERS[v.warpgroups]
    return w.dtype == "fp8" and registers(v, w) <= limit < written_registers(v, w)


def spill_demand(w: Workload, v: Fa3Variant, m: Machine) -> tuple[tuple[str, float], ...]:
    """(unit, cycles) pairs of a step's spilled words of a warpgroup, one after the other; empty where they hold nothing up."""
    words = spilled_words(w, v, m)
    # So many of all warpgroups wait in a queue.
    waiting = max(0.0, words - m.get("local.store_queue_depth", 0.0) / v.warpgroups)
    if not waiting:
        return ()
    bytes_per_clk = m.bytes_per_clk(m.get("l2.store_tbps", m["hbm.tbps_achieved"]), m.rated_mhz)
    # Stored and read again through the port of shared memory and L1.
    return ("memory", waiting * _WORD / bytes_per_clk), ("smem", 2 * words * _WORD / m["smem.bytes_per_clk"])
