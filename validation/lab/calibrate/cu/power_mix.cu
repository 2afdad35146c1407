// A load of several kinds of work at once, for as many cycles as `size` says: MMA_GROUPS warpgroups of back-to-back
// wgmma, STREAM_GROUPS warpgroups of BODY, and with FILL a warp that keeps FILL bulk copies of FILL_BYTES from L2 in
// flight, of 128 KB for each CTA.  The sixth number of a warp's record is how many rounds it did.
#ifndef WGMMA_SMEM
#define WGMMA_SMEM 0
#endif
#define STREAM_END (WGMMA_SMEM + 32768)
#define WARPGROUPS (MMA_GROUPS + STREAM_GROUPS)
// The four warps of a warpgroup go on or stop together, because wgmma needs all of them.
__device__ __forceinline__ bool together(int barrier, bool more) {
  u32 any;
  asm volatile("{ .reg .pred p, q; setp.ne.u32 p, %1, 0; barrier.cta.red.or.aligned.pred q, %2, 128, p; selp.u32 %0, 1, 0, q; }"
               : "=r"(any) : "r"((u32)more), "r"(barrier) : "memory");
  return any;
}
BENCH(128 * WARPGROUPS + (FILL ? 32 : 0)) {
  extern __shared__ __align__(1024) unsigned char smem[];
  const u32 base = address(smem);
  const int group = warpgroup_index();
#if MMA_GROUPS
  wgmma_fill(smem);
#else
  for (int i = threadIdx.x; i < 8192; i += blockDim.x) ((u32*)smem)[i] = hash(i);
#endif
#if FILL
  __shared__ __align__(8) u64 bars[FILL];
  if (threadIdx.x == 0) {
    for (int i = 0; i < FILL; i++) mbar_init(address(&bars[i]), 1);
    fence_init();
  }
#endif
  __syncthreads();
  const i64 n0 = ns(), t0 = clk();
  i64 done = 0;
  if (group < MMA_GROUPS) {
#if MMA_GROUPS
    float c[REGS];
    u32 a[4];
    wgmma_start(c, a, smem);
    do {
      for (int r = 0; r < 16; r++) {
        wgmma_group<8>(c, a, base, group, rounds >> 30);
        wgmma_wait<1>();
      }
      done += 16;
    } while (together(1 + group, clk() - t0 < size));
    wgmma_wait<0>();
    wgmma_end(out, c);
#endif
  } else if (group < WARPGROUPS) {
#if STREAM_GROUPS
    const float* in = (const float*)data;
    float x[16], y[16];
    u32 z[4] = {0, 0, 0, 0}, w[64], flip = 0;
    const float k = in[threadIdx.x], m = in[threadIdx.x + 1024];
    const u32 at = base + WGMMA_SMEM + (threadIdx.x % 128) * 16;
#pragma unroll
    for (int i = 0; i < 16; i++) { x[i] = in[threadIdx.x + 32 * i]; y[i] = 0.f; }
#pragma unroll
    for (int i = 0; i < 64; i++) w[i] = hash(threadIdx.x * 64 + i);
    do {
#pragma unroll 1
      for (int r = 0; r < 32; r++) {
#pragma unroll
        for (int i = 0; i < 16; i++) { BODY(i) }
        // Other addresses every round, so that no load is taken out of the loop.
        flip ^= 16384;
      }
      done += 32;
    } while (clk() - t0 < size);
    float t = k + m;
    u32 e = at + flip + z[0] + z[1] + z[2] + z[3];
#pragma unroll
    for (int i = 0; i < 16; i++) t += x[i] + y[i];
#pragma unroll
    for (int i = 0; i < 64; i++) e += w[i];
    keep(out, t);
    keep(out, e);
#endif
  } else {
#if FILL
    if (threadIdx.x % 32 == 0) {
      const char* from = data + (1ll << 20) + (i64)blockIdx.x * 131072;
      for (int i = 0; i < FILL; i++) {
        mbar_expect(address(&bars[i]), FILL_BYTES);
        bulk_load(base + STREAM_END + i * FILL_BYTES, from + i * FILL_BYTES, FILL_BYTES, address(&bars[i]));
      }
      bool more = true;
      for (i64 i = 0; more || i < done + FILL; i++) {
        const int slot = i % FILL;
        mbar_wait(address(&bars[slot]), (i / FILL) & 1);
        if (more) {
          done = i + 1;
          mbar_expect(address(&bars[slot]), FILL_BYTES);
          bulk_load(base + STREAM_END + slot * FILL_BYTES, from + (i + FILL) * FILL_BYTES % 131072, FILL_BYTES, address(&bars[slot]));
          more = clk() - t0 < size;
        }
      }
    }
#endif
  }
  const i64 t1 = clk(), n1 = ns();
  record(out, t0, t1, n0, n1, done);
}
