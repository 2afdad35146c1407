"""How fast the copy engine reads caches of keys as decoding does, and nothing else is done: rates by pages, heads, columns and SMs.

    python tools/h200_reads.py OUT.csv [--rounds 7]

A program to an SM, one warp, copies blocks of 64 tokens of one key head of a cache (pages, page size, heads, columns), bf16, into a ring
in shared memory, box by box of a page and 64 columns, and waits for each before its slot is used again.  Pages are in random order;
programs of a page's heads run side by side.  Nothing multiplies: what is measured is the memory and the copy engine.  Each launch is a
CUDA graph between events, L2 evicted before by reading, medians; `tbps` are the bytes of K over the time beyond that of an empty
launch, `block_cycles` what a program takes for a block at 1980 MHz.  The rows of `h200_reads.csv`.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
from measuring import csv_table, evicting, graph_of, times_us
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

copy_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # its name in Triton 3.6

BLOCK, BOX = 64, 64
MHZ = 1980
#: (page, key heads, columns, blocks in flight, SMs, GB).
POINTS = (
    *((64, heads, 128, slots, 132, 2.0) for heads in (8, 32, 1) for slots in (3, 6, 10)),
    *((page, 8, 128, 6, 132, 2.0) for page in (16, 32)),
    *((page, 8, 128, 6, 132, 0.25) for page in (16, 64)),
    *((page, 8, columns, 6, 132, 2.0) for columns in (64, 80, 96, 256) for page in (16, 64)),
    *((page, 32, columns, 6, 132, 2.0) for columns in (80, 96) for page in (16, 64)),
    *((page, 8, 128, slots, sms, 0.5) for sms in (1, 33, 66) for page in (16, 64) for slots in (4, 10)),
)  # fmt: skip
FIELDS = ("gpu", "date", "driver", "torch", "triton", "page", "heads", "columns", "in_flight", "sms", "megabytes", "us", "low_us", "high_us",
          "empty_us", "tbps", "block_cycles")  # fmt: skip


@gluon.jit
def reading(desc, pages, blocks, heads, PAGE: gl.constexpr, PIECES: gl.constexpr, SLOTS: gl.constexpr):  # noqa: N803
    """Blocks of one head, one after the other."""
    boxes: gl.constexpr = 64 // PAGE
    ring = gl.allocate_shared_memory(desc.dtype, [SLOTS * PIECES * boxes, 1, 1, PAGE, 64], desc.layout)
    bars = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(bars.index(i), count=1)
    fence_async_shared()
    head = gl.program_id(0) % heads
    first = gl.program_id(0) // heads * blocks * boxes
    for n in range(blocks + SLOTS):
        slot = n % SLOTS
        if n >= SLOTS:
            mbarrier.wait(bars.index(slot), (n // SLOTS - 1) & 1)
        if n < blocks:
            mbarrier.expect(bars.index(slot), PIECES * 64 * 64 * 2)
            for box in gl.static_range(boxes):
                page = gl.load(pages + first + n * boxes + box)
                for piece in gl.static_range(PIECES):
                    copy_tile(
                        desc,
                        [page, head, 0, piece * 64],
                        bars.index(slot),
                        ring.index((slot * PIECES + piece) * boxes + box),
                    )


def call_of(cache: Any, blocks: int, slots: int, sms: int) -> Any:
    """A launch in which each of so many programs reads so many blocks."""
    count, page, heads, columns = cache.shape
    box = [1, 1, page, BOX]
    layout = gl.NVMMASharedLayout.get_default_for(box, gl.bfloat16)
    strides = [cache.stride(0), cache.stride(2), cache.stride(1), 1]
    desc = TensorDescriptor(cache, [count, heads, page, columns], strides, box, layout)
    pages = torch.randperm(count, device="cuda").to(torch.int32)
    return lambda: reading[(sms,)](desc, pages, blocks, heads, page, -(-columns // BOX), slots, num_warps=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    evict = evicting()
    one = torch.zeros(1, device="cuda")
    with csv_table(given.out, FIELDS) as add:
        for page, heads, columns, slots, sms, gigabytes in POINTS:
            bytes_of_block = BLOCK * columns * 2
            blocks = int(gigabytes * 1e9 / bytes_of_block / 132)
            boxes = BLOCK // page
            cache = torch.zeros(
                -(-132 // heads) * blocks * boxes, page, heads, columns, device="cuda", dtype=torch.bfloat16
            )
            slots = min(slots, 200_000 // (BLOCK * BOX * 2 * -(-columns // BOX)))
            graphs = {"read": graph_of(call_of(cache, blocks, slots, sms)), "empty": graph_of(lambda: one.zero_())}
            found = times_us(graphs, given.rounds, evict, "reading")
            us, empty = (statistics.median(found[name]) for name in ("read", "empty"))
            read = sms * blocks * bytes_of_block
            row = {
                "page": page, "heads": heads, "columns": columns, "in_flight": slots, "sms": sms, "megabytes": round(read * 1e-6, 1),
                "us": round(us, 2), "low_us": round(min(found["read"]), 2), "high_us": round(max(found["read"]), 2), "empty_us": round(empty, 2),
                "tbps": round(read / (us - empty) * 1e-6, 3), "block_cycles": round((us - empty) * MHZ / blocks, 1),
            }  # fmt: skip
            add(row)
            print(row, flush=True)
            del cache, graphs
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
