// Two CTAs of a cluster.  KIND 0: ping-pong by arriving on the other CTA's mbarrier; a round is one hand-over each way.
// KIND 2: the same, the arrival releasing memory to the cluster.  KIND 1: a dependent chain of loads from the other CTA's shared memory, eight to a round.
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(32, 1)
    bench(const __grid_constant__ TensorMap map, i64* out, char* data, i64 size, int rounds) {
  __shared__ __align__(16) u64 cell;
  const u32 mine = address(&cell), rank = blockIdx.x & 1;
  u32 theirs;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(theirs) : "r"(mine), "r"(rank ^ 1u));
  if (threadIdx.x == 0) {
#if KIND != 1
    mbar_init(mine, 1);
    fence_init();
#else
    // What the other CTA loads here is the address of this cell, seen from there.
    asm volatile("{ .reg .u32 a; mapa.shared::cluster.u32 a, %0, %1; st.volatile.shared.u32 [%0], a; }" ::"r"(mine), "r"(rank) : "memory");
#endif
  }
  asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
  u32 at = theirs;
  i64 t0 = clk();
#pragma unroll 1
  for (int r = 0; r < rounds; r++) {
#if KIND != 1
    if (rank) mbar_wait(mine, r & 1);
#if KIND == 0
    if (threadIdx.x == 0) asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(theirs) : "memory");
#else
    if (threadIdx.x == 0) asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(theirs) : "memory");
#endif
    __syncwarp();
    if (!rank) mbar_wait(mine, r & 1);
#else
#pragma unroll
    for (int u = 0; u < 8; u++) asm volatile("ld.volatile.shared::cluster.u32 %0, [%0];" : "+r"(at)::"memory");
#endif
  }
  i64 t1 = clk();
  keep(out, at);
  record(out, t0, t1);
  asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
}
