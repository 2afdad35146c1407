"""Laps of warpgroups in the order of an attention kernel's step, with and without its producer: what each part of one costs.

    python tools/kernel_laps.py OUT.csv

A lap is S' = Q K^T (A in shared memory), P of the last lap packed, O += P V (A in registers), a wait for S', a quarter of its softmax, a
wait for O, the rest.  Laps follow each other; the second warpgroup begins DISTANCE cycles later.  With "barriers" a warpgroup's four warps
meet after each wait, as Triton has them.  "hands": K and V are awaited at mbarriers and let go at others, which a warp of its own, that has
given its registers away, answers; "copies": it also copies them in, K and V of each lap from L2.  With "turns" a warpgroup multiplies once
the other has issued its products.  Seconds on a Hopper GPU.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass
from itertools import product

from measuring import csv_table
from own_kernels import clock_mhz, kernel_text, machine_codes

from tilecast.validation.lab.calibrate.gpu import Gpu, Launch
from tilecast.validation.lab.calibrate.preludes import wgmma_prelude

ROUNDS, SMEM = 64, 131072
KERNEL = r"""
#define MEET if (BARRIERS) asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
#define SOFT(i)                                                                                  \
  asm volatile("fma.rn.f32 %0, %1, %2, %3;" : "=f"(x[i]) : "f"(y[i]), "f"(k), "f"(m));           \
  asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(x[i]));                                       \
  asm volatile("add.rn.f32 %0, %0, %1;" : "+f"(s[(i) & 3]) : "f"(x[i]));
#define TILE_BYTES (KEYS * REGS * 4)
BENCH(128 * (2 + HANDS)) {
  extern __shared__ __align__(1024) unsigned char smem[];
  __shared__ __align__(8) u64 full[2][STAGES], empty[2][STAGES], turns[2];
  wgmma_fill(smem);
  const u32 base = address(smem);
  const int group = warpgroup_index(), groups = blockDim.x / 128 - HANDS;
#if HANDS
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2 * STAGES; i++) { mbar_init(address(&full[0][i]), 1); mbar_init(address(&empty[0][i]), groups); }
    mbar_init(address(&turns[0]), 1); mbar_init(address(&turns[1]), 1);
    fence_init();
  }
  __syncthreads();
  if (group == groups) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x % 128 == 0)
      for (int r = 0; r < rounds; r++)
        for (int of = 0; of < 2; of++) {
          const int slot = r % STAGES;
          mbar_wait(address(&empty[of][slot]), (r / STAGES + 1) & 1);
#if COPIES
          mbar_expect(address(&full[of][slot]), TILE_BYTES);
          bulk_load(base + B_OFFSET + ((2 * slot + of) * TILE_BYTES) % B_BYTES, data + (r % 32 * 2 + of) * TILE_BYTES, TILE_BYTES, address(&full[of][slot]));
#else
          mbar_arrive(address(&full[of][slot]));
#endif
        }
    record(out, 0, 0);
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
#endif
  float x[KEYS / 2], y[KEYS / 2], o[REGS], s[4] = {0.f, 0.f, 0.f, 0.f};
  u32 p[KEYS / 16][4];
  const float k = 0.1f + rounds * 1e-9f, m = -2.f - rounds * 1e-9f;
#pragma unroll
  for (int i = 0; i < KEYS / 2; i++) { x[i] = 0.f; y[i] = 0.f; }
#pragma unroll
  for (int i = 0; i < REGS; i++) o[i] = 0.f;
#pragma unroll
  for (int i = 0; i < KEYS / 4; i++) p[i / 4][i % 4] = 0;
  i64 first = 0, second = 0;
  // In registers: found anew in each lap they would be waited for.
  u32 thread = threadIdx.x % 128, fulls = address(&full[0][0]), empties = address(&empty[0][0]), turn = address(&turns[0]);
  asm volatile("mov.u32 %0, %0;" : "+r"(thread));
  asm volatile("mov.u32 %0, %0;" : "+r"(fulls));
  asm volatile("mov.u32 %0, %0;" : "+r"(empties));
  asm volatile("mov.u32 %0, %0;" : "+r"(turn));
  const bool speaks = thread == 0;
  asm volatile("bar.sync 5, %0;" ::"r"(128 * groups) : "memory");
  if (TURNS && group && speaks) mbar_arrive(address(&turns[0]));
  if (group) spin(size);
  const i64 begin = clk();
#pragma unroll 1
  for (int r = 0; r < rounds; r++) {
    const int slot = r % STAGES;
    const i64 t0 = clk();
    if (HANDS) mbar_wait(fulls + 8 * slot, (r / STAGES) & 1);
    if (TURNS) mbar_wait(turn + 8 * group, r & 1);
    wgmma_fence();
#pragma unroll
    for (int u = 0; u < REGS / 8; u++) scores(y, p[0], a_step(base, group, u), b_step(base, u), u > 0 ? 1 : rounds >> 30);
    wgmma_commit();
    if (HANDS) mbar_wait(fulls + 8 * (STAGES + slot), (r / STAGES) & 1);
#pragma unroll
    for (int i = 0; i < KEYS / 4; i++)
      asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(p[i / 4][i % 4]) : "f"(x[2 * i]), "f"(x[2 * i + 1]));
    wgmma_fence();
#pragma unroll
    for (int u = 0; u < KEYS / 16; u++) wgmma(o, p[u], 0, b_step(base, u), 1);
    wgmma_commit();
    if (TURNS && speaks) mbar_arrive(turn + 8 - 8 * group);
    wgmma_wait<1>();
    MEET
    if (HANDS && speaks) mbar_arrive(empties + 8 * slot);
    const i64 t1 = clk();
#pragma unroll
    for (int i = 0; i < KEYS / 8; i++) { SOFT(i) }
    wgmma_wait<0>();
    MEET
    if (HANDS && speaks) mbar_arrive(empties + 8 * (STAGES + slot));
    const i64 t2 = clk();
#pragma unroll
    for (int i = KEYS / 8; i < KEYS / 2; i++) { SOFT(i) }
    first += t1 - t0; second += t2 - t1;
  }
  const i64 end = clk();
  float t = s[0] + s[1] + s[2] + s[3];
#pragma unroll
  for (int i = 0; i < KEYS / 2; i++) t += x[i] + y[i];
  keep(out, t);
  wgmma_end(out, o);
  record(out, begin, end, 0, 0, first, second);
}
"""
STARTS = (0, 200, 400, 600, 900)
FIELDS = ("gpu", "date", "driver", "clock_mhz", "keys", "head_dim", "barriers", "hands", "copies", "turns", "warpgroups", "distance",
          "lap_cycles", "scores_cycles", "output_cycles")  # fmt: skip


@dataclass(frozen=True)
class Lap:
    """A kernel: steps of ``keys`` keys, heads of ``head_dim`` columns."""

    keys: int
    head_dim: int
    barriers: bool
    hands: bool = False
    copies: bool = False
    turns: bool = False

    def text(self) -> str:
        """CUDA source."""
        scores = wgmma_prelude(self.keys, "smem")
        scores = (
            scores[scores.index("__device__") :]
            .replace("wgmma(float", "scores(float")
            .replace("REGS", str(self.keys // 2))
        )
        prelude = wgmma_prelude(self.head_dim, "register", trans_b=True) + scores
        defines = {
            "KEYS": self.keys, "STAGES": 256 // self.keys, "BARRIERS": int(self.barriers), "HANDS": int(self.hands),
            "COPIES": int(self.copies), "TURNS": int(self.turns),
        }  # fmt: skip
        return kernel_text(KERNEL, prelude, defines)


def laps() -> list[Lap]:
    """Every kernel: what it does of barriers, hand-overs, copies and turns, each with all before it."""
    steps = ((False,), (True,), (True, True), (True, True, True), (True, True, True, True))
    return [Lap(keys, dim, *what) for keys, dim, what in product((64, 128), (64, 128), steps)]


def launches(lap: Lap) -> list[tuple[int, int]]:
    """(warpgroups, distance): one alone, and two."""
    return [*([(1, 0)] if not lap.turns else []), *((2, distance) for distance in STARTS)]


def main() -> None:
    gpu = Gpu()
    todo = laps()
    codes = machine_codes([lap.text() for lap in todo])
    with csv_table(sys.argv[1], FIELDS) as add:
        for lap, code in zip(todo, codes, strict=True):
            gpu.kernel(lap, code)
            for groups, distance in launches(lap):
                launch = Launch(gpu.identity.sm_count, 128 * (groups + lap.hands), SMEM, size=distance, rounds=ROUNDS)
                runs = [gpu.records(lap, launch)[0][:, : 4 * groups : 4].astype(float).mean(axis=0) for _ in range(4)][
                    1:
                ]
                row: dict[str, object] = {
                    "clock_mhz": clock_mhz(gpu), "keys": lap.keys, "head_dim": lap.head_dim, "barriers": int(lap.barriers),
                    "hands": int(lap.hands), "copies": int(lap.copies), "turns": int(lap.turns), "warpgroups": groups, "distance": distance,
                    "lap_cycles": f"{statistics.median((run[:, 1] - run[:, 0]).mean() for run in runs) / ROUNDS:.1f}",
                    "scores_cycles": f"{statistics.median(run[:, 5].mean() for run in runs) / ROUNDS:.1f}",
                    "output_cycles": f"{statistics.median(run[:, 6].mean() for run in runs) / ROUNDS:.1f}",
                }  # fmt: skip
                add(row)


if __name__ == "__main__":
    main()
