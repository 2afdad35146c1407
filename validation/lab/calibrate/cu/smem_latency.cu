// Dependent shared-memory accesses of one warp.  KIND 0: ld.shared, 1: ldmatrix.x4, 2: st.shared then ld.shared of
// it, 3: stmatrix.x4 then ld.shared of it (2 and 3: there and back).
BENCH(32) {
  __shared__ __align__(16) u32 cells[256];
  // Every cell holds its own row's address, so that what is loaded is the next address.
  const u32 mine = address(cells) + (threadIdx.x % 8) * 16;
  for (int i = threadIdx.x; i < 256; i += 32) cells[i] = address(cells) + ((i / 4) % 8) * 16;
  __syncwarp();
  u32 at = mine, b = 0, c = 0, d = 0;
  i64 t0 = clk();
#pragma unroll 1
  for (int r = 0; r < rounds; r++) {
#pragma unroll
    for (int u = 0; u < 8; u++) {
#if KIND == 0
      asm volatile("ld.volatile.shared.u32 %0, [%0];" : "+r"(at)::"memory");
#elif KIND == 1
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%0];" : "+r"(at), "+r"(b), "+r"(c), "+r"(d)::"memory");
#elif KIND == 2
      asm volatile("st.volatile.shared.u32 [%0], %0;" ::"r"(at) : "memory");
      asm volatile("ld.volatile.shared.u32 %0, [%0];" : "+r"(at)::"memory");
#else
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %1, %1, %1};" ::"r"(mine), "r"(at) : "memory");
      asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(at) : "r"(mine) : "memory");
#endif
    }
  }
  i64 t1 = clk();
  keep(out, at + b + c + d);
  record(out, t0, t1);
}
