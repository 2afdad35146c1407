"""Bursts of accesses to shared memory beside matrix products: until a warp has issued them, and until all are through.

    python tools/smem_bursts.py OUT.csv [KIND...]

`tilecast calibrate`'s smem/beside_mma has streams that never end; kernels read LSE and store dS a few at a time.  Warpgroups that
multiply back to back (groups of eight wgmma, two under way), and others that meet, do a burst of 8 bytes a lane and wait some 1,500
cycles: "broadcast" where eight lanes read the same, "conflict" where eight lanes meet in a bank.  After stores a load tells when
they are through.  "poll" asks an mbarrier whose phase is over, "arrive" arrives at one (a lane of each warp) before such a load,
"reload" takes spilled words back, "shuffle" hands registers on, "meet" is a barrier of a warpgroup's four warps; beside "copies" another warp copies from L2 without a pause, "narrow" leaves L1 what the most shared memory of a CTA does.  A minute and a half on a
Hopper GPU.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import product

from measuring import csv_table
from own_kernels import clock_mhz, kernel_text, machine_codes

from tilecast.validation.lab.calibrate.gpu import Gpu, Launch
from tilecast.validation.lab.calibrate.preludes import wgmma_prelude

ROUNDS, GROUPS, LOG = 40, 1000, 1024
SMEM, MOST_SMEM = 131072 + 32768, 218 << 10
KERNEL = r"""
#define LOG 1024
BENCH(128 * (MMA_GROUPS + STREAMS) + 32 * COPIES) {
  extern __shared__ __align__(1024) unsigned char smem[];
  __shared__ u32 log[2][LOG];
  __shared__ __align__(8) u64 over, landed[2];
  __shared__ volatile u32 done;
  const u32 base = address(smem);
  const int group = warpgroup_index();
  wgmma_fill(smem);
  for (int i = threadIdx.x; i < 2 * LOG; i += blockDim.x) (&log[0][0])[i] = 0;
  if (threadIdx.x == 0) {
    mbar_init(address(&over), 1 << 19); mbar_init(address(&landed[0]), 1); mbar_init(address(&landed[1]), 1);
    fence_init();
    done = 0;
  }
  __syncthreads();
  i64 t0 = clk(), issued = 0, through = 0;
  if (group < MMA_GROUPS) {
#if MMA_GROUPS
    float c[REGS]; u32 a[4];
    wgmma_start(c, a, smem);
    for (int r = 0; r < (int)size; r++) {
      wgmma_group<8>(c, a, base, group, rounds >> 30);
      wgmma_wait<1>();
      if (threadIdx.x % 128 == 0) log[group][r] = clk32();
    }
    wgmma_wait<0>();
    wgmma_end(out, c);
#endif
  } else if (group == MMA_GROUPS + STREAMS) {
    // Bulk copies, two under way, as long as the bursts go on.
    if (threadIdx.x % 32 == 0)
      for (int r = 0, last = 0; !last; r++) {
        const u32 bar = address(&landed[r % 2]);
        if (r > 1) mbar_wait(bar, (r / 2 + 1) & 1);
        mbar_expect(bar, 8192);
        bulk_load(base + WGMMA_SMEM + 16384 + r % 2 * 8192, data + r % 64 * 8192, 8192, bar);
        if (r % 2 && (last = done)) { mbar_wait(address(&landed[0]), (r / 2) & 1); mbar_wait(bar, (r / 2) & 1); }
      }
  } else {
    const int lane = threadIdx.x % 32, warp = (threadIdx.x / 32) % 4;
#if BROADCAST
    const u32 at = base + WGMMA_SMEM + (lane % 4) * 8;
#elif CONFLICT
    const u32 at = base + WGMMA_SMEM + warp * 4096 + (lane / 4) * 128 * 2 + (lane % 4) * 8;
#else
    const u32 at = base + WGMMA_SMEM + warp * 4096 + lane * 8;
#endif
    u32 w[2 * BURST], bar = address(&over), z = 0;
    asm volatile("mov.u32 %0, %0;" : "+r"(bar));
#pragma unroll
    for (int i = 0; i < 2 * BURST; i++) w[i] = threadIdx.x + i;
#if LOCAL
    // Words that hold their own addresses, so that the assembler drops no load.
    u32 cells[BURST];
    u64 where;
    asm volatile("cvta.to.local.u64 %0, %1;" : "=l"(where) : "l"(&cells[0]));
#pragma unroll
    for (int i = 0; i < BURST; i++) {
      w[2 * i] = (u32)where + 4 * i;
      asm volatile("st.local.u32 [%0], %0;" ::"r"(w[2 * i]) : "memory");
    }
#endif
    for (int r = 0; r < rounds; r++) {
      spin(1500 + (r * 37) % 128);
      asm volatile("bar.sync 1, %0;" ::"n"(128 * STREAMS) : "memory");
      i64 b = clk();
#pragma unroll
      for (int i = 0; i < BURST; i++) {
        ACCESS(i)
      }
      i64 c1 = clk();
#if BEHIND
      u32 got; asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(got) : "r"(at) : "memory"); z += got;
      if (got == 0x7fffffff) z++;
#endif
#pragma unroll
      for (int i = 0; i < 2 * BURST; i++) z ^= w[i];
      asm volatile("" :: "r"(z) : "memory");
      if (z == 0x7fedcba9u) out[7] = 2;
      i64 d = clk();
      issued += c1 - b; through += d - b;
    }
    keep(out, z);
    done = 1;
  }
  record(out, t0, clk(), 0, 0, issued, through);
  __syncthreads();
  i64* tail = out + RECORD * (i64)gridDim.x * ((blockDim.x + 31) / 32);
  if (blockIdx.x == 0) for (int i = threadIdx.x; i < 2 * LOG; i += blockDim.x) tail[i] = (&log[0][0])[i];
}
"""
#: Kind -> the text of access i of a burst.
TEXTS = {
    "load": 'asm volatile("ld.volatile.shared.v2.u32 {%0, %1}, [%2];" : "=r"(w[2 * i]), "=r"(w[2 * i + 1]) : "r"(at + i * 32) : "memory");',
    "store": 'asm volatile("st.volatile.shared.v2.u32 [%2], {%0, %1};" :: "r"(w[2 * i]), "r"(w[2 * i + 1]), "r"(at + i * 32) : "memory");',
    "poll": 'asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], 1; selp.u32 %0, 1, 2, p; }" : "=r"(w[2 * i]) : "r"(bar) : "memory");',
    "arrive": 'if (lane == 0) mbar_arrive(bar);',
    "reload": 'asm volatile("ld.local.u32 %0, [%0];" : "+r"(w[2 * i]) :: "memory");',
    "shuffle": 'asm volatile("shfl.sync.bfly.b32 %0, %0, 1, 31, -1;" : "+r"(w[2 * i]));',
    "meet": 'asm volatile("bar.sync %0, 128;" ::"r"(group + 2) : "memory");',
}  # fmt: skip
#: Kinds behind which a load tells that they are through.
BEHIND = ("store", "arrive")
#: (kind, pattern), and (warpgroups that multiply, warpgroups that do bursts, n, home of A).
ACCESSES = (("load", "broadcast"), ("load", "plain"), ("store", "plain"), ("store", "conflict"))
BESIDE = (
    (0, 1, 64, "smem"), (1, 1, 64, "smem"), (2, 1, 64, "smem"), (1, 1, 128, "register"), (1, 2, 64, "smem"), (1, 2, 128, "register"),
)  # fmt: skip
BURSTS = (1, 2, 4, 6, 8, 12, 16)
#: What else goes by a warp's registers or waits: a few at a time, beside more products.
OTHERS = (
    ("poll", "plain"), ("arrive", "plain"), ("reload", "plain"), ("reload", "narrow"), ("reload", "copies"), ("reload", "narrow copies"),
    ("shuffle", "plain"), ("meet", "plain"),
)  # fmt: skip
MORE_BESIDE = (
    (0, 1, 64, "smem"), (1, 1, 64, "smem"), (2, 1, 64, "smem"), (1, 1, 128, "smem"), (1, 1, 64, "register"), (1, 1, 128, "register"),
    (2, 1, 128, "register"),
)  # fmt: skip
FIELDS = ("gpu", "date", "driver", "clock_mhz", "kind", "pattern", "mma_warpgroups", "stream_warpgroups", "n", "a", "burst", "issued_cycles",
          "through_cycles")  # fmt: skip


@dataclass(frozen=True)
class Burst:
    """``burst`` accesses of each warp of ``streams`` warpgroups beside ``mma`` that multiply m64 x n, A from ``home``."""

    kind: str
    pattern: str
    mma: int
    streams: int
    n: int
    home: str
    burst: int

    def text(self) -> str:
        """CUDA source."""
        defines = {
            "BURST": self.burst, "ACCESS(i)": TEXTS[self.kind], "BEHIND": int(self.kind in BEHIND),
            "BROADCAST": int(self.pattern == "broadcast"), "CONFLICT": int(self.pattern == "conflict"), "MMA_GROUPS": self.mma,
            "STREAMS": self.streams, "COPIES": int("copies" in self.pattern), "LOCAL": int(self.kind == "reload"),
        }  # fmt: skip
        return kernel_text(KERNEL, wgmma_prelude(self.n, self.home), defines)


def cases() -> list[Burst]:
    """Every access, alone and beside every product, in bursts of every length."""
    usual = product(ACCESSES, BESIDE, BURSTS)
    return [
        Burst(*access, *beside, burst) for access, beside, burst in (*usual, *product(OTHERS, MORE_BESIDE, (1, 2, 4)))
    ]


def main() -> None:
    gpu = Gpu()
    todo = [case for case in cases() if case.kind in sys.argv[2:] or not sys.argv[2:]]
    codes = machine_codes([case.text() for case in todo])
    with csv_table(sys.argv[1], FIELDS) as add:
        for case, code in zip(todo, codes, strict=True):
            gpu.kernel(case, code)
            threads = 128 * (case.mma + case.streams) + 32 * ("copies" in case.pattern)
            smem = MOST_SMEM if "narrow" in case.pattern else SMEM
            launch = Launch(gpu.identity.sm_count, threads, smem, size=GROUPS, rounds=ROUNDS)
            found, _ = gpu.records(case, launch, 2 * LOG)
            issued, through = found[0, 4 * case.mma : 4 * (case.mma + case.streams), 5:7].mean(axis=0) / ROUNDS
            add(
                {"clock_mhz": clock_mhz(gpu), "kind": case.kind, "pattern": case.pattern, "mma_warpgroups": case.mma,
                 "stream_warpgroups": case.streams, "n": case.n, "a": case.home, "burst": case.burst,
                 "issued_cycles": f"{issued:.1f}", "through_cycles": f"{through:.1f}"}
            )  # fmt: skip


if __name__ == "__main__":
    main()
