// mma.sync m16n8k16 bf16 with f32 accumulators: CHAINS independent accumulators a warp; one chain gives the latency.
BENCH(THREADS) {
  const u32* in = (const u32*)data;
  u32 a[4], b[2];
  float c[CHAINS][4];
#pragma unroll
  for (int i = 0; i < 4; i++) a[i] = in[threadIdx.x + 32 * i];
#pragma unroll
  for (int i = 0; i < 2; i++) b[i] = in[threadIdx.x + 32 * i + 256];
#pragma unroll
  for (int i = 0; i < CHAINS; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) c[i][j] = 0.f;
  __syncthreads();
  i64 n0 = ns(), t0 = clk();
#pragma unroll 1
  for (int r = 0; r < rounds; r++) {
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
#pragma unroll
      for (int i = 0; i < CHAINS; i++)
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
  }
  i64 t1 = clk(), n1 = ns();
  float t = 0.f;
#pragma unroll
  for (int i = 0; i < CHAINS; i++) t += c[i][0] + c[i][1] + c[i][2] + c[i][3];
  keep(out, t);
  record(out, t0, t1, n0, n1);
}
