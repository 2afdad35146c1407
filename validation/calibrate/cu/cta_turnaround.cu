// When does an SM's next CTA execute its first instruction?  Every CTA notes the clock and the global timer first
// and last thing and its SM; with SETMAXNREG its warpgroups move registers as attention kernels do.
#define WARPS (THREADS / 32)
BENCH(THREADS) {
  i64 t0 = clk(), n0 = ns();
  extern __shared__ unsigned char smem[];
#if SETMAXNREG
  if (threadIdx.x / 128 == 0)
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
  else
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
#endif
  smem[threadIdx.x] = 1;
  while (clk() - t0 < size) {}
  __syncthreads();
  i64 t1 = clk(), n1 = ns();
  record(out, t0, t1, n0, n1);
}
