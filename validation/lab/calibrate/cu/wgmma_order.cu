// Who is served first?  Two warpgroups issue one group of STEPS each, the second `size` cycles after the first.
// start: cycles from the first's start to this warpgroup's issue, end: to its wait's return, extra: to its commit.
BENCH(256) {
  WGMMA_OPERANDS
  __shared__ u32 begin;
  i64 starts = 0, commits = 0, ends = 0;
  for (int r = 0; r < rounds; r++) {
    __syncthreads();
    if (threadIdx.x == 0) begin = clk32() + 400;
    __syncthreads();
    const u32 zero = begin, mine = zero + group * (u32)size;
    while ((int)(clk32() - mine) < 0) {}
    __syncwarp();
    u32 t0 = clk32();
    wgmma_group<STEPS>(c, a, base, group, rounds >> 30);
    u32 t1 = clk32();
    wgmma_wait<0>();
    u32 t2 = clk32();
    starts += t0 - zero;
    commits += t1 - zero;
    ends += t2 - zero;
  }
  wgmma_end(out, c);
  record(out, starts, ends, 0, 0, commits);
}
