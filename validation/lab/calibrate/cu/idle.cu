// One warp an SM sleeps until `size` nanoseconds have passed: clocks up, no work.
BENCH(32) {
  i64 n0 = ns(), t0 = clk();
  while (ns() - n0 < size) asm volatile("nanosleep.u32 1000;");
  i64 t1 = clk(), n1 = ns();
  record(out, t0, t1, n0, n1);
}
