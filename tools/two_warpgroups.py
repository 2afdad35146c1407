"""Two warpgroups that each multiply and compute in turns, as those of an attention kernel do: what they cost each other.

    python tools/two_warpgroups.py OUT.csv

`tilecast calibrate`'s corun/beside_mma has a warpgroup that only multiplies beside one that only computes.  Here a lap of each is
S = Q K^T (m64n64k16, A in shared memory), O += P V (A in registers, which the last lap packed), a wait for S, EARLY of 32 elements of
softmax, a wait for O, the other elements.  "free": laps follow each other, the second warpgroup begins DISTANCE cycles later.  "paced":
before each lap both meet, and the second waits DISTANCE cycles, so that what runs beside what is known.  Seconds on a Hopper GPU.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass
from itertools import product

from measuring import csv_table
from own_kernels import clock_mhz, kernel_text, machine_codes

from tilecast.validation.lab.calibrate.gpu import Gpu, Launch
from tilecast.validation.lab.calibrate.preludes import STREAMS, wgmma_prelude

ROUNDS, SMEM = 64, 131072
KERNEL = r"""
BENCH(256) {
  extern __shared__ __align__(1024) unsigned char smem[];
  wgmma_fill(smem);
  float x[32], o[REGS], s[4] = {0.f, 0.f, 0.f, 0.f}, h[4] = {0.f, 0.f, 0.f, 0.f};
  u32 y[32], p[4][4];
  const float k = 0.1f + rounds * 1e-9f, m = -2.f - rounds * 1e-9f;
  const u32 base = address(smem);
  const int group = warpgroup_index();
#pragma unroll
  for (int i = 0; i < 32; i++) { x[i] = 0.f; y[i] = 0; }
#pragma unroll
  for (int i = 0; i < REGS; i++) o[i] = 0.f;
#pragma unroll
  for (int i = 0; i < 16; i++) p[i / 4][i % 4] = ((const u32*)smem)[threadIdx.x * 16 + i];
  i64 multiplied = 0, computed = 0;
  __syncthreads();
#if !PACED
  if (group) spin(size);
#endif
  const i64 begin = clk();
#pragma unroll 1
  for (int r = 0; r < rounds; r++) {
#if PACED
    asm volatile("bar.sync 1, %0;" ::"r"(blockDim.x) : "memory");
    if (group) spin(size);
#endif
    const i64 t0 = clk();
    wgmma_fence();
#pragma unroll
    for (int u = 0; u < REGS / 8; u++) scores(x, p[0], a_step(base, group, u), b_step(base, u), u > 0 ? 1 : rounds >> 30);
    wgmma_commit();
#pragma unroll
    for (int u = 0; u < 4; u++) wgmma(o, p[u], 0, b_step(base, u), 1);
    wgmma_commit();
    wgmma_wait<1>();
#pragma unroll
    for (int i = 0; i < EARLY; i++) { BODY(i) }
    wgmma_wait<0>();
    const i64 t1 = clk();
#pragma unroll
    for (int v = 0; v < REPEATS; v++) {
#pragma unroll
      for (int i = v ? 0 : EARLY; i < 32; i++) { BODY(i) }
    }
#if PACKS
#pragma unroll
    for (int i = 0; i < 16; i++) p[i / 4][i % 4] = y[2 * i + 1];
#endif
    const i64 t2 = clk();
    multiplied += t1 - t0; computed += t2 - t1;
  }
  const i64 end = clk();
  float t = k + m + s[0] + s[1] + s[2] + s[3] + h[0] + h[1] + h[2] + h[3];
#pragma unroll
  for (int i = 0; i < 32; i++) t += x[i];
  keep(out, t);
  wgmma_end(out, o);
  record(out, begin, end, 0, 0, multiplied, computed);
}
"""
#: (stream, how often a lap does its 32 steps, elements between the waits).
BURSTS = (
    *product(("softmax_anchored", "softmax_anchored_poly8", "softmax_anchored_poly4", "softmax_online"), (1,), (0, 8)),
    ("none", 0, 0), ("ex2", 1, 0), ("ffma_3src", 1, 0), ("ffma_3src", 2, 0), ("ffma_3src", 4, 0),
)  # fmt: skip
#: Head dimension -> cycles between the warpgroups' laps where they are paced.
DISTANCES = {64: tuple(range(0, 601, 50)), 128: tuple(range(0, 1001, 100))}
#: Where they go free.
STARTS = (0, 150, 300, 450, 600)
FIELDS = ("gpu", "date", "driver", "clock_mhz", "mode", "stream", "repeats", "early", "head_dim", "warpgroups", "distance", "lap_cycles",
          "products_cycles_0", "softmax_cycles_0", "products_cycles_1", "softmax_cycles_1")  # fmt: skip


@dataclass(frozen=True)
class Lap:
    """A kernel: laps of ``repeats`` times 32 steps of ``stream``, ``early`` of them between the waits, beside products of ``head_dim``."""

    paced: bool
    stream: str
    repeats: int
    early: int
    head_dim: int

    def text(self) -> str:
        """CUDA source."""
        scores = wgmma_prelude(64, "smem")
        scores = scores[scores.index("__device__") :].replace("wgmma(float", "scores(float").replace("REGS", "32")
        body = "" if self.stream == "none" else STREAMS[self.stream].body
        prelude = wgmma_prelude(self.head_dim, "register") + scores + f"#define BODY(i) {body}\n"
        defines = {
            "PACED": int(self.paced), "REPEATS": self.repeats, "EARLY": self.early,
            "PACKS": int(self.stream.startswith("softmax")),
        }  # fmt: skip
        return kernel_text(KERNEL, prelude, defines)


def laps() -> list[Lap]:
    """Every kernel."""
    return [Lap(paced, *burst, dim) for paced, burst, dim in product((False, True), BURSTS, DISTANCES)]


def launches(lap: Lap) -> list[tuple[int, int]]:
    """(warpgroups, distance): one alone, and two."""
    return [(1, 0), *((2, distance) for distance in (DISTANCES[lap.head_dim] if lap.paced else STARTS))]


def main() -> None:
    gpu = Gpu()
    todo = laps()
    codes = machine_codes([lap.text() for lap in todo])
    with csv_table(sys.argv[1], FIELDS) as add:
        for lap, code in zip(todo, codes, strict=True):
            gpu.kernel(lap, code)
            for groups, distance in launches(lap):
                launch = Launch(gpu.identity.sm_count, 128 * groups, SMEM, size=distance, rounds=ROUNDS)
                runs = [gpu.records(lap, launch)[0][:, ::4].astype(float).mean(axis=0) / ROUNDS for _ in range(4)][1:]
                row: dict[str, object] = {
                    "clock_mhz": clock_mhz(gpu), "mode": "paced" if lap.paced else "free", "stream": lap.stream,
                    "repeats": lap.repeats, "early": lap.early, "head_dim": lap.head_dim, "warpgroups": groups, "distance": distance,
                }  # fmt: skip
                for group in range(groups):
                    row[f"products_cycles_{group}"] = f"{statistics.median(run[group, 5] for run in runs):.1f}"
                    row[f"softmax_cycles_{group}"] = f"{statistics.median(run[group, 6] for run in runs):.1f}"
                if not lap.paced:
                    row["lap_cycles"] = f"{statistics.median((run[:, 1] - run[:, 0]).mean() for run in runs):.1f}"
                add(row)


if __name__ == "__main__":
    main()
