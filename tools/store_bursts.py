"""Bursts of stores by lanes (O of a tile) from every SM, with pauses between them: how long a warpgroup takes to issue its own.

    python tools/store_bursts.py OUT.csv

A warpgroup stores 16, 32 or 64 KB (16 bytes a lane: rows of 512 bytes), then waits PAUSE cycles, as a kernel that works on the next
tile does; with reads a warp also copies 32 KB from memory in every round.  Seconds on a Hopper GPU.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass
from itertools import product

from measuring import csv_table
from own_kernels import clock_mhz, kernel_text

from tilecast.validation.lab.calibrate.gpu import Gpu, Launch

ROUNDS, FOOTPRINT = 24, 128 << 20
FIELDS = ("gpu", "date", "driver", "clock_mhz", "warpgroups", "stores", "pause", "reads", "megabytes", "smem_bytes", "sms", "burst_cycles",
          "longest_cycles", "round_cycles", "read_cycles")  # fmt: skip
KERNEL = """
#define READ_BYTES 16384
BENCH(128 * GROUPS + 32) {
  extern __shared__ __align__(1024) unsigned char smem[];
  __shared__ __align__(8) u64 bar;
  if (threadIdx.x == 0) { mbar_init(address(&bar), 1); fence_init(); }
  __syncthreads();
  const int group = warpgroup_index();
  const int lane = threadIdx.x % 32, warp = warp_index() % 4;
  i64 spent = 0, longest = 0, t0 = 0, t1 = 0;
  if (group < GROUPS) {
    u32 x = hash(threadIdx.x + (u32)size * 0);
    spin(2000);
    t0 = clk();
    for (int r = 0; r < rounds; r++) {
      const i64 place = ((i64)r * gridDim.x + blockIdx.x) * GROUPS + group;
      char* to = data + (place * STORES * 2048) % size + warp * 512 + lane * 16;
      const i64 a = clk();
#pragma unroll
      for (int j = 0; j < STORES; j++)
        asm volatile("st.global.v4.u32 [%0], {%1, %1, %1, %1};" ::"l"(to + j * 2048), "r"(x) : "memory");
      const i64 b = clk();
      spent += b - a;
      longest = b - a > longest ? b - a : longest;
      spin(PAUSE);
    }
    t1 = clk();
  } else {
#if READS
    if (lane == 0) {
      spin(2000);
      for (int r = 0; r < rounds; r++) {
        const char* from = data + (1ll << 31) + ((i64)r * gridDim.x + blockIdx.x) * 2 * READ_BYTES;
        mbar_expect(address(&bar), 2 * READ_BYTES);
        bulk_load(address(smem), from, READ_BYTES, address(&bar));
        bulk_load(address(smem) + READ_BYTES, from + READ_BYTES, READ_BYTES, address(&bar));
        const i64 a = clk();
        mbar_wait(address(&bar), r & 1);
        spent += clk() - a;
        spin(PAUSE);
      }
    }
#endif
  }
  record(out, t0, t1, 0, 0, spent, longest);
}
"""


@dataclass(frozen=True)
class Burst:
    """One case."""

    groups: int
    pause: int
    reads: int
    stores: int

    def text(self) -> str:
        """The CUDA source."""
        defines = {"GROUPS": self.groups, "PAUSE": self.pause, "READS": self.reads, "STORES": self.stores}
        return kernel_text(KERNEL, "", defines)


def main() -> None:
    gpu = Gpu()
    with csv_table(sys.argv[1], FIELDS) as add:
        for smem in (49152, 204800):
            for groups, stores, reads, pause in product((1, 2), (8, 16, 32), (0, 1), (0, 3000, 12000)):
                case = Burst(groups, pause, reads, stores)
                launch = Launch(
                    gpu.identity.sm_count, 128 * groups + 32, smem, size=FOOTPRINT, rounds=ROUNDS, offset=1 << 20
                )
                seen = [gpu.records(case, launch)[0] for _ in range(4)][1:]
                warps = 4 * groups
                readings = (
                    [float(f[:, :warps, 5].mean()) / ROUNDS for f in seen],
                    [float(f[:, :warps, 6].mean()) for f in seen],
                    [float((f[:, :warps, 1] - f[:, :warps, 0]).mean()) / ROUNDS for f in seen],
                    [float(f[:, warps, 5].mean()) / ROUNDS for f in seen],
                )
                row = {
                    "clock_mhz": clock_mhz(gpu), "warpgroups": groups, "stores": stores, "pause": pause, "reads": reads,
                    "megabytes": FOOTPRINT >> 20, "smem_bytes": smem, "sms": "all",
                }  # fmt: skip
                add(
                    {
                        **row,
                        **{
                            name: f"{statistics.median(values):.1f}"
                            for name, values in zip(FIELDS[-4:], readings, strict=True)
                        },
                    }
                )


if __name__ == "__main__":
    main()
