// Straight-line code of LENGTH instructions, run again and again by WARPGROUPS warpgroups, each its own copy or (SHARED) all
// the same.  BLOCK is 64 of them (generated).  What caches of instructions hold runs at one a cycle; beyond, at the rate it is fetched.
template <int COPY> __device__ __forceinline__ i64 pass(float (&x)[16], float k, int rounds) {
  i64 t0 = clk();
#pragma unroll 1
  for (int r = 0; r < rounds; r++) {
#pragma unroll
    for (int j = 0; j < LENGTH / 64; j++) { BLOCK(x, k) }
    k += (float)COPY;
  }
  return clk() - t0;
}
BENCH(128 * WARPGROUPS) {
  const float* in = (const float*)data;
  float x[16];
#pragma unroll
  for (int i = 0; i < 16; i++) x[i] = in[threadIdx.x + 32 * i];
  const float k = in[threadIdx.x];
  const int group = SHARED ? 0 : warpgroup_index();
  i64 cycles = 0;
  // The first pass fetches what can stay.
  for (int again = 0; again < 2; again++) {
    __syncthreads();
    // SMs that run the same line at the same time share its fetch; real ones drift apart.
    if (APART && again) spin((i64)(hash(blockIdx.x) % 65536));
    __syncthreads();
    if (group == 0) cycles = pass<0>(x, k, again ? rounds : 2);
#if WARPGROUPS > 1 && !SHARED
    else if (group == 1) cycles = pass<1>(x, k, again ? rounds : 2);
#endif
#if WARPGROUPS > 2 && !SHARED
    else cycles = pass<2>(x, k, again ? rounds : 2);
#endif
  }
  float t = 0.f;
#pragma unroll
  for (int i = 0; i < 16; i++) t += x[i];
  keep(out, t);
  record(out, 0, cycles);
}
