"""Laps of two warpgroups in the order of an attention kernel's step, without its copies: what each part of one costs.

    python tools/kernel_laps.py OUT.csv

A lap is S' = Q K^T (A in shared memory), P of the last lap packed, O += P V (A in registers), a wait for S', a quarter of its softmax, a
wait for O, the rest.  Laps follow each other; the second warpgroup begins DISTANCE cycles later.  With "barriers" its four warps meet after
each wait, as Triton has them; with "transposed" V's rows are keys, as they are in a kernel.  Seconds on a Hopper GPU.
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
#define SOFT(x, i)                                                                               \
  asm volatile("fma.rn.f32 %0, %0, %1, %2;" : "+f"(x[i]) : "f"(k), "f"(m));                      \
  asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(x[i]));                                       \
  asm volatile("add.rn.f32 %0, %0, %1;" : "+f"(s[(i) & 3]) : "f"(x[i]));
#define LAP(a, b)                                                                                \
  {                                                                                              \
    const i64 t0 = clk();                                                                        \
    wgmma_fence();                                                                               \
    _Pragma("unroll") for (int u = 0; u < REGS / 8; u++)                                         \
        scores(b, p[0], a_step(base, group, u), b_step(base, u), u > 0 ? 1 : rounds >> 30);      \
    wgmma_commit();                                                                              \
    _Pragma("unroll") for (int i = 0; i < KEYS / 4; i++)                                         \
        asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(p[i / 4][i % 4]) : "f"(a[2 * i]), "f"(a[2 * i + 1])); \
    wgmma_fence();                                                                               \
    _Pragma("unroll") for (int u = 0; u < KEYS / 16; u++) wgmma(o, p[u], 0, b_step(base, u), 1); \
    wgmma_commit();                                                                              \
    wgmma_wait<1>();                                                                             \
    MEET                                                                                         \
    const i64 t1 = clk();                                                                        \
    _Pragma("unroll") for (int i = 0; i < KEYS / 8; i++) { SOFT(b, i) }                          \
    wgmma_wait<0>();                                                                             \
    MEET                                                                                         \
    const i64 t2 = clk();                                                                        \
    _Pragma("unroll") for (int i = KEYS / 8; i < KEYS / 2; i++) { SOFT(b, i) }                   \
    first += t1 - t0; second += t2 - t1;                                                         \
  }
BENCH(256) {
  extern __shared__ __align__(1024) unsigned char smem[];
  wgmma_fill(smem);
  float x[KEYS / 2], y[KEYS / 2], o[REGS], s[4] = {0.f, 0.f, 0.f, 0.f};
  u32 p[KEYS / 16][4];
  const float k = 0.1f + rounds * 1e-9f, m = -2.f - rounds * 1e-9f;
  const u32 base = address(smem);
  const int group = warpgroup_index();
#pragma unroll
  for (int i = 0; i < KEYS / 2; i++) { x[i] = 0.f; y[i] = 0.f; }
#pragma unroll
  for (int i = 0; i < REGS; i++) o[i] = 0.f;
#pragma unroll
  for (int i = 0; i < KEYS / 4; i++) p[i / 4][i % 4] = 0;
  i64 first = 0, second = 0;
  __syncthreads();
  if (group) spin(size);
  const i64 begin = clk();
#pragma unroll 1
  for (int r = 0; r < rounds; r += 2) { LAP(x, y) LAP(y, x) }
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
FIELDS = ("gpu", "date", "driver", "clock_mhz", "keys", "head_dim", "barriers", "transposed", "warpgroups", "distance", "lap_cycles",
          "scores_cycles", "output_cycles")  # fmt: skip


@dataclass(frozen=True)
class Lap:
    """A kernel: steps of ``keys`` keys, heads of ``head_dim`` columns."""

    keys: int
    head_dim: int
    barriers: bool
    transposed: bool

    def text(self) -> str:
        """CUDA source."""
        scores = wgmma_prelude(self.keys, "smem")
        scores = (
            scores[scores.index("__device__") :]
            .replace("wgmma(float", "scores(float")
            .replace("REGS", str(self.keys // 2))
        )
        prelude = wgmma_prelude(self.head_dim, "register", trans_b=self.transposed) + scores
        return kernel_text(KERNEL, prelude, {"KEYS": self.keys, "BARRIERS": int(self.barriers)})


def laps() -> list[Lap]:
    """Every kernel."""
    return [Lap(*one) for one in product((64, 128), (64, 128), (False, True), (False, True))]


def launches() -> list[tuple[int, int]]:
    """(warpgroups, distance): one alone, and two."""
    return [(1, 0), *((2, distance) for distance in STARTS)]


def main() -> None:
    gpu = Gpu()
    todo = laps()
    codes = machine_codes([lap.text() for lap in todo])
    with csv_table(sys.argv[1], FIELDS) as add:
        for lap, code in zip(todo, codes, strict=True):
            gpu.kernel(lap, code)
            for groups, distance in launches():
                launch = Launch(gpu.identity.sm_count, 128 * groups, SMEM, size=distance, rounds=ROUNDS)
                runs = [gpu.records(lap, launch)[0][:, ::4].astype(float).mean(axis=0) for _ in range(4)][1:]
                row: dict[str, object] = {
                    "clock_mhz": clock_mhz(gpu), "keys": lap.keys, "head_dim": lap.head_dim, "barriers": int(lap.barriers),
                    "transposed": int(lap.transposed), "warpgroups": groups, "distance": distance,
                    "lap_cycles": f"{statistics.median((run[:, 1] - run[:, 0]).mean() for run in runs) / ROUNDS:.1f}",
                    "scores_cycles": f"{statistics.median(run[:, 5].mean() for run in runs) / ROUNDS:.1f}",
                    "output_cycles": f"{statistics.median(run[:, 6].mean() for run in runs) / ROUNDS:.1f}",
                }  # fmt: skip
                add(row)


if __name__ == "__main__":
    main()
