// One thread keeps FLIGHT tile copies in flight; a tile is BOX_ROWS rows x 128 bytes.  STORE writes tiles instead.
// Tile t of SM b is (b * STRIDE + t % REGION) % TILES: STRIDE 0 makes all SMs read the same tiles at the same time.
BENCH(32) {
  extern __shared__ __align__(1024) unsigned char smem[];
  __shared__ __align__(8) u64 bars[8];
  const u32 base = address(smem);
  const i64 first = (i64)blockIdx.x * STRIDE;
  if (threadIdx.x == 0) {
    for (int i = 0; i < FLIGHT; i++) mbar_init(address(&bars[i]), 1);
    fence_init();
  }
  for (int i = threadIdx.x; i < FLIGHT * BOX_ROWS * 32; i += 32) ((u32*)smem)[i] = hash(i);
  fence_async();
  __syncwarp();
  i64 n0 = ns(), t0 = clk();
  if (threadIdx.x == 0) {
#if STORE
    for (int t = 0; t < rounds; t++) {
      tile_store(&map, 0, (int)(((first + t % REGION) % TILES) * BOX_ROWS), base + (t % FLIGHT) * BOX_ROWS * 128);
      asm volatile("cp.async.bulk.commit_group;" ::: "memory");
      asm volatile("cp.async.bulk.wait_group %0;" ::"n"(FLIGHT - 1) : "memory");
    }
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
#else
    for (int t = 0; t < rounds + FLIGHT; t++) {
      const int slot = t % FLIGHT;
      const u32 bar = address(&bars[slot]);
      if (t >= FLIGHT) mbar_wait(bar, (t / FLIGHT - 1) & 1);
      if (t < rounds) {
        mbar_expect(bar, BOX_ROWS * 128);
        tile_load(base + slot * BOX_ROWS * 128, &map, 0, (int)(((first + t % REGION) % TILES) * BOX_ROWS), bar);
      }
    }
#endif
  }
  __syncwarp();
  i64 t1 = clk(), n1 = ns();
  record(out, t0, t1, n0, n1);
}
