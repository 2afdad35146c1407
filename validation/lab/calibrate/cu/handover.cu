// Ping-pong between LEFT and RIGHT warps of one CTA; a round is one hand-over each way.
// KIND 0: mbarrier, one elected lane of every arriving warp arrives, all lanes of the other side wait.
// KIND 1: mbarrier, every thread arrives.  KIND 2: bar.arrive and bar.sync on named barriers.
BENCH(32 * (LEFT + RIGHT)) {
  __shared__ __align__(8) u64 bars[2];
  const u32 to_right = address(&bars[0]), to_left = address(&bars[1]);
  const int per = KIND == 1 ? 32 : 1;
  if (threadIdx.x == 0) {
    mbar_init(to_right, LEFT * per);
    mbar_init(to_left, RIGHT * per);
    fence_init();
  }
  __syncthreads();
  const bool left = warp_index() < LEFT;
  i64 t0 = clk();
#pragma unroll 1
  for (int r = 0; r < rounds; r++) {
#if KIND == 2
    if (left) {
      asm volatile("bar.arrive 1, %0;" ::"n"(32 * (LEFT + RIGHT)) : "memory");
      asm volatile("bar.sync 2, %0;" ::"n"(32 * (LEFT + RIGHT)) : "memory");
    } else {
      asm volatile("bar.sync 1, %0;" ::"n"(32 * (LEFT + RIGHT)) : "memory");
      asm volatile("bar.arrive 2, %0;" ::"n"(32 * (LEFT + RIGHT)) : "memory");
    }
#else
    const bool speaks = KIND == 1 || threadIdx.x % 32 == 0;
    if (left) {
      if (speaks) mbar_arrive(to_right);
      __syncwarp();
      mbar_wait(to_left, r & 1);
    } else {
      mbar_wait(to_right, r & 1);
      if (speaks) mbar_arrive(to_left);
      __syncwarp();
    }
#endif
  }
  i64 t1 = clk();
  record(out, t0, t1);
}
