// From the first wgmma of a group of STEPS to the return of wgmma.wait_group, nothing else in flight.
// extra: cycles until the commit has issued; extra2: the same loop without matrix work (clock reads and branch).
BENCH(128 * GROUPS) {
  WGMMA_OPERANDS
  u32 issued = 0, waited = 0, empty = 0;
  for (int r = 0; r < rounds; r++) {
    u32 t0 = clk32();
    wgmma_group<STEPS>(c, a, base, group, rounds >> 30);
    u32 t1 = clk32();
    wgmma_wait<0>();
    u32 t2 = clk32();
    issued += t1 - t0;
    waited += t2 - t0;
  }
  for (int r = 0; r < rounds; r++) {
    u32 t0 = clk32();
    u32 t1 = clk32();
    empty += t1 - t0;
  }
  wgmma_end(out, c);
  record(out, 0, waited, 0, 0, issued, empty);
}
