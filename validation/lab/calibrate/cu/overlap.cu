// The attention kernel's own case: a warpgroup issues an asynchronous group of STEPS wgmma, computes on other
// registers while it runs, then waits.  BODIES x 16 steps, written out as a kernel writes a row of scores; STEPS 0 or
// BODIES 0 give either side alone.
// start: cycles until the commit has issued, end: until the wait returned, extra: until the arithmetic was done.
BENCH(128 * GROUPS) {
  WGMMA_OPERANDS
  const float* in = (const float*)data;
  float x[16], s[4] = {0.f, 0.f, 0.f, 0.f}, h[4] = {0.f, 0.f, 0.f, 0.f};
  u32 y[16];
  const float k = in[threadIdx.x], m = in[threadIdx.x + 1024];
#pragma unroll
  for (int i = 0; i < 16; i++) { x[i] = in[threadIdx.x + 32 * i]; y[i] = __float_as_uint(x[i]); }
  i64 issued = 0, computed = 0;
  __syncthreads();
  i64 begin = clk();
#pragma unroll 1
  for (int r = 0; r < rounds; r++) {
    u32 t0 = clk32();
#if STEPS
    wgmma_group<STEPS>(c, a, base, group, rounds >> 30);
#endif
    u32 t1 = clk32();
#pragma unroll
    for (int b = 0; b < BODIES; b++) {
#pragma unroll
      for (int i = 0; i < 16; i++) { BODY(i) }
    }
    u32 t2 = clk32();
#if STEPS
    wgmma_wait<0>();
#endif
    issued += t1 - t0;
    computed += t2 - t0;
  }
  i64 end = clk();
  float t = k + m + s[0] + s[1] + s[2] + s[3] + h[0] + h[1] + h[2] + h[3];
  u32 z = 0;
#pragma unroll
  for (int i = 0; i < 16; i++) { t += x[i]; z += y[i]; }
  keep(out, t);
  keep(out, z);
  wgmma_end(out, c);
  record(out, issued, end - begin, 0, 0, computed);
}
