// Cycles of one wgmma when GROUPS warpgroups issue back to back, STEPS to a group, one group in flight ahead.
BENCH(128 * GROUPS) {
  WGMMA_OPERANDS
  __syncthreads();
  i64 n0 = ns(), t0 = clk();
  for (int r = 0; r < rounds; r++) {
    wgmma_group<STEPS>(c, a, base, group, rounds >> 30);
    wgmma_wait<1>();
  }
  wgmma_wait<0>();
  i64 t1 = clk(), n1 = ns();
  wgmma_end(out, c);
  record(out, t0, t1, n0, n1);
}
