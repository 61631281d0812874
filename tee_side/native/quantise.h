// Around a product of integers: scaling, rounding, pads, and the check of the result.
#pragma once

#include "../../protocol/native/keystream.h"
#include "../../protocol/native/product.h"

namespace VARIANT {

template <class T>
INLINE void encode_row(const T* x, int64_t in, float scale, const int32_t* r, int32_t* q,
                       int32_t* sent) {
  each_vector(in, [&](int64_t k, int64_t count) {
    i32x16 rounded = round_to_integers(load_floats(x + k, count) / scale);
    store_integers(q + k, rounded, count);
    if (r) store_integers(sent + k, rounded + load_integers(r + k, count), count);
  });
}

static bool encode(Float type, const void* x, int64_t rows, int64_t in, float largest,
                   float* scales, const int32_t* r, const Stream* streams, int64_t parts,
                   int32_t* q, int32_t* sent, Pool* pool) {
  // Nothing is sent without its pad.
  if (streams && !DRAWS) return false;
  bool finite = true;
  // A row of r, which stays in the thread's own cache.
  const int64_t bytes = streams ? in * (int64_t)sizeof *r : 0;
  with_type(type, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    const int64_t work = rows * in * (1 + AES_WORK * parts);
    share(pool, rows, work, bytes, [&](int64_t row, char* scratch) {
      int64_t at = row * in;
      int32_t* drawn = (int32_t*)scratch;
      if (streams) draw_row(streams + row * parts, parts, in, drawn);
      scales[row] = own_scale((const T*)x + at, in, largest);
      // NaN and infinity have the largest exponent there is.
      if (bits_of<uint32_t>(scales[row]) >= 0x7f800000u)
        __atomic_store_n(&finite, false, __ATOMIC_RELAXED);
      encode_row((const T*)x + at, in, scales[row], streams ? drawn : r ? r + at : r, q + at, sent + at);
    });
  });
  return finite;
}

static void expect(const int32_t* q, int64_t rows, int64_t in, const int32_t* low,
                   const int32_t* high, uint64_t* expected, Pool* pool) {
  share(pool, rows, rows * in, 0, [=](int64_t row, char*) {
    i64x8 lows[CHECKS] = {};
    i32x16 highs[CHECKS] = {};
    each_vector(in, [&](int64_t k, int64_t count) {
      i32x16 x = load_integers(q + row * in + k, count);
      for (int c = 0; c < CHECKS; c++) {
        lows[c] = multiply_wide(lows[c], x, load_integers(low + c * in + k, count));
        // Times 2^32: what is above 32 bits falls out modulo 2^64.
        highs[c] = highs[c] + x * load_integers(high + c * in + k, count);
      }
    });
    for (int c = 0; c < CHECKS; c++) {
      uint32_t above = 0;
      for (int i = 0; i < LANES; i++) above += (uint32_t)highs[c][i];
      expected[row * CHECKS + c] = sum(lows[c]) + ((uint64_t)above << 32);
    }
  });
}

template <class T>
INLINE bool decode_row(const int32_t* y, const int32_t* u, int64_t outs, const float* scale,
                       const float* factor, const T* bias, T* out, const int32_t* vectors,
                       const uint64_t* expected) {
  i64x8 sums[CHECKS] = {};
  each_vector(outs, [&](int64_t j, int64_t count) {
    i32x16 plain = load_once(y + j, count);
    if (u) plain = plain - load_integers(u + j, count);
    if (vectors)
      for (int c = 0; c < CHECKS; c++)
        sums[c] = multiply_wide(sums[c], plain, load_integers(vectors + c * outs + j, count));
    if (!out) return;
    f32x16 scaled = to_floats(plain) * *scale * load_floats(factor + j, count);
    scaled = rounded_to(out, scaled);
    if (bias) scaled = scaled + load_floats(bias + j, count);
    store_floats(out + j, scaled, count);
  });
  bool same = true;
  if (vectors)
    for (int c = 0; c < CHECKS; c++) same &= sum(sums[c]) == expected[c];
  return same;
}

static bool decode(Float type, const int32_t* y, const int32_t* u, int64_t rows, int64_t outs,
                   const float* scales, const float* factor, const void* bias, void* out,
                   const int32_t* vectors, const uint64_t* expected, Pool* pool) {
  bool wrong = false;
  with_type(type, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    share(pool, rows, rows * outs, 0, [&](int64_t row, char*) {
      int64_t at = row * outs;
      if (!decode_row(y + at, u ? u + at : u, outs, scales ? scales + row : scales, factor,
                      (const T*)bias, out ? (T*)out + at : nullptr, vectors,
                      vectors ? expected + row * CHECKS : nullptr))
        __atomic_store_n(&wrong, true, __ATOMIC_RELAXED);
    });
  });
  return !wrong;
}

}  // namespace VARIANT
