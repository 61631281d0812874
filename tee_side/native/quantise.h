// Around a product of integers: scaling, rounding, pads, and the check of the result.
#pragma once

#include "../../protocol/native/keystream.h"
#include "../../protocol/native/product.h"

namespace VARIANT {

// Return the scale under which a row fits integers up to `limit`: its largest element / limit.
template <class T>
INLINE float own_scale(const T* x, int64_t in, float limit) {
  // Of floats that are not negative the largest has the largest bits; NaN is larger still.
  i32x16 most = broadcast<int32_t>(0);
  each_vector(in, [&](int64_t k, int64_t count) {
    i32x16 bits = bits_of<i32x16>(absolute(load_floats(x + k, count)));
    most = choose(bits > most, bits, most);
  });
  int32_t bits = 0;
  for (int i = 0; i < LANES; i++) bits = most[i] > bits ? most[i] : bits;
  const float smallest = 1.17549435e-38f;  // the smallest normal number: a row of zeros stays one
  float scale = bits_of<float>(bits) / limit;
  return scale < smallest ? smallest : scale;
}

// Round a row to q under its own scale, and add r to it for `sent`, where these are; say whether it
// is finite.
template <class T>
INLINE bool encode_row(const T* x, int64_t in, float largest, float* scale, const int32_t* r,
                       int32_t* q, int32_t* sent) {
  const float own = *scale = own_scale(x, in, largest);
  each_vector(in, [&](int64_t k, int64_t count) {
    i32x16 rounded = round_to_integers(load_floats(x + k, count) / own);
    if (sent) store_integers(sent + k, r ? rounded + load_integers(r + k, count) : rounded, count);
    store_integers(q + k, rounded, count);
  });
  // NaN and infinity have the largest exponent there is.
  return bits_of<uint32_t>(own) < 0x7f800000u;
}

INLINE void expect_row(const int32_t* q, int64_t in, const int32_t* low, const int32_t* high,
                       uint64_t* expected) {
  i64x8 lows[CHECKS] = {};
  i32x16 highs[CHECKS] = {};
  each_vector(in, [&](int64_t k, int64_t count) {
    i32x16 x = load_integers(q + k, count);
    for (int c = 0; c < CHECKS; c++) {
      lows[c] = multiply_wide(lows[c], x, load_integers(low + c * in + k, count));
      // Times 2^32: what is above 32 bits falls out modulo 2^64.
      if (high) highs[c] = highs[c] + x * load_integers(high + c * in + k, count);
    }
  });
  for (int c = 0; c < CHECKS; c++) {
    uint32_t above = 0;
    for (int i = 0; i < LANES; i++) above += (uint32_t)highs[c][i];
    expected[c] = sum(lows[c]) + ((uint64_t)above << 32);
  }
}

static bool encode(Float type, const void* x, int64_t rows, int64_t in, float largest,
                   float* scales, const int32_t* r, const Stream* streams, int64_t parts,
                   const int32_t* low, const int32_t* high, uint64_t* expected, int32_t* sent,
                   Pool* pool) {
  // Nothing is sent without its pad.
  if (streams && !DRAWS) return false;
  bool finite = true;
  with_type(type, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    const int64_t work = rows * in * (1 + AES_WORK * parts);
    // A row of r and then of q, which stays in the thread's own cache.
    share(pool, rows, work, in * (int64_t)sizeof *sent, [&](int64_t row, char* scratch) {
      int64_t at = row * in;
      int32_t* own = (int32_t*)scratch;
      if (streams) draw_row(streams + row * parts, parts, in, own);
      if (!encode_row((const T*)x + at, in, largest, scales + row, streams ? own : r ? r + at : r,
                      own, sent + at))
        __atomic_store_n(&finite, false, __ATOMIC_RELAXED);
      if (low) expect_row(own, in, low, high, expected + row * CHECKS);
    });
  });
  return finite;
}

static void expect(const int32_t* q, int64_t rows, int64_t in, const int32_t* low,
                   const int32_t* high, uint64_t* expected, Pool* pool) {
  share(pool, rows, rows * in, 0, [=](int64_t row, char*) {
    expect_row(q + row * in, in, low, high, expected + row * CHECKS);
  });
}

template <class T>
INLINE void scale_back(const i32x16& plain, int64_t j, int64_t count, float scale,
                       const float* factor, const T* bias, T* out) {
  f32x16 scaled = to_floats(plain) * scale * load_floats(factor + j, count);
  scaled = rounded_to(out, scaled);
  if (bias) scaled = scaled + load_floats(bias + j, count);
  store_floats(out + j, scaled, count);
}

template <class T>
INLINE bool decode_row(const int32_t* y, const int32_t* u, int64_t outs, float scale,
                       const float* factor, const T* bias, T* out, const int32_t* vectors,
                       const uint64_t* expected) {
  i64x8 sums[CHECKS] = {};
  each_vector(outs, [&](int64_t j, int64_t count) {
    i32x16 plain = load_once(y + j, count);
    if (u) plain = plain - load_once(u + j, count);
    if (vectors)
      for (int c = 0; c < CHECKS; c++)
        sums[c] = multiply_wide(sums[c], plain, load_integers(vectors + c * outs + j, count));
    scale_back(plain, j, count, scale, factor, bias, out);
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
      if (!decode_row(y + at, u ? u + at : u, outs, scales[row], factor, (const T*)bias, (T*)out + at,
                      vectors, vectors ? expected + row * CHECKS : nullptr))
        __atomic_store_n(&wrong, true, __ATOMIC_RELAXED);
    });
  });
  return !wrong;
}

static bool linear(Float type, const void* x, int64_t rows, int64_t in, float largest, int digits,
                   const int8_t* weight, int64_t stride, const float* factor, const void* bias,
                   int64_t outs, void* out, Pool* pool) {
  const int64_t size = padded(Digits::size(rows, in, digits), 64);
  char* memory = pool_memory(pool, size + rows * (int64_t)sizeof(float));
  Digits split(memory, rows, in, digits);
  float* scales = (float*)(memory + size);
  bool finite = true;
  with_type(type, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    share(pool, rows, rows * in * digits, in * (int64_t)sizeof(int32_t), [&](int64_t row, char* q) {
      if (!encode_row((const T*)x + row * in, in, largest, scales + row, nullptr, (int32_t*)q, nullptr))
        __atomic_store_n(&finite, false, __ATOMIC_RELAXED);
      split_row((int32_t*)q, in, split, row);
    });
    multiply(split, weight, stride, in, outs, pool,
             [=](int64_t row, int64_t first, int64_t count, const int32_t* sums) {
               each_vector(count, [&](int64_t j, int64_t here) {
                 scale_back(load_integers(sums + j, here), j, here, scales[row], factor + first,
                            bias ? (const T*)bias + first : nullptr, (T*)out + row * outs + first);
               });
             });
  });
  return finite;
}

}  // namespace VARIANT
