// Attention's products by tiles (AMX): 16 queries by 64 lanes, 16 pairs of bfloat16 at a time.
//
// Packed operands lie as tiles want them: a query is a row of pairs, and a row of lanes has one pair
// of each. A tile's sums of a query depend on no other, so one query takes the same way as 16.
// Registers: 0 to 3 sums, 4 queries, 5 lanes. Their shape is set and released here (amx.h).
#pragma once

#include "../../protocol/native/product.h"

namespace VARIANT {

constexpr int64_t TILE_PAIRS = 16;
constexpr int TILE_VECTORS = 4;
static_assert(PANEL == LANES, "sums of queries lie as those of rows");

// Registers for 1 to 16 queries. Constant, as `SHAPES` is.
struct QueryShapes {
  Shapes of[TILE + 1];
  constexpr QueryShapes() : of() {
    for (int queries = 1; queries <= TILE; queries++)
      for (int i = 0; i <= TILE_VECTORS; i++) of[queries].rows[i] = (uint8_t)queries;
  }
};
static constexpr QueryShapes QUERY_SHAPES{};

INLINE void multiply_pairs(const uint32_t* one, int64_t one_bytes, const uint32_t* lanes,
                           int64_t lanes_bytes) {
  _tile_loadd(4, one, one_bytes);
  _tile_loadd(5, lanes, lanes_bytes);
  _tile_dpbf16ps(0, 4, 5);
  _tile_loadd(5, lanes + LANES, lanes_bytes);
  _tile_dpbf16ps(1, 4, 5);
  _tile_loadd(5, lanes + 2 * LANES, lanes_bytes);
  _tile_dpbf16ps(2, 4, 5);
  _tile_loadd(5, lanes + 3 * LANES, lanes_bytes);
  _tile_dpbf16ps(3, 4, 5);
}

// As `multiply_queries`, of whole tiles: a depth of TILE_PAIRS and as many vectors as TILE_VECTORS,
// or multiples of these.
static __attribute__((noinline)) void multiply_queries_tiled(
    int64_t queries, const uint32_t* one, int64_t one_stride, const uint32_t* lanes, int64_t wide,
    int64_t depth, float* out, int64_t out_stride, int vectors, bool add) {
  const int64_t one_bytes = one_stride * 4, lanes_bytes = wide * 4, out_bytes = out_stride * 4;
  int64_t shaped = 0;
  // GCC's loads do not say that they read memory: what comes before has written it by here.
  __asm__ volatile("" ::: "memory");
  for (int64_t i = 0; i < queries; i += TILE) {
    const int64_t here = queries - i < TILE ? queries - i : TILE;
    if (here != shaped) _tile_loadconfig(&QUERY_SHAPES.of[shaped = here]);
    for (int v = 0; v < vectors; v += TILE_VECTORS) {
      // Only moved there: registers know no type.
      int32_t* sums = (int32_t*)(out + i * out_stride + v * LANES);
      if (add)
        load_sums<2>(sums, sums + 2 * PANEL, out_bytes);
      else
        zero_sums<2>();
      for (int64_t k = 0; k < depth; k += TILE_PAIRS)
        multiply_pairs(one + i * one_stride + k, one_bytes, lanes + k * wide + v * LANES, lanes_bytes);
      store_sums<2>(sums, sums + 2 * PANEL, out_bytes);
    }
  }
  _tile_release();
}

}  // namespace VARIANT
