// What each side loses when matrix work, arithmetic or shared-memory streams and bulk copies run on one SM.
// MMA_GROUPS warpgroups issue wgmma back to back and log the clock after every group; STREAM_GROUPS run BODY; with FILL
// a further warp keeps FILL bulk copies of FILL_BYTES in flight.  The log of the matrix and copy sides is read inside
// the window in which the streams ran.  `size` is the number of logged groups, `rounds` the length of the streams.
#define LOG 1024
#define STREAM_END (WGMMA_SMEM + 32768)
#define WARPGROUPS (MMA_GROUPS + STREAM_GROUPS)
BENCH(128 * WARPGROUPS + (FILL ? 32 : 0)) {
  extern __shared__ __align__(1024) unsigned char smem[];
  __shared__ u32 log[3][LOG];
  __shared__ __align__(8) u64 bars[4];
  const u32 base = address(smem);
  const int group = warpgroup_index();
#if MMA_GROUPS
  wgmma_fill(smem);
#else
  for (int i = threadIdx.x; i < 32768; i += blockDim.x) ((u32*)smem)[i] = hash(i);
#endif
  for (int i = threadIdx.x; i < 3 * LOG; i += blockDim.x) (&log[0][0])[i] = 0;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 4; i++) mbar_init(address(&bars[i]), 1);
    fence_init();
  }
  __syncthreads();
  i64 t0 = clk(), t1 = t0;
  if (group < MMA_GROUPS) {
#if MMA_GROUPS
    float c[REGS];
    u32 a[4];
    wgmma_start(c, a, smem);
    for (int r = 0; r < (int)size; r++) {
      wgmma_group<8>(c, a, base, group, rounds >> 30);
      wgmma_wait<1>();
      if (threadIdx.x % 128 == 0) log[group][r] = clk32();
    }
    wgmma_wait<0>();
    wgmma_end(out, c);
#endif
  } else if (group < WARPGROUPS) {
#if STREAM_GROUPS
    const float* in = (const float*)data;
    float x[16], s[4] = {0.f, 0.f, 0.f, 0.f}, h[4] = {0.f, 0.f, 0.f, 0.f};
    u32 y[16], w[64];
    const float k = in[threadIdx.x], m = in[threadIdx.x + 1024];
    const u32 ku = __float_as_uint(in[threadIdx.x + 7]), mu = __float_as_uint(in[threadIdx.x + 11]);
    // Shared-memory streams: 16 bytes a lane, 512 a warp, so no two lanes meet in a bank.
    const u32 at = base + WGMMA_SMEM + (threadIdx.x % 128) * 16;
#pragma unroll
    for (int i = 0; i < 16; i++) { x[i] = in[threadIdx.x + 32 * i]; y[i] = __float_as_uint(x[i]); }
#pragma unroll
    for (int i = 0; i < 64; i++) w[i] = ku + i;
#if LOCAL
    u32 cells[16];
    u64 where;
    asm volatile("cvta.to.local.u64 %0, %1;" : "=l"(where) : "l"(&cells[0]));
    const u32 spill = (u32)where;
#pragma unroll
    for (int i = 0; i < 16; i++) {
      w[i] = spill + 4 * (i & 7);
      asm volatile("st.local.u32 [%0], %0;" ::"r"(w[i]) : "memory");
    }
#endif
    spin(3000);
    u32 flip = 0;
    t0 = clk();
#pragma unroll 1
    for (int r = 0; r < rounds; r++) {
#pragma unroll
      for (int v = 0; v < UNROLL; v++) {
#pragma unroll
        for (int i = 0; i < 16; i++) { BODY(i) }
      }
      // Other addresses every round, so that no load is taken out of the loop.
      flip ^= 16384;
    }
    t1 = clk();
    float t = k + m + s[0] + s[1] + s[2] + s[3] + h[0] + h[1] + h[2] + h[3];
    u32 z = ku + mu + at + flip;
#pragma unroll
    for (int i = 0; i < 16; i++) { t += x[i]; z += y[i]; }
#pragma unroll
    for (int i = 0; i < 64; i++) z += w[i];
    keep(out, t);
    keep(out, z);
#endif
  } else {
#if FILL
    if (threadIdx.x % 32 == 0) {
      const char* from = data + (i64)blockIdx.x * 131072;
      const int copies = (int)size * FILL_SCALE;
      for (int i = 0; i < FILL; i++) {
        mbar_expect(address(&bars[i]), FILL_BYTES);
        bulk_load(base + STREAM_END + i * FILL_BYTES, from + i * FILL_BYTES, FILL_BYTES, address(&bars[i]));
      }
      for (int i = 0; i < copies; i++) {
        const int slot = i % FILL;
        mbar_wait(address(&bars[slot]), (i / FILL) & 1);
        if (i < LOG) log[2][i] = clk32();
        if (i + FILL < copies) {
          mbar_expect(address(&bars[slot]), FILL_BYTES);
          bulk_load(base + STREAM_END + slot * FILL_BYTES, from + ((i + FILL) % 4) * FILL_BYTES, FILL_BYTES, address(&bars[slot]));
        }
      }
    }
#endif
  }
  record(out, t0, t1);
  __syncthreads();
  i64* tail = out + RECORD * (i64)gridDim.x * ((blockDim.x + 31) / 32);
  if (blockIdx.x == 0)
    for (int i = threadIdx.x; i < 3 * LOG; i += blockDim.x) tail[i] = (&log[0][0])[i];
}
