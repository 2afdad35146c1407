// A stream of one instruction kind, or a mix, from registers: CHAINS independent chains in every warp.
// The generated part above defines BODY(i), which advances chain i.  One chain and one warp give the latency.
BENCH(THREADS) {
  float x[CHAINS], s[4] = {0.f, 0.f, 0.f, 0.f}, h[4] = {0.f, 0.f, 0.f, 0.f}, kk[CHAINS], mm[CHAINS];
  u32 y[CHAINS];
  const float* in = (const float*)data;
  // Loaded, so that they are registers and not constants of the instruction.
  const float k = in[threadIdx.x], m = in[threadIdx.x + 1024];
  const u32 ku = __float_as_uint(in[threadIdx.x + 7]), mu = __float_as_uint(in[threadIdx.x + 11]);
#pragma unroll
  for (int i = 0; i < CHAINS; i++) {
    x[i] = in[threadIdx.x + 32 * i];
    y[i] = __float_as_uint(x[i]);
    kk[i] = in[threadIdx.x + 64 * i + 5];
    mm[i] = in[threadIdx.x + 64 * i + 6];
  }
  __syncthreads();
  i64 n0 = ns(), t0 = clk();
#pragma unroll 1
  for (int r = 0; r < rounds; r++) {
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
#pragma unroll
      for (int i = 0; i < CHAINS; i++) { BODY(i) }
    }
  }
  i64 t1 = clk(), n1 = ns();
  float t = k + m + s[0] + s[1] + s[2] + s[3] + h[0] + h[1] + h[2] + h[3];
  u32 z = ku + mu;
#pragma unroll
  for (int i = 0; i < CHAINS; i++) { t += x[i] + kk[i] + mm[i]; z += y[i]; }
  keep(out, t);
  keep(out, z);
  record(out, t0, t1, n0, n1);
}
