// One tile copy at a time: issue to the barrier's release in the warp that waits.  A tile is BOXES boxes of BOX_ROWS
// rows x 128 bytes.  `size` is the first tile, `rounds` the number; every copy's cycles follow the records.
BENCH(32) {
  extern __shared__ __align__(1024) unsigned char smem[];
  __shared__ __align__(8) u64 bar_store;
  const u32 base = address(smem), bar = address(&bar_store);
  if (threadIdx.x == 0) {
    mbar_init(bar, 1);
    fence_init();
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
  }
  __syncwarp();
  i64* tail = out + RECORD * (i64)gridDim.x;
  for (int r = 0; r < rounds; r++) {
    u32 t0 = clk32(), t1 = 0;
    if (threadIdx.x == 0) {
      mbar_expect(bar, BOXES * BOX_ROWS * 128);
#pragma unroll
      for (int b = 0; b < BOXES; b++)
        tile_load(base + b * BOX_ROWS * 128, &map, 0, (int)(((size + r) * BOXES + b) * BOX_ROWS), bar);
      t1 = clk32();
    }
    __syncwarp();
    mbar_wait(bar, r & 1);
    u32 t2 = clk32();
    if (threadIdx.x == 0) {
      tail[2 * r] = t2 - t0;
      tail[2 * r + 1] = t1 - t0;
    }
    spin(200);
  }
  record(out, 0, 1);
}
