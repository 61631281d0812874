// Exact products of integers by int8 weights.
//
// An input is the sum of balanced base-256 digits, d_0 + 256 d_1 + ...; a product goes through the
// digits from the highest to the lowest, y = 256 y + d_i w, so that one accumulator serves them
// all. A few rows meet the weight as it lies in memory, which is read once; for more, blocks of it
// are packed into panels of 16 outputs, 4 inputs of each side by side, that stay in the L2 cache;
// and where there are tiles (`WITH_AMX`, amx.h), these go through them.
#pragma once

#include "tasks.h"

namespace VARIANT {

// Inputs that one instruction multiplies and adds up; and that digits are padded to.
constexpr int64_t QUAD = 4;
constexpr int64_t STEP = 64;
constexpr int64_t PANEL = 16;
constexpr int64_t PANELS = 4;
// Outputs of one task.
constexpr int64_t OUTPUTS = PANEL * PANELS;
// Rows times digits up to which the weight is not packed.
constexpr int64_t FEW = 16;

// What turns an element into the bytes d_i + 128, lowest first, by one addition, and another one
// into d_i.
constexpr uint32_t BALANCE = 0x80808080u;

// ---- 64 inputs of one output at a time ---------------------------------------------------------------
// `Dot` is a sum in the making. VNNI multiplies unsigned by signed bytes: there weights are taken
// plus 128, and 128 times the sum of a row's digits is taken away at the end (`EXCESS`).

#if defined(WITH_AVX512)

constexpr int32_t EXCESS = 128;
constexpr int ROWS_AT_ONCE = 8, PANELS_AT_ONCE = 2;

struct Dot {
  __m512i lanes;
};
typedef __m512i Weights;
INLINE Dot no_dot() { return {_mm512_setzero_si512()}; }
INLINE Weights weights(const int8_t* from) {
  return _mm512_xor_si512(_mm512_loadu_si512(from), _mm512_set1_epi32((int)BALANCE));
}
INLINE void add(Dot& dot, const int8_t* x, Weights w) {
  dot.lanes = _mm512_dpbusd_epi32(dot.lanes, w, _mm512_loadu_si512(x));
}
INLINE int32_t total(const Dot& dot) { return _mm512_reduce_add_epi32(dot.lanes); }

// A panel's row: 16 outputs by one quad, and what 16 lanes add up.
struct Sum {
  __m512i lanes;
};
typedef __m512i Quads;
INLINE Sum no_sum() { return {_mm512_setzero_si512()}; }
INLINE Weights packed(const int8_t* from) { return _mm512_loadu_si512(from); }
INLINE Quads quads(const int8_t* x) {
  int32_t four;
  memcpy(&four, x, 4);
  return _mm512_set1_epi32(four);
}
INLINE void add(Sum& sum, Quads x, Weights w) {
  // With the intrinsic GCC 12 copies each of the 16 sums before and after: 72 % of the peak, not 99.
  asm("vpdpbusd %2, %1, %0" : "+v"(sum.lanes) : "v"(w), "v"(x));
}
INLINE i32x16 total(const Sum& sum) { return {{(i32x16::Part)sum.lanes}}; }

#elif defined(WITH_AVX2)

// Products of bytes saturate where they are added as 16 bits, so both go to 16 bits before.
constexpr int32_t EXCESS = 0;
constexpr int ROWS_AT_ONCE = 2, PANELS_AT_ONCE = 1;

struct Dot {
  __m256i lanes;
};
struct Weights {
  __m256i words[4];
};
INLINE __m256i words(const int8_t* from) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)from));
}
INLINE Dot no_dot() { return {_mm256_setzero_si256()}; }
INLINE Weights weights(const int8_t* from) {
  return {{words(from), words(from + 16), words(from + 32), words(from + 48)}};
}
INLINE void add(Dot& dot, const int8_t* x, const Weights& w) {
  for (int i = 0; i < 4; i++)
    dot.lanes = _mm256_add_epi32(dot.lanes, _mm256_madd_epi16(words(x + 16 * i), w.words[i]));
}
INLINE int32_t total(const Dot& dot) {
  int32_t lanes[8], sum = 0;
  memcpy(lanes, &dot.lanes, sizeof lanes);
  for (int i = 0; i < 8; i++) sum += lanes[i];
  return sum;
}

// A lane has two halves until `total`.
struct Sum {
  __m256i halves[4];
};
typedef __m256i Quads;
INLINE Sum no_sum() {
  __m256i zero = _mm256_setzero_si256();
  return {{zero, zero, zero, zero}};
}
INLINE Weights packed(const int8_t* from) { return weights(from); }
INLINE Quads quads(const int8_t* x) {
  int32_t four;
  memcpy(&four, x, 4);
  return _mm256_cvtepi8_epi16(_mm_set1_epi32(four));
}
INLINE void add(Sum& sum, Quads x, const Weights& w) {
  for (int i = 0; i < 4; i++)
    sum.halves[i] = _mm256_add_epi32(sum.halves[i], _mm256_madd_epi16(x, w.words[i]));
}
INLINE i32x16 total(const Sum& sum) {
  i32x16 out;
  for (int i = 0; i < 2; i++) {  // hadd works within 128 bits: put the quarters in order
    __m256i pairs = _mm256_hadd_epi32(sum.halves[2 * i], sum.halves[2 * i + 1]);
    out.part[i] = (i32x16::Part)_mm256_permute4x64_epi64(pairs, 0xd8);
  }
  return out;
}

#else

constexpr int32_t EXCESS = 0;
constexpr int ROWS_AT_ONCE = 1, PANELS_AT_ONCE = 1;

struct Dot {
  int32_t sum;
};
typedef const int8_t* Weights;
INLINE Dot no_dot() { return {0}; }
INLINE Weights weights(const int8_t* from) { return from; }
INLINE void add(Dot& dot, const int8_t* x, Weights w) {
  for (int i = 0; i < STEP; i++) dot.sum += (int16_t)x[i] * (int16_t)w[i];
}
INLINE int32_t total(const Dot& dot) { return dot.sum; }

struct Sum {
  int32_t lanes[PANEL];
};
typedef const int8_t* Quads;
INLINE Sum no_sum() { return Sum{}; }
INLINE Weights packed(const int8_t* from) { return from; }
INLINE Quads quads(const int8_t* x) { return x; }
INLINE void add(Sum& sum, Quads x, Weights w) {
  for (int i = 0; i < PANEL * QUAD; i++) sum.lanes[i / QUAD] += (int16_t)x[i % QUAD] * (int16_t)w[i];
}
INLINE i32x16 total(const Sum& sum) { return load<i32x16>(sum.lanes); }

#endif

// ---- digits ------------------------------------------------------------------------------------------

// Rows of digits: int8 [digits][rows][stride], the lowest first, zeros behind `in`; and what is to be
// taken away from every output of a row. Rows are an odd number of cache lines apart: a power of two
// has all of them in a few sets of a cache.
struct Digits {
  int8_t* bytes;
  int32_t* excess;
  int64_t rows, deep, stride;
  int digits;

  static int64_t size(int64_t rows, int64_t in, int digits) {
    return rows * digits * (padded(in, STEP) | STEP) + rows * (int64_t)sizeof(int32_t);
  }
  Digits(char* memory, int64_t rows, int64_t in, int digits)
      : bytes((int8_t*)memory), rows(rows), deep(padded(in, STEP)), stride(deep | STEP), digits(digits) {
    excess = (int32_t*)(memory + rows * digits * stride);
  }
  int8_t* row(int digit, int64_t row) const { return bytes + (digit * rows + row) * stride; }
};

INLINE void split_row(const int32_t* q, int64_t in, const Digits& to, int64_t row) {
  uint32_t sum = 0;
  for (int digit = 0; digit < to.digits; digit++) {
    int8_t* bytes = to.row(digit, row);
    uint32_t of_digit = 0;
    for (int64_t k = 0; k < in; k++) {
      uint32_t element;  // that a request brought, where nothing aligns it
      memcpy(&element, q + k, sizeof element);
      uint8_t byte = (uint8_t)(((element + BALANCE) ^ BALANCE) >> (8 * digit));
      bytes[k] = (int8_t)byte;
      of_digit += (uint32_t)(int32_t)(int8_t)byte;
    }
    memset(bytes + in, 0, to.deep - in);
    sum += of_digit << (8 * digit);
  }
  to.excess[row] = (int32_t)(sum * (uint32_t)EXCESS);
}

// ---- few rows ----------------------------------------------------------------------------------------

// Sums of `Lines` rows of digits by one output. Outputs come one after the other, as they lie in
// memory: several streams at once are read at half the speed of one. A page ahead it is asked for,
// as what a processor fetches by itself ends with a page: 8 rows take five eighths of the time.
template <int Lines>
INLINE void multiply_lines(const int8_t* x, int64_t stride, const int8_t* weight, int64_t in,
                           int32_t* sums) {
  Dot dots[Lines];
  for (int i = 0; i < Lines; i++) dots[i] = no_dot();
  int64_t k = 0;
  for (; k + STEP <= in; k += STEP) {
    __builtin_prefetch(weight + k + 4096);
    Weights w = weights(weight + k);
    for (int i = 0; i < Lines; i++) add(dots[i], x + i * stride + k, w);
  }
  if (k < in) {
    int8_t rest[STEP] = {};
    memcpy(rest, weight + k, in - k);
    Weights w = weights(rest);
    for (int i = 0; i < Lines; i++) add(dots[i], x + i * stride + k, w);
  }
  for (int i = 0; i < Lines; i++) sums[i] = total(dots[i]);
}

// Multiply all rows by the outputs first ... first + count - 1: y [rows][OUTPUTS].
template <int Lines>
INLINE void multiply_few(const Digits& x, const int8_t* weight, int64_t stride, int64_t in,
                         int64_t first, int64_t count, int32_t* y) {
  for (int64_t j = 0; j < count; j++)
    for (int64_t line = 0; line < x.rows * x.digits; line += Lines) {
      int32_t sums[Lines];
      multiply_lines<Lines>(x.bytes + line * x.stride, x.stride, weight + (first + j) * stride, in,
                            sums);
      for (int i = 0; i < Lines; i++) {
        const int64_t digit = (line + i) / x.rows, row = (line + i) % x.rows;
        int32_t& to = y[row * OUTPUTS + j];
        uint32_t one = (uint32_t)sums[i] << (8 * digit);
        to = (int32_t)(digit ? (uint32_t)to + one : one - (uint32_t)x.excess[row]);
      }
    }
}

// ---- many rows ---------------------------------------------------------------------------------------

// Pack `count` outputs, at most 16, into a panel: [deep / 4][16][4]. Bits of `flip` are flipped.
INLINE void pack_panel(const int8_t* weight, int64_t stride, int64_t in, int64_t count,
                       int64_t deep, uint32_t flip, int8_t* to) {
  for (int64_t k = 0; k < deep; k += STEP) {
    const bool whole = count == PANEL && k + STEP <= in;
    int8_t edge[PANEL][STEP];
    if (!whole) {
      memset(edge, 0, sizeof edge);
      int64_t left = in - k < STEP ? in - k : STEP;
      for (int64_t j = 0; j < count; j++) memcpy(edge[j], weight + j * stride + k, left);
    }
    i32x16 rows[LANES];
    for (int64_t j = 0; j < PANEL; j++) {
      // The next panel in the order of memory: outputs are often a power of two apart, and 16
      // streams of that stride push one another out of the cache.
      __builtin_prefetch(weight + PANEL * stride + k * PANEL + j * STEP);
      rows[j] = load<i32x16>(whole ? weight + j * stride + k : edge[j]);
      if (flip) rows[j] = bits_of<i32x16>(bits_of<u32x16>(rows[j]) ^ broadcast(flip));
    }
    transpose(rows);
    for (int64_t i = 0; i < LANES; i++) store(to + (k + i * QUAD) * PANEL, rows[i]);
  }
}

// Pack the outputs first ... first + count - 1, and zeros behind them, into `panels`.
INLINE void pack_panels(const int8_t* weight, int64_t stride, int64_t in, int64_t first,
                        int64_t count, int64_t panels, int64_t deep, uint32_t flip, int8_t* to) {
  for (int64_t p = 0; p < panels; p++) {
    int64_t left = count - p * PANEL;
    pack_panel(weight + (first + p * PANEL) * stride, stride, in, left < PANEL ? left : PANEL,
               deep, flip, to + p * PANEL * deep);
  }
}

template <int Rows, int Panels>
INLINE void multiply_block(const Digits& x, int64_t row, const int8_t* panel, int32_t* y) {
  i32x16 sums[Rows][Panels];
  for (int i = 0; i < Rows; i++)
    for (int p = 0; p < Panels; p++) sums[i][p] = broadcast<int32_t>(0);
  for (int digit = x.digits - 1; digit >= 0; digit--) {
    Sum some[Rows][Panels];
    for (int i = 0; i < Rows; i++)
      for (int p = 0; p < Panels; p++) some[i][p] = no_sum();
    const int8_t* from = x.row(digit, row);
    for (int64_t k = 0; k < x.deep; k += QUAD)
      for (int p = 0; p < Panels; p++) {
        Weights w = packed(panel + (p * x.deep + k) * PANEL);
        for (int i = 0; i < Rows; i++) add(some[i][p], quads(from + i * x.stride + k), w);
      }
    for (int i = 0; i < Rows; i++)
      for (int p = 0; p < Panels; p++) sums[i][p] = (sums[i][p] << 8) + total(some[i][p]);
  }
  for (int i = 0; i < Rows; i++)
    for (int p = 0; p < Panels; p++)
      store(y + (row + i) * OUTPUTS + p * PANEL, sums[i][p] - x.excess[row + i]);
}

// Compiled once: inlined into a kernel with more around it, its sums do not stay in registers.
static __attribute__((noinline)) void multiply_many(const Digits& x, const int8_t* weight,
                                                    int64_t stride, int64_t in, int64_t first,
                                                    int64_t count, int32_t* y, int8_t* panels) {
  const int64_t used = (count + PANEL - 1) / PANEL;
  pack_panels(weight, stride, in, first, count, used, x.deep, EXCESS ? BALANCE : 0, panels);
  int64_t row = 0;
  for (; row + ROWS_AT_ONCE <= x.rows; row += ROWS_AT_ONCE) {
    int64_t p = 0;
    for (; p + PANELS_AT_ONCE <= used; p += PANELS_AT_ONCE)
      multiply_block<ROWS_AT_ONCE, PANELS_AT_ONCE>(x, row, panels + p * PANEL * x.deep,
                                                   y + p * PANEL);
    for (; p < used; p++)
      multiply_block<ROWS_AT_ONCE, 1>(x, row, panels + p * PANEL * x.deep, y + p * PANEL);
  }
  for (; row < x.rows; row++)
    for (int64_t p = 0; p < used; p++)
      multiply_block<1, 1>(x, row, panels + p * PANEL * x.deep, y + p * PANEL);
}

}  // namespace VARIANT

#if defined(WITH_AMX)
#include "amx.h"
#endif

namespace VARIANT {

// ---- kernels -----------------------------------------------------------------------------------------

// Multiply in tasks of OUTPUTS; finish(row, first output, how many, sums) gets what comes out.
template <class Finish>
static void multiply(const Digits& x, const int8_t* weight, int64_t stride, int64_t in,
                     int64_t outs, Pool* pool, Finish&& finish) {
  const bool few = x.rows * x.digits <= FEW;
  const int64_t sums = x.rows * OUTPUTS * (int64_t)sizeof(int32_t);
  const int64_t scratch = padded(sums, 64) + (few ? 0 : OUTPUTS * x.deep);
  // A byte of a weight is a quarter of the work that an element of a pass is, for a few rows.
  const int64_t work = outs * in * (x.rows * x.digits + FEW) / 64;
  share(pool, (outs + OUTPUTS - 1) / OUTPUTS, work, scratch, [&](int64_t task, char* memory) {
    const int64_t first = task * OUTPUTS;
    const int64_t count = outs - first < OUTPUTS ? outs - first : OUTPUTS;
    int32_t* y = (int32_t*)memory;
    const int64_t lines = x.rows * x.digits;
    if (few && lines % 8 == 0)
      multiply_few<8>(x, weight, stride, in, first, count, y);
    else if (few && lines % 4 == 0)
      multiply_few<4>(x, weight, stride, in, first, count, y);
    else if (few && lines % 3 == 0)
      multiply_few<3>(x, weight, stride, in, first, count, y);
    else if (few && lines % 2 == 0)
      multiply_few<2>(x, weight, stride, in, first, count, y);
    else if (few)
      multiply_few<1>(x, weight, stride, in, first, count, y);
#if defined(WITH_AMX)
    else if (x.rows >= TILE)
      multiply_tiled(x, weight, stride, in, first, count, y, (int8_t*)memory + padded(sums, 64));
#endif
    else
      multiply_many(x, weight, stride, in, first, count, y, (int8_t*)memory + padded(sums, 64));
    for (int64_t row = 0; row < x.rows; row++) finish(row, first, count, y + row * OUTPUTS);
  });
}

static void product(const int32_t* q, int64_t rows, int64_t in, int digits, const int8_t* weight,
                    int64_t stride, int64_t outs, int32_t* y, Pool* pool) {
  Digits x(pool_memory(pool, Digits::size(rows, in, digits)), rows, in, digits);
  share(pool, rows, rows * in * digits, 0,
        [&](int64_t row, char*) { split_row(q + row * in, in, x, row); });
  multiply(x, weight, stride, in, outs, pool,
           [=](int64_t row, int64_t first, int64_t count, const int32_t* sums) {
             memcpy(y + row * outs + first, sums, count * sizeof(int32_t));
           });
}

}  // namespace VARIANT
