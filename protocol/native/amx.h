// Many rows by tiles (AMX): the product of 16 rows of digits by 16 outputs, 64 inputs at a time.
//
// A tile register holds 16 rows of 64 bytes. The left side is rows of digits, as `Digits` has them.
// The right side is 64 inputs of a panel, whose order, 4 inputs of each of 16 outputs side by side,
// is the one that tiles want. Both are signed, so that nothing is in excess. What they add to is
// 16 rows of 16 sums. Sums come in fours, two tiles of rows by two panels: each tile that is loaded
// serves twice. Registers: 0 to 3 sums, 4 and 5 rows, 6 and 7 weights.
//
// Which shape registers have is state of a thread. It is set for one task and released behind it:
// nothing that a task calls, and no other code of the thread, meets it.
#pragma once

#include "tasks.h"

namespace VARIANT {

// Rows of a tile, below which a product does not go here.
constexpr int64_t TILE = 16;
constexpr int64_t PAIR = 2 * PANEL;  // outputs at once

// What LDTILECFG reads: all eight registers of palette 1 as large as they can be. Constant, as GCC's
// intrinsic does not say that it reads more than 8 bytes of it.
struct alignas(64) Shapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {TILE, TILE, TILE, TILE, TILE, TILE, TILE, TILE};
};
static_assert(sizeof(Shapes) == 64, "as the processor has it");
static constexpr Shapes SHAPES{};

template <int Tiles>
INLINE void zero_sums() {
  _tile_zero(0);
  _tile_zero(1);
  if (Tiles == 1) return;
  _tile_zero(2);
  _tile_zero(3);
}

// The sums of 16 rows lie from `upper` on, and of 16 others from `lower` on, `stride` bytes apart.
template <int Tiles>
INLINE void load_sums(const int32_t* upper, const int32_t* lower, int64_t stride) {
  _tile_loadd(0, upper, stride);
  _tile_loadd(1, upper + PANEL, stride);
  if (Tiles == 1) return;
  _tile_loadd(2, lower, stride);
  _tile_loadd(3, lower + PANEL, stride);
}

template <int Tiles>
INLINE void store_sums(int32_t* upper, int32_t* lower, int64_t stride) {
  _tile_stored(0, upper, stride);
  _tile_stored(1, upper + PANEL, stride);
  if (Tiles == 1) return;
  _tile_stored(2, lower, stride);
  _tile_stored(3, lower + PANEL, stride);
}

// Multiply 16 rows, and 16 others where there are two tiles, by two panels: y [rows][OUTPUTS].
template <int Tiles>
INLINE void multiply_tiles(const Digits& x, int64_t upper, int64_t lower, const int8_t* panels,
                           int32_t* y) {
  alignas(64) int32_t sums[Tiles * TILE][PAIR];
  int32_t* lower_sums = sums[(Tiles - 1) * TILE];
  zero_sums<Tiles>();
  for (int digit = x.digits - 1; digit >= 0; digit--) {
    // GCC's loads do not say that they read memory: what comes before has written it by here.
    __asm__ volatile("" ::: "memory");
    if (digit < x.digits - 1) load_sums<Tiles>(sums[0], lower_sums, sizeof sums[0]);
    const int8_t *a = x.row(digit, upper), *b = x.row(digit, lower);
    for (int64_t k = 0; k < x.deep; k += STEP) {
      _tile_loadd(4, a + k, x.stride);
      _tile_loadd(6, panels + k * PANEL, STEP);
      _tile_loadd(7, panels + (x.deep + k) * PANEL, STEP);
      _tile_dpbssd(0, 4, 6);
      _tile_dpbssd(1, 4, 7);
      if (Tiles == 1) continue;
      _tile_loadd(5, b + k, x.stride);
      _tile_dpbssd(2, 5, 6);
      _tile_dpbssd(3, 5, 7);
    }
    if (digit == 0) break;
    store_sums<Tiles>(sums[0], lower_sums, sizeof sums[0]);
    for (auto& row : sums)
      for (int64_t j = 0; j < PAIR; j += LANES) store(row + j, load<i32x16>(row + j) << 8);
  }
  store_sums<Tiles>(y + upper * OUTPUTS, y + lower * OUTPUTS, OUTPUTS * sizeof *y);
}

// As `multiply_many`, of at least TILE rows.
static __attribute__((noinline)) void multiply_tiled(const Digits& x, const int8_t* weight,
                                                     int64_t stride, int64_t in, int64_t first,
                                                     int64_t count, int32_t* y, int8_t* panels) {
  const int64_t wide = padded(count, PAIR), last = x.rows - TILE;
  pack_panels(weight, stride, in, first, count, wide / PANEL, x.deep, 0, panels);
  _tile_loadconfig(&SHAPES);
  for (int64_t row = 0; row < x.rows; row += 2 * TILE) {
    // The last tiles end with the last row and compute rows before it again: nothing is padded.
    const int64_t upper = row < last ? row : last;
    const int64_t lower = row + TILE < last ? row + TILE : last;
    for (int64_t j = 0; j < wide; j += PAIR) {
      if (upper < lower)
        multiply_tiles<2>(x, upper, lower, panels + j * x.deep, y + j);
      else
        multiply_tiles<1>(x, upper, lower, panels + j * x.deep, y + j);
    }
  }
  _tile_release();
}

}  // namespace VARIANT
