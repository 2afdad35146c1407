// Operands of the Hopper matrix benchmarks.  The generated part above this file defines
//   REGS (accumulators a thread), K_BYTES_FP8, wgmma(c, a, da, db, accumulate)
// Shared memory: A at 16 KB a warpgroup, B after four of them.  Both are 64 x 128 B tiles in the 128 B swizzle;
// contents are about normal, because data decide power and nothing else here.
#define A_BYTES 16384
#define B_OFFSET 65536
#define B_BYTES 65536
#define WGMMA_SMEM (B_OFFSET + B_BYTES)

__device__ __forceinline__ void wgmma_fill(unsigned char* smem) {
  u32* words = (u32*)smem;
  for (int i = threadIdx.x; i < WGMMA_SMEM / 4; i += blockDim.x) {
#if ZERO_DATA
    words[i] = 0;
#elif FP8
    u32 low, high;
    asm("{ .reg .b16 h; cvt.rn.satfinite.e4m3x2.f32 h, %1, %2; cvt.u32.u16 %0, h; }" : "=r"(low) : "f"(normal(4 * i)), "f"(normal(4 * i + 1)));
    asm("{ .reg .b16 h; cvt.rn.satfinite.e4m3x2.f32 h, %1, %2; cvt.u32.u16 %0, h; }" : "=r"(high) : "f"(normal(4 * i + 2)), "f"(normal(4 * i + 3)));
    words[i] = low | (high << 16);
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(words[i]) : "f"(normal(2 * i)), "f"(normal(2 * i + 1)));
#endif
  }
  __syncthreads();
  fence_async();
  __syncthreads();
}
__device__ __forceinline__ u64 descriptor(u32 at, u64 lead_bytes, u64 stride_bytes) {
  return ((u64)(at >> 4) & 0x3fff) | ((lead_bytes >> 4) << 16) | ((stride_bytes >> 4) << 32) | (1ull << 62);
}
// Descriptor of k-step u: 32 bytes along a 128-byte row, then the next tile (what a kernel's k loop does).
__device__ __forceinline__ u64 a_step(u32 base, int group, int u) {
  return descriptor(base + group * A_BYTES + ((u / 4) % 2) * 8192 + (u % 4) * 32, 16, 1024);
}
__device__ __forceinline__ u64 b_step(u32 base, int u) {
#if TRANS_B
  // K rows of 64 columns: a k-step is 16 rows (two swizzle atoms of 8 x 128 B), column blocks lie 16 KB apart.
  return descriptor(base + B_OFFSET + (u % 8) * 2048, 16384, 1024);
#else
  constexpr int tiles = B_BYTES / (N * 128) < 4 ? B_BYTES / (N * 128) : 4;
  return descriptor(base + B_OFFSET + ((u / 4) % tiles) * N * 128 + (u % 4) * 32, 16, 1024);
#endif
}
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory"); }
// One group of COUNT k-steps.  `first` is 0, so that a tile starts afresh, but a run-time 0: the assembler deletes
// matrix work whose accumulators it knows to be overwritten unread, which made wgmma look four times too fast.
template <int COUNT> __device__ __forceinline__ void wgmma_group(float (&c)[REGS], const u32 (&a)[4], u32 base, int group, int first) {
  wgmma_fence();
#pragma unroll
  for (int u = 0; u < COUNT; u++) wgmma(c, a, a_step(base, group, u), b_step(base, u), u > 0 ? 1 : first);
  wgmma_commit();
}
__device__ __forceinline__ void wgmma_start(float (&c)[REGS], u32 (&a)[4], const unsigned char* smem) {
#pragma unroll
  for (int i = 0; i < REGS; i++) c[i] = 0.f;
#pragma unroll
  for (int i = 0; i < 4; i++) a[i] = ((const u32*)smem)[threadIdx.x * 4 + i];
}
__device__ __forceinline__ void wgmma_end(i64* out, float (&c)[REGS]) {
  float t = 0.f;
#pragma unroll
  for (int i = 0; i < REGS; i++) t += c[i];
  keep(out, t);
}
// What benchmarks of matrix work begin with: operands in shared memory and registers, where they lie, and whose turn it is.
#define WGMMA_OPERANDS                                     \
  extern __shared__ __align__(1024) unsigned char smem[];  \
  wgmma_fill(smem);                                        \
  float c[REGS];                                           \
  u32 a[4];                                                \
  wgmma_start(c, a, smem);                                 \
  const u32 base = address(smem);                          \
  const int group = warpgroup_index();
