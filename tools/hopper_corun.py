"""How much a Hopper SM slows softmax arithmetic while its tensor cores run, and the other way round.

Writes CUDA, builds it with the machine's nvcc, runs one CTA per SM: one or two warpgroups issue wgmma back to back
(m64n128k16, A from shared memory or registers) while one or two others run a stream of one instruction kind from
registers.  Each side reports its own cycles, alone and together.  No attention code is involved.

    python tools/hopper_corun.py OUT.csv
"""

from __future__ import annotations

import csv
import subprocess
import sys
import tempfile
from pathlib import Path

N = 128
REGS = N // 2
ACC = ", ".join(f'"+f"(c[{i}])' for i in range(REGS))
LIST = ", ".join(f"%{i}" for i in range(REGS))


def wgmma(from_registers: bool) -> str:
    """One m64n128k16 bf16 wgmma on accumulators c[]."""
    a = f"{{%{REGS}, %{REGS + 1}, %{REGS + 2}, %{REGS + 3}}}" if from_registers else f"%{REGS}"
    b = f"%{REGS + 4}" if from_registers else f"%{REGS + 1}"
    tail = "p, 1, 1, 0" if from_registers else "p, 1, 1, 0, 0"
    inputs = '"r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(db)' if from_registers else '"l"(da), "l"(db)'
    return (
        'asm volatile("{ .reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 '
        f'{{{LIST}}}, {a}, {b}, {tail}; }}" : {ACC} : {inputs});'
    )


STREAMS = {
    "ffma": "x[i] = __fmaf_rn(x[i], k, m);",
    "fadd": "x[i] = __fadd_rn(x[i], k);",
    "fmnmx": 'asm volatile("max.f32 %0, %0, %1;" : "+f"(x[i]) : "f"(k + 0.0f));',
    "ex2": 'asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(x[i]));',
    "pack": 'asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y[i]) : "f"(x[i]), "f"(x[(i + 1) & 15])); x[i] = __uint_as_float(y[i]);',
    "softmax": (  # the mix of one score element pair: scale, exponential, sum, maximum, pack
        "x[i] = __fmaf_rn(x[i], k, m); "
        'asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(x[i])); s[i & 3] = __fadd_rn(s[i & 3], x[i]); '
        'asm volatile("max.f32 %0, %0, %1;" : "+f"(h[i & 3]) : "f"(x[i])); '
        'if (i & 1) { asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y[i]) : "f"(x[i]), "f"(x[i - 1])); '
        "x[i] = __uint_as_float(y[i]); }"
    ),
}

SOURCE = """
#include <cstdio>
#include <cstdint>
#include <cuda_runtime.h>
template <int KIND> __device__ __forceinline__ void stream(float* x, unsigned* y, float* s, float* h, float k, float m, int rounds) {
  for (int r = 0; r < rounds; r++) {
#pragma unroll
    for (int i = 0; i < 16; i++) { STREAM_BODY }
  }
}
template <int KIND, bool RS>
__global__ void __launch_bounds__(384, 1) corun(long long* out, int mma_groups, int streams, int mma_rounds, int rounds, float k, float m) {
  extern __shared__ __align__(1024) unsigned char smem[];
  int group = threadIdx.x / 128;
  for (int i = threadIdx.x; i < 49152 / 4; i += 384) ((unsigned*)smem)[i] = 0x3f803f80u + i * 2654435761u % 127;
  __syncthreads();
  asm volatile("fence.proxy.async;");
  __syncthreads();
  long long t0 = clock64();
  if (group < mma_groups) {
    {
      float c[64]; unsigned a[4] = {0x3f803f80u, 0x3f813f80u, 0x3f823f80u, 0x3f833f80u};
#pragma unroll
      for (int i = 0; i < 64; i++) c[i] = 0.f;
      uint32_t base = (uint32_t)__cvta_generic_to_shared(smem);
      uint64_t da = ((uint64_t)((base + group * 8192) >> 4) & 0x3fff) | (1ull << 16) | (64ull << 32) | (1ull << 62);
      uint64_t db = ((uint64_t)((base + 16384) >> 4) & 0x3fff) | (1ull << 16) | (64ull << 32) | (1ull << 62);
      for (int r = 0; r < mma_rounds; r++) {
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int u = 0; u < 8; u++) { WGMMA }
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
      }
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      float t = 0; for (int i = 0; i < 64; i++) t += c[i];
      if (t == 12345.f) out[7] = 1;
    }
  } else if (group >= 3 - streams) {
    float x[16], s[4] = {0, 0, 0, 0}, h[4] = {0, 0, 0, 0}; unsigned y[16];
#pragma unroll
    for (int i = 0; i < 16; i++) x[i] = threadIdx.x * 0.001f + i;
    stream<KIND>(x, y, s, h, k, m, rounds);
    float t = 0; for (int i = 0; i < 16; i++) t += x[i]; for (int i = 0; i < 4; i++) t += s[i] + h[i];
    if (t == 12345.f) out[7] = 1;
  }
  long long t1 = clock64();
  if (threadIdx.x % 128 == 0 && blockIdx.x == 0) out[group] = t1 - t0;
}
template <int KIND, bool RS> void go(const char* name, long long* out, int rounds) {
  cudaFuncSetAttribute(corun<KIND, RS>, cudaFuncAttributeMaxDynamicSharedMemorySize, 65536);
  const int mma_rounds = 2000;
  int cases[7][2] = {{1, 0}, {2, 0}, {0, 1}, {0, 2}, {1, 1}, {2, 1}, {1, 2}};
  for (auto& c : cases) {
    long long h[3];
    for (int warm = 0; warm < 2; warm++) {
      cudaMemset(out, 0, 64);
      corun<KIND, RS><<<132, 384, 65536>>>(out, c[0], c[1], mma_rounds, rounds, 0.999f, 0.001f);
      if (cudaDeviceSynchronize() != cudaSuccess) { printf("error %s\\n", cudaGetErrorString(cudaGetLastError())); return; }
    }
    cudaMemcpy(h, out, 24, cudaMemcpyDeviceToHost);
    printf("ROW,%s,%s,%d,%d,%d,%.2f,%.2f,%.3f\\n", name, RS ? "register" : "smem", c[0], c[1], rounds,
           c[0] ? h[0] / (mma_rounds * 8.0) : 0.0, c[0] == 2 ? h[1] / (mma_rounds * 8.0) : 0.0,
           c[1] ? h[2] / (rounds * 16.0) : 0.0);
  }
}
int main() { long long* out; cudaMalloc(&out, 64); 
  // Short streams end inside the wgmma loop: the stream's rate under wgmma.  Long ones outlast it: wgmma's rate under the stream.
  for (int rounds : {1000, 200000}) { go<0, false>("NAME", out, rounds); go<0, true>("NAME", out, rounds); }
  return 0; }
"""


def main(path: str) -> None:
    rows = []
    for name, body in STREAMS.items():
        source = SOURCE.replace("STREAM_BODY", body).replace("NAME", name)
        source = source.replace("{ WGMMA }", "{ if (RS) { " + wgmma(True) + " } else { " + wgmma(False) + " } }")
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "corun.cu"
            file.write_text(source)
            binary = Path(folder) / "corun"
            subprocess.run(
                ["nvcc", "-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", str(file), "-o", str(binary)],
                check=True,
            )
            text = subprocess.run([str(binary)], capture_output=True, text=True, check=True).stdout
        for line in text.splitlines():
            print(line, flush=True)
            if line.startswith("ROW,"):
                rows.append(line.split(",")[1:])
    header = ["stream", "a_operand", "wgmma_groups", "stream_on", "stream_rounds", "cycles_per_wgmma_group0", "cycles_per_wgmma_group1",
              "cycles_per_stream_instruction"]  # fmt: skip
    with open(path, "w", newline="") as handle:
        writer = csv.writer(handle)
        writer.writerow(header)
        writer.writerows(rows)


if __name__ == "__main__":
    main(sys.argv[1])
