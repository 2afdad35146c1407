// One thread keeps FLIGHT tiles on their way that L2 adds to float32 numbers; a tile is BOX_ROWS rows x 128 bytes.
// Tile t of SM b is (b * REGION + t % REGION): every SM has its own.  TENSOR adds by tensor map, else by address.
__device__ __forceinline__ void tile_add(const TensorMap* map, int column, int row, u32 from) {
  asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%0, {%1, %2}], [%3];"
               ::"l"(map), "r"(column), "r"(row), "r"(from) : "memory");
}
__device__ __forceinline__ void bulk_add(void* to, u32 from, u32 bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
               ::"l"(to), "r"(from), "r"(bytes) : "memory");
}
BENCH(32) {
  extern __shared__ __align__(1024) unsigned char smem[];
  const u32 base = address(smem);
  const int tile = BOX_ROWS * 128;
  char* sums = data + size;
  for (int i = threadIdx.x; i < FLIGHT * BOX_ROWS * 32; i += 32) ((float*)smem)[i] = normal(i);
  fence_async();
  __syncwarp();
  i64 n0 = ns(), t0 = clk();
  if (threadIdx.x == 0) {
    for (int t = 0; t < rounds; t++) {
      const int place = blockIdx.x * REGION + t % REGION;
#if TENSOR
      tile_add(&map, 0, place * BOX_ROWS, base + (t % FLIGHT) * tile);
#else
      bulk_add(sums + (i64)place * tile, base + (t % FLIGHT) * tile, tile);
#endif
      asm volatile("cp.async.bulk.commit_group;" ::: "memory");
      asm volatile("cp.async.bulk.wait_group %0;" ::"n"(FLIGHT - 1) : "memory");
    }
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
  __syncwarp();
  i64 t1 = clk(), n1 = ns();
  record(out, t0, t1, n0, n1);
}
