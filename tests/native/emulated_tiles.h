// The instructions of AMX in software, after their description by Intel (Software Developer's
// Manual, volume 2: LDTILECFG, TILELOADD, TILESTORED, TILEZERO, TDPBSSD, TILERELEASE). Where a
// processor raises an exception, the program ends and says why; memory is touched as there, byte for
// byte, so that sanitizers see it. Included before what uses the instructions.
#pragma once

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace emulated {

constexpr int REGISTERS = 8, MOST_ROWS = 16, MOST_BYTES = 64;

// What LDTILECFG reads.
struct Config {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
static_assert(sizeof(Config) == 64, "as the processor has it");

struct Tile {
  uint8_t byte[MOST_ROWS][MOST_BYTES];
};

[[noreturn]] inline void refuse(const char* why) {
  fprintf(stderr, "tiles: %s\n", why);
  abort();
}
inline void demand(bool holds, const char* why) {
  if (!holds) refuse(why);
}

// A thread's own, as on a processor. A thread that ends with a shape set never released it.
struct State {
  Config config{};
  Tile tile[REGISTERS];

  bool in_use() const { return config.palette != 0; }
  ~State() { demand(!in_use(), "a thread ended that has not released them"); }
};
inline thread_local State state;

// How often a thread has multiplied, for those who want to know that it did.
inline thread_local int64_t products = 0;

inline void load_config(const void* from) {
  Config config;
  memcpy(&config, from, sizeof config);
  demand(config.palette <= 1, "a palette that there is not");
  for (uint8_t byte : config.reserved) demand(byte == 0, "a reserved byte that is not 0");
  demand(config.start_row == 0, "a start in the middle");
  for (int i = 0; i < 16; i++) {
    demand(i < REGISTERS || (!config.row_bytes[i] && !config.rows[i]), "a register too many");
    demand(config.row_bytes[i] <= MOST_BYTES, "more bytes a row than a register has");
    demand(config.rows[i] <= MOST_ROWS, "more rows than a register has");
    demand(!config.row_bytes[i] == !config.rows[i], "rows without bytes, or bytes without rows");
  }
  memset(state.tile, 0, sizeof state.tile);
  state.config = config;
}

inline void release() {
  state.config = Config{};
  memset(state.tile, 0, sizeof state.tile);
}

inline Tile& tile(int number) {
  demand(state.in_use(), "used without a shape");
  demand(number >= 0 && number < REGISTERS, "a register that there is not");
  demand(state.config.rows[number], "a register without a shape");
  return state.tile[number];
}
inline int rows(int number) { return state.config.rows[number]; }
inline int row_bytes(int number) { return state.config.row_bytes[number]; }

inline void zero(int number) { memset(&tile(number), 0, sizeof(Tile)); }

inline void load(int number, const void* base, int64_t stride) {
  Tile& to = tile(number);
  memset(&to, 0, sizeof to);  // what is outside the shape becomes 0
  for (int row = 0; row < rows(number); row++)
    memcpy(to.byte[row], static_cast<const char*>(base) + row * stride, row_bytes(number));
}

inline void store(int number, void* base, int64_t stride) {
  const Tile& from = tile(number);
  for (int row = 0; row < rows(number); row++)
    memcpy(static_cast<char*>(base) + row * stride, from.byte[row], row_bytes(number));
}

// c += a b: signed bytes, four of them at a time to sums of 32 bits, which wrap.
inline void multiply(int c, int a, int b) {
  demand(c != a && c != b && a != b, "a register used twice");
  Tile &sums = tile(c), &left = tile(a), &right = tile(b);
  demand(row_bytes(c) % 4 == 0 && row_bytes(a) % 4 == 0 && row_bytes(b) % 4 == 0, "part of a sum");
  demand(rows(a) == rows(c), "other rows on the left than of sums");
  demand(rows(b) == row_bytes(a) / 4, "other inputs on the left than on the right");
  demand(row_bytes(b) == row_bytes(c), "other outputs on the right than of sums");
  for (int m = 0; m < rows(c); m++)
    for (int n = 0; n < row_bytes(c) / 4; n++) {
      uint32_t sum;
      memcpy(&sum, sums.byte[m] + 4 * n, 4);
      for (int k = 0; k < row_bytes(a); k++)
        sum += static_cast<uint32_t>(static_cast<int8_t>(left.byte[m][k]) *
                                     static_cast<int8_t>(right.byte[k / 4][4 * n + k % 4]));
      memcpy(sums.byte[m] + 4 * n, &sum, 4);
    }
  products++;
}

// The same of pairs of bfloat16 to float: even and odd ones apart, then added to the sum.
inline void multiply_pairs(int c, int a, int b) {
  demand(c != a && c != b && a != b, "a register used twice");
  Tile &sums = tile(c), &left = tile(a), &right = tile(b);
  demand(rows(a) == rows(c), "other rows on the left than of sums");
  demand(rows(b) == row_bytes(a) / 4, "other inputs on the left than on the right");
  demand(row_bytes(b) == row_bytes(c), "other outputs on the right than of sums");
  auto number = [](const uint8_t* at) {
    uint32_t bits = uint32_t(at[0]) << 16 | uint32_t(at[1]) << 24;
    float value;
    memcpy(&value, &bits, 4);
    return value;
  };
  for (int m = 0; m < rows(c); m++)
    for (int n = 0; n < row_bytes(c) / 4; n++) {
      float sum, part[2] = {0, 0};
      memcpy(&sum, sums.byte[m] + 4 * n, 4);
      for (int k = 0; k < rows(b); k++)
        for (int odd = 0; odd < 2; odd++)
          part[odd] += number(left.byte[m] + 4 * k + 2 * odd) *
                       number(right.byte[k] + 4 * n + 2 * odd);
      sum += part[0] + part[1];
      memcpy(sums.byte[m] + 4 * n, &sum, 4);
    }
  products++;
}

}  // namespace emulated

#undef _tile_dpbf16ps
#define _tile_dpbf16ps(c, a, b) emulated::multiply_pairs(c, a, b)
#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbssd
#define _tile_loadconfig(from) emulated::load_config(from)
#define _tile_release() emulated::release()
#define _tile_zero(tile) emulated::zero(tile)
#define _tile_loadd(tile, base, stride) emulated::load(tile, base, stride)
#define _tile_stored(tile, base, stride) emulated::store(tile, base, stride)
#define _tile_dpbssd(c, a, b) emulated::multiply(c, a, b)
