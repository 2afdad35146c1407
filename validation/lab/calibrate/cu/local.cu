// Local memory, where the registers that a kernel spills live: words a lane, a warp's next to each other.
// KIND 0: a chain of loads, 1: a store, then a load of it, 2: a store, then its register is overwritten, 3: stores,
// 4: loads, 5: a walk over WORDS words a thread, eight loads and then eight stores at a time, 6: 2 without the store,
// 7: BURST stores from an idle start, timed by themselves.
// `size` is 0.  The assembler cannot know, nor where a round's words lie: so it neither forwards nor drops an access.
#define STEP 8
BENCH(THREADS) {
  u32 cells[WORDS];
  u64 where;
  asm volatile("cvta.to.local.u64 %0, %1;" : "=l"(where) : "l"(&cells[0]));
  const u32 at = (u32)where, zero = (u32)size;
  u32 x[STEP];
#pragma unroll
  for (int i = 0; i < STEP; i++) x[i] = zero + i;
  // Every cell holds the first one's address, so that what is loaded is the next address.
#pragma unroll 1
  for (int i = 0; i < WORDS; i++) asm volatile("st.local.u32 [%0], %1;" ::"r"(at + 4 * i), "r"(at) : "memory");
  __syncthreads();
  u32 next = at;
  i64 t0 = clk();
#pragma unroll 1
  for (int r = 0; r < (KIND == 7 ? 0 : rounds); r++) {
    const u32 here = at + 4 * STEP * ((u32)r % (WORDS / STEP));
#if KIND == 5
#pragma unroll
    for (int i = 0; i < STEP; i++) asm volatile("ld.local.u32 %0, [%1];" : "=r"(x[i]) : "r"(here + 4 * i) : "memory");
#pragma unroll
    for (int i = 0; i < STEP; i++) {
      asm volatile("add.u32 %0, %0, %1;" : "+r"(x[i]) : "r"(zero));
      asm volatile("st.local.u32 [%0], %1;" ::"r"(here + 4 * i), "r"(x[i]) : "memory");
    }
#elif KIND == 2 || KIND == 6
    // Once a round: written out, every overwritten register would get a new name.
#if KIND == 2
    asm volatile("st.local.u32 [%0], %1;" ::"r"(here), "r"(next) : "memory");
#endif
    asm volatile("mad.lo.u32 %0, %0, %1, %2;" : "+r"(next) : "r"(zero), "r"(at));
#else
#pragma unroll
    for (int i = 0; i < STEP; i++) {
#if KIND == 0
      asm volatile("ld.local.u32 %0, [%0];" : "+r"(next)::"memory");
#elif KIND == 1
      asm volatile("st.local.u32 [%0], %1;" ::"r"(next + zero), "r"(next) : "memory");
      asm volatile("ld.local.u32 %0, [%0];" : "+r"(next)::"memory");
#elif KIND == 3
      asm volatile("st.local.u32 [%0], %1;" ::"r"(here + 4 * i), "r"(x[i]) : "memory");
#else
      asm volatile("ld.local.u32 %0, [%1];" : "=r"(x[i]) : "r"(here + 4 * i) : "memory");
#endif
    }
#if KIND == 4
#pragma unroll
    for (int i = 0; i < STEP; i++) next ^= x[i];
#endif
#endif
  }
#if KIND == 7
  i64 issued = 0;
  for (int r = 0; r < rounds; r++) {
    spin(2000);
    __syncthreads();
    t0 = clk();
#pragma unroll
    for (int i = 0; i < BURST; i++) asm volatile("st.local.u32 [%0], %1;" ::"r"(at + 4 * i), "r"(x[i % STEP]) : "memory");
    issued += clk() - t0;
  }
  t0 = 0;
  i64 t1 = issued;
#else
  i64 t1 = clk();
#endif
#pragma unroll
  for (int i = 0; i < STEP; i++) next += x[i];
  keep(out, next);
  record(out, t0, t1);
}
