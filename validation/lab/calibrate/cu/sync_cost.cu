// What one synchronising instruction costs the warp that executes it when no thread is late: OP, UNROLL in a row.
BENCH(THREADS) {
  __shared__ __align__(8) u64 bar_store;
  const u32 bar = address(&bar_store);
  if (threadIdx.x == 0) {
    mbar_init(bar, 1 << 19);
    fence_init();
  }
  __syncthreads();
  u32 z = 0;
  i64 t0 = clk();
#pragma unroll 1
  for (int r = 0; r < rounds; r++) {
#pragma unroll
    for (int u = 0; u < 8; u++) { OP }
  }
  i64 t1 = clk();
  keep(out, z);
  record(out, t0, t1);
}
