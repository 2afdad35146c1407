// Loads of 16 bytes a lane past the L1, UNROLL in flight a thread; COPY also stores them `size` bytes further.
// PRIVATE 1: every SM has its own REGION bytes, else all read the same REGION, each SM from its own start.
BENCH(1024) {
  const i64 chunk = 1024 * 16;
  const i64 start = PRIVATE ? (i64)blockIdx.x * REGION : ((i64)blockIdx.x * STRIDE) % REGION;
  const char* lane = data + threadIdx.x * 16;
  u32 z = 0;
  i64 n0 = ns(), t0 = clk();
  i64 at = PRIVATE ? 0 : start;
#pragma unroll 1
  for (int r = 0; r < rounds; r++) {
    u32 v[UNROLL][4];
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      const char* p = lane + (PRIVATE ? start : 0) + at;
      asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v[u][0]), "=r"(v[u][1]), "=r"(v[u][2]), "=r"(v[u][3]) : "l"(p));
#if COPY
      asm volatile("st.global.cg.v4.u32 [%4], {%0, %1, %2, %3};" ::"r"(v[u][0]), "r"(v[u][1]), "r"(v[u][2]), "r"(v[u][3]), "l"(p + size) : "memory");
#endif
      at += chunk;
      if (at >= REGION) at -= REGION;
    }
#pragma unroll
    for (int u = 0; u < UNROLL; u++) z ^= v[u][0] ^ v[u][1] ^ v[u][2] ^ v[u][3];
  }
  i64 t1 = clk(), n1 = ns();
  keep(out, z);
  record(out, t0, t1, n0, n1);
}
