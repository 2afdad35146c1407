// Blackwell matrix instruction: DEPTH k-steps of M x N bf16, then a commit to an mbarrier and its wait.
// CTAS 1 or 2 (a cluster of two, the first CTA issues); A_TMEM 1 reads A from tensor memory.  One thread issues.
// start and end: of all rounds; extra: cycles until the commits had issued; extra2: cycles until the waits returned.
#if CTAS == 2
#define GROUP "cta_group::2"
#else
#define GROUP "cta_group::1"
#endif
#define COLUMNS 512
__device__ __forceinline__ u64 descriptor(u32 at) {
  // 128 B swizzle: tiles of 8 rows x 128 bytes, 1024 bytes apart; bit 46 is the fixed version of this architecture.
  return ((u64)(at >> 4) & 0x3fff) | (1ull << 16) | (64ull << 32) | (1ull << 46) | (2ull << 61);
}
__device__ __forceinline__ void mma(u32 d, u32 a_tmem, u64 da, u64 db, u32 shape, u32 accumulate) {
#if A_TMEM
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %4, 0; tcgen05.mma." GROUP ".kind::f16 [%0], [%1], %2, %3, p; }"
               ::"r"(d), "r"(a_tmem), "l"(db), "r"(shape), "r"(accumulate) : "memory");
#else
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %4, 0; tcgen05.mma." GROUP ".kind::f16 [%0], %1, %2, %3, p; }"
               ::"r"(d), "l"(da), "l"(db), "r"(shape), "r"(accumulate) : "memory");
#endif
}
__device__ __forceinline__ void commit(u32 bar) {
#if CTAS == 2
  asm volatile("tcgen05.commit." GROUP ".mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%0], %1;" ::"r"(bar), "h"((unsigned short)3) : "memory");
#else
  asm volatile("tcgen05.commit." GROUP ".mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(bar) : "memory");
#endif
}
__device__ __forceinline__ void cluster_sync() {
#if CTAS == 2
  asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}
extern "C" __global__ void
#if CTAS == 2
__cluster_dims__(2, 1, 1)
#endif
__launch_bounds__(128, 1) bench(const __grid_constant__ TensorMap map, i64* out, char* data, i64 size, int rounds) {
  extern __shared__ __align__(1024) unsigned char smem[];
  __shared__ __align__(8) u64 bar_store;
  __shared__ u32 tmem_store;
  const u32 base = address(smem), bar = address(&bar_store);
  for (int i = threadIdx.x; i < 131072 / 4; i += blockDim.x)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(((u32*)smem)[i]) : "f"(normal(2 * i)), "f"(normal(2 * i + 1)));
  if (threadIdx.x == 0) { mbar_init(bar, 1); fence_init(); }
  if (warp_index() == 0) {
    asm volatile("tcgen05.alloc." GROUP ".sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(address(&tmem_store)), "r"(COLUMNS) : "memory");
    asm volatile("tcgen05.relinquish_alloc_permit." GROUP ".sync.aligned;");
  }
  fence_async();
  __syncthreads();
  cluster_sync();
  const u32 tmem = tmem_store;
  // f32 accumulators (1 at bit 4), bf16 A and B (1 at bits 7 and 10), N / 8 at bit 17, M / 16 at bit 24.
  const u32 shape = (1u << 4) | (1u << 7) | (1u << 10) | ((N / 8) << 17) | ((M / 16) << 24);
  const bool leader = CTAS == 1 || blockIdx.x % 2 == 0;
  i64 total = 0, issued = 0, n0 = ns(), c0 = clk();
  if (threadIdx.x == 0) {
    for (int r = 0; r < rounds; r++) {
      u32 t0 = clk32();
      if (leader) {
#pragma unroll
        for (int u = 0; u < DEPTH; u++)
          mma(tmem, tmem + 256, descriptor(base + ((u / 4) % 2) * 16384 + (u % 4) * 32),
              descriptor(base + 65536 + ((u / 4) % 2) * 32768 + (u % 4) * 32), shape, u > 0);
        commit(bar);
      }
      u32 t1 = clk32();
      mbar_wait(bar, r & 1);
      u32 t2 = clk32();
      issued += t1 - t0;
      total += t2 - t0;
    }
  }
  record(out, c0, clk(), n0, ns(), issued, total);
  __syncthreads();
  cluster_sync();
  if (warp_index() == 0)
    asm volatile("tcgen05.dealloc." GROUP ".sync.aligned.b32 %0, %1;" ::"r"(tmem), "r"(COLUMNS));
}
