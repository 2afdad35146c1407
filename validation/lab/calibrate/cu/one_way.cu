// One warp arrives at an mbarrier on which WAITERS warps already wait; the clock just before the arrival and just after
// the wait's return, summed over rounds: what a hand-over takes without the code on either side of it.
BENCH(32 * (1 + WAITERS)) {
  __shared__ __align__(8) u64 bar;
  __shared__ i64 sent;
  if (threadIdx.x == 0) {
    mbar_init(address(&bar), 1);
    fence_init();
  }
  __syncthreads();
  // In a register of its own: finding the address would be timed as well.
  u32 at = address(&bar);
  asm volatile("mov.u32 %0, %0;" : "+r"(at));
  i64 total = 0;
#pragma unroll 1
  for (int r = 0; r < rounds; r++) {
    i64 seen = 0, now = 0;
    __syncthreads();
    if (warp_index() == 0) {
      spin(400 + 7 * (r % 16));
      now = clk();
      // Without a branch, whose bubble would be timed.
      asm volatile("{ .reg .pred p; .reg .b64 s; setp.eq.u32 p, %1, 0; @p mbarrier.arrive.shared.b64 s, [%0]; }" ::"r"(at), "r"(threadIdx.x) : "memory");
    } else {
      mbar_wait(at, r & 1);
      seen = clk();
    }
    if (threadIdx.x == 0) sent = now;
    __syncthreads();
    if (warp_index()) total += seen - sent;
  }
  record(out, 0, total);
}
