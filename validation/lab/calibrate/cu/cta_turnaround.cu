// When does an SM's next CTA execute its first instruction?  Every warp notes its first clock, and one thread the
// last one before the CTA ends: nothing but that one store lies between the note and the exit.
// `size` is the body's cycles.  With SETMAXNREG the warpgroups move registers as attention kernels do.
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
  record(out, t0, 0, n0);
  i64* last = out + RECORD * (i64)blockIdx.x * (THREADS / 32) + 1;
  while (clk() - t0 < size) {}
  __syncthreads();
  if (threadIdx.x == 0) *last = clk();
}
