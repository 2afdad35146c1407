// Tensor memory to registers and back, four warps, 32 lanes x 32 columns an instruction (4 KB); LATENCY: one load and
// its wait at a time.  STORE 1 writes.
#define LIST "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}"
#define EACH(F) F(0),F(1),F(2),F(3),F(4),F(5),F(6),F(7),F(8),F(9),F(10),F(11),F(12),F(13),F(14),F(15),F(16),F(17),F(18), \
                F(19),F(20),F(21),F(22),F(23),F(24),F(25),F(26),F(27),F(28),F(29),F(30),F(31)
#define OUT(i) "=r"(v[i])
#define IN(i) "r"(v[i])
BENCH(128) {
  __shared__ u32 tmem_store;
  if (warp_index() == 0)
    asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], 512;" ::"r"(address(&tmem_store)) : "memory");
  __syncthreads();
  const u32 at = tmem_store + (warp_index() << 21);
  u32 v[32];
#pragma unroll
  for (int i = 0; i < 32; i++) v[i] = hash(threadIdx.x * 32 + i);
  asm volatile("tcgen05.st.sync.aligned.32x32b.x32.b32 [%32], " LIST ";" ::EACH(IN), "r"(at) : "memory");
  asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory");
  __syncthreads();
  i64 t0 = clk();
#pragma unroll 1
  for (int r = 0; r < rounds; r++) {
#pragma unroll
    for (int u = 0; u < 4; u++) {
#if STORE
      asm volatile("tcgen05.st.sync.aligned.32x32b.x32.b32 [%32], " LIST ";" ::EACH(IN), "r"(at + u * 32) : "memory");
#else
      asm volatile("tcgen05.ld.sync.aligned.32x32b.x32.b32 " LIST ", [%32];" : EACH(OUT) : "r"(at + u * 32) : "memory");
#endif
#if LATENCY
      asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
      asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory");
#endif
    }
  }
  asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
  asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory");
  i64 t1 = clk();
  u32 z = 0;
#pragma unroll
  for (int i = 0; i < 32; i++) z += v[i];
  keep(out, z);
  record(out, t0, t1);
  __syncthreads();
  if (warp_index() == 0) {
    asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;");
    asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, 512;" ::"r"(tmem_store));
  }
}
