// A dependent chain of loads past the L1, one lane an SM.  SM b walks its own `size` bytes in steps of STEP.
// Every load's cycles follow the records.
BENCH(32) {
  extern __shared__ u32 times[];
  char* mine = data + (i64)blockIdx.x * SPACE;
  i64* tail = out + RECORD * (i64)gridDim.x + (i64)blockIdx.x * rounds;
  if (threadIdx.x == 0) {
#if WARM
    for (i64 at = 0; at < size; at += STEP) asm volatile("{ .reg .u32 t; ld.volatile.global.u32 t, [%0]; }" ::"l"(mine + at) : "memory");
    spin(20000);
#endif
    // The same code without the load: what the clock reads and the branch add.
    u32 own = ~0u;
    for (int r = 0; r < 32; r++) {
      u32 value = r;
      u32 t0 = clk32();
      asm volatile("xor.b32 %0, %0, 1;" : "+r"(value)::"memory");
      if (value == 0x9e3779b9u) return;
      u32 t1 = clk32();
      own = min(own, t1 - t0);
    }
    i64 at = 0;
    for (int r = 0; r < rounds; r++) {
      u32 value;
      u32 t0 = clk32();
      asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(value) : "l"(mine + at) : "memory");
      // The branch makes the second clock read wait for the value (which is never this one).
      if (value == 0x9e3779b9u) return;
      u32 t1 = clk32();
      at += STEP;
      if (at >= size) at = 0;
      times[r] = t1 - t0 - own;
    }
    for (int r = 0; r < rounds; r++) tail[r] = times[r];
  }
  __syncwarp();
  record(out, 0, 1);
}
