// Vectors of 16 lanes, the same on every instruction set: as many registers as they take. A variant
// includes this inside its own target options and namespace.
//
// Floats: one operation here is one IEEE operation in every variant (products are contracted with
// additions by `multiply_add` alone), so elementwise kernels give the same bits everywhere.
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

namespace VARIANT {

constexpr int LANES = 16;
#if defined(WITH_AVX512)
constexpr int NATIVE = 16;  // lanes of a register
#elif defined(WITH_AVX2)
constexpr int NATIVE = 8;
#else
constexpr int NATIVE = 4;
#endif
constexpr int PARTS = LANES / NATIVE;

template <class Lane>
struct Vector {
  typedef Lane Part __attribute__((vector_size(NATIVE * sizeof(Lane))));
  Part part[PARTS];

  Lane operator[](int i) const { return part[i / NATIVE][i % NATIVE]; }
};

typedef Vector<float> f32x16;
typedef Vector<int32_t> i32x16;
typedef Vector<uint32_t> u32x16;
typedef Vector<uint16_t> u16x16;
// Eight lanes of 64 bits, in the registers of 16 of 32.
struct i64x8 {
  typedef int64_t Part __attribute__((vector_size(NATIVE * 4)));
  Part part[PARTS];

  int64_t operator[](int i) const { return part[i / (NATIVE / 2)][i % (NATIVE / 2)]; }
};

struct bf16 {
  uint16_t bits;
};

// ---- operators, part by part -----------------------------------------------------------------------

#define OPERATOR(OP)                                                     \
  template <class Lane>                                                  \
  INLINE Vector<Lane> operator OP(Vector<Lane> a, const Vector<Lane>& b) { \
    for (int i = 0; i < PARTS; i++) a.part[i] = a.part[i] OP b.part[i];  \
    return a;                                                            \
  }                                                                      \
  template <class Lane>                                                  \
  INLINE Vector<Lane> operator OP(Vector<Lane> a, Lane b) {              \
    for (int i = 0; i < PARTS; i++) a.part[i] = a.part[i] OP b;          \
    return a;                                                            \
  }
#define COMPARISON(OP)                                                            \
  template <class Lane>                                                           \
  INLINE i32x16 operator OP(const Vector<Lane>& a, const Vector<Lane>& b) {       \
    i32x16 out;                                                                   \
    for (int i = 0; i < PARTS; i++) out.part[i] = (i32x16::Part)(a.part[i] OP b.part[i]); \
    return out;                                                                   \
  }
OPERATOR(+) OPERATOR(-) OPERATOR(*) OPERATOR(/) OPERATOR(&) OPERATOR(|) OPERATOR(^)
COMPARISON(<) COMPARISON(<=) COMPARISON(>) COMPARISON(>=) COMPARISON(!=)
#undef OPERATOR
#undef COMPARISON

template <class Lane>
INLINE Vector<Lane> operator<<(Vector<Lane> a, int by) {
  for (int i = 0; i < PARTS; i++) a.part[i] <<= by;
  return a;
}
template <class Lane>
INLINE Vector<Lane> operator>>(Vector<Lane> a, int by) {
  for (int i = 0; i < PARTS; i++) a.part[i] >>= by;
  return a;
}
INLINE i64x8 operator>>(i64x8 a, int by) {
  for (int i = 0; i < PARTS; i++) a.part[i] >>= by;
  return a;
}
INLINE i64x8 operator+(i64x8 a, const i64x8& b) {
  for (int i = 0; i < PARTS; i++) a.part[i] += b.part[i];
  return a;
}

// ---- making, casting, choosing ---------------------------------------------------------------------

// Part by part: a copy of the whole goes through the stack where it is several registers.
template <class V, class T>
INLINE V load(const T* from) {
  V vector;
  for (int i = 0; i < PARTS; i++)
    memcpy(&vector.part[i], (const char*)from + i * sizeof vector.part[i], sizeof vector.part[i]);
  return vector;
}

template <class V, class T>
INLINE void store(T* to, const V& vector) {
  for (int i = 0; i < PARTS; i++)
    memcpy((char*)to + i * sizeof vector.part[i], &vector.part[i], sizeof vector.part[i]);
}

// The same bits as another type of vector, or of number.
template <class To, class From>
INLINE auto bits_of(const From& from) -> decltype(typename To::Part(from.part[0]), To()) {
  To to;
  for (int i = 0; i < PARTS; i++) to.part[i] = (typename To::Part)from.part[i];
  return to;
}
template <class To, class From>
INLINE std::enable_if_t<std::is_arithmetic_v<To>, To> bits_of(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "a cast of bits");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

template <class To, class Lane>
INLINE To convert(const Vector<Lane>& from) {
  To to;
  for (int i = 0; i < PARTS; i++) to.part[i] = __builtin_convertvector(from.part[i], typename To::Part);
  return to;
}

template <class Lane>
INLINE Vector<Lane> broadcast(Lane value) {
  Vector<Lane> out;
  for (int i = 0; i < PARTS; i++) out.part[i] = value - typename Vector<Lane>::Part{};  // x - 0 is x, -0 + 0 is not
  return out;
}

template <class Lane>
INLINE Vector<Lane> choose(const i32x16& mask, const Vector<Lane>& yes, const Vector<Lane>& no) {
  Vector<Lane> out;
  for (int i = 0; i < PARTS; i++) out.part[i] = mask.part[i] ? yes.part[i] : no.part[i];
  return out;
}

// ---- memory to floats and back; `count` lanes, the others are zero and not touched ------------------

INLINE f32x16 widen(const u16x16& halves) {
  return bits_of<f32x16>(convert<u32x16>(halves) << 16);
}

// Round to nearest, ties to even; NaN stays NaN, as in torch.
INLINE u16x16 narrow(const f32x16& values) {
  u32x16 bits = bits_of<u32x16>(values);
  u32x16 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return convert<u16x16>(choose(values != values, broadcast(0x7fc0u), rounded));
}

INLINE f32x16 load_floats(const float* from) { return load<f32x16>(from); }
INLINE f32x16 load_floats(const bf16* from) { return widen(load<u16x16>(from)); }
INLINE void store_floats(float* to, const f32x16& values) { store(to, values); }
INLINE void store_floats(bf16* to, const f32x16& values) { store(to, narrow(values)); }

template <class T>
INLINE f32x16 load_floats(const T* from, int64_t count) {
  if (count >= LANES) return load_floats(from);
  T some[LANES] = {};
  memcpy(some, from, count * sizeof(T));
  return load_floats(some);
}

template <class T>
INLINE void store_floats(T* to, const f32x16& values, int64_t count) {
  if (count >= LANES) return store_floats(to, values);
  T some[LANES];
  store_floats(some, values);
  memcpy(to, some, count * sizeof(T));
}

INLINE i32x16 load_integers(const int32_t* from, int64_t count) {
  if (count >= LANES) return load<i32x16>(from);
  int32_t some[LANES] = {};
  memcpy(some, from, count * sizeof(int32_t));
  return load<i32x16>(some);
}

// The same from memory that another process may be writing: the compiler may not read it again.
INLINE i32x16 load_once(const int32_t* from, int64_t count) {
  i32x16 values = load_integers(from, count);
  __asm__ volatile("" ::: "memory");
  return values;
}

INLINE void store_integers(int32_t* to, const i32x16& values, int64_t count) {
  if (count >= LANES) return store(to, values);
  int32_t some[LANES];
  store(some, values);
  memcpy(to, some, count * sizeof(int32_t));
}

// Call body(first lane, lanes) for all of a row; inlined, so that whole vectors look at no count.
template <class Body>
INLINE void each_vector(int64_t size, Body&& body) {
  int64_t k = 0;
  for (; k + LANES <= size; k += LANES) body(k, LANES);
  if (k < size) body(k, size - k);
}

// Call body(0), body(1) ...: written out, so that what it indexes stays in registers.
template <class Body, int... Number>
INLINE void each_of(std::integer_sequence<int, Number...>, Body&& body) {
  (body(std::integral_constant<int, Number>()), ...);
}
template <int Count, class Body>
INLINE void each(Body&& body) {
  each_of(std::make_integer_sequence<int, Count>(), body);
}

// What a value is after a round through memory of type T.
INLINE f32x16 rounded_to(const float*, const f32x16& values) { return values; }
INLINE f32x16 rounded_to(const bf16*, const f32x16& values) { return widen(narrow(values)); }

// ---- arithmetic --------------------------------------------------------------------------------------

INLINE f32x16 to_floats(const i32x16& values) { return convert<f32x16>(values); }

INLINE f32x16 multiply_add(const f32x16& a, const f32x16& b, f32x16 c) {
  for (int i = 0; i < PARTS; i++) {
#if defined(WITH_AVX512)
    c.part[i] = (f32x16::Part)_mm512_fmadd_ps(a.part[i], b.part[i], c.part[i]);
#elif defined(WITH_AVX2)
    c.part[i] = (f32x16::Part)_mm256_fmadd_ps(a.part[i], b.part[i], c.part[i]);
#else
    f32x16::Part sums = c.part[i];
    for (int lane = 0; lane < NATIVE; lane++)
      sums[lane] = fmaf(a.part[i][lane], b.part[i][lane], sums[lane]);
    c.part[i] = sums;
#endif
  }
  return c;
}

// To the nearest integer, ties to even. Outside int32: INT32_MIN, as x86 has it.
INLINE i32x16 round_to_integers(const f32x16& values) {
  i32x16 out;
  for (int i = 0; i < PARTS; i++) {
#if defined(WITH_AVX512)
    out.part[i] = (i32x16::Part)_mm512_cvtps_epi32(values.part[i]);
#elif defined(WITH_AVX2)
    out.part[i] = (i32x16::Part)_mm256_cvtps_epi32(values.part[i]);
#else
    for (int lane = 0; lane < NATIVE; lane++) {
      float value = values.part[i][lane];
      bool fits = value >= -2147483648.f && value < 2147483648.f;
      out.part[i][lane] = fits ? (int32_t)lrintf(value) : INT32_MIN;
    }
#endif
  }
  return out;
}

// Lanes 0, 2, 4 ... of both, multiplied to 64 bits; signed. For the odd ones shift both by 32.
INLINE i64x8 multiply_even(const i64x8& a, const i64x8& b) {
  i64x8 out;
  for (int i = 0; i < PARTS; i++) {
#if defined(WITH_AVX512)
    out.part[i] = (i64x8::Part)_mm512_mul_epi32((__m512i)a.part[i], (__m512i)b.part[i]);
#elif defined(WITH_AVX2)
    out.part[i] = (i64x8::Part)_mm256_mul_epi32((__m256i)a.part[i], (__m256i)b.part[i]);
#else
    for (int lane = 0; lane < NATIVE / 2; lane++)
      out.part[i][lane] = (int64_t)(int32_t)a.part[i][lane] * (int32_t)b.part[i][lane];
#endif
  }
  return out;
}

// Add all products of two rows of 16 to eight lanes of 64 bits, which wrap.
INLINE i64x8 multiply_wide(const i64x8& sum, const i32x16& a, const i32x16& b) {
  i64x8 x = bits_of<i64x8>(a), y = bits_of<i64x8>(b);
  return sum + multiply_even(x, y) + multiply_even(x >> 32, y >> 32);
}

// Reduce 16 lanes to one, always by the same tree.
template <class Combine>
INLINE float reduce(const f32x16& vector, Combine&& combine) {
  float lanes[LANES];
  store(lanes, vector);
  for (int half = LANES / 2; half; half /= 2)
    for (int i = 0; i < half; i++) lanes[i] = combine(lanes[i], lanes[i + half]);
  return lanes[0];
}

INLINE float sum(const f32x16& v) {
  return reduce(v, [](float a, float b) { return a + b; });
}

INLINE float largest(const f32x16& v) {
  return reduce(v, [](float a, float b) { return a > b ? a : b; });
}

INLINE uint64_t sum(const i64x8& v) {
  uint64_t total = 0;
  for (int i = 0; i < LANES / 2; i++) total += (uint64_t)v[i];
  return total;
}

INLINE f32x16 maximum(const f32x16& a, const f32x16& b) { return choose(a > b, a, b); }
INLINE f32x16 negative(const f32x16& v) { return broadcast(0.f) - v; }
INLINE f32x16 absolute(const f32x16& v) {
  return bits_of<f32x16>(bits_of<u32x16>(v) & 0x7fffffffu);
}

// e^x within 2 units in the last place; 0 below -87.3, at most e^88.3, NaN of NaN. The polynomial
// is that of Cephes' expf (Moshier).
INLINE f32x16 exponential(f32x16 x) {
  const f32x16 lowest = broadcast(-87.33654f), most = broadcast(88.3f);
  i32x16 none = x < lowest;
  x = choose(x > most, most, choose(none, lowest, x));
  const float shift = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer
  f32x16 n = (x * 1.44269504f + shift) - shift;
  x = multiply_add(n, broadcast(-0.693359375f), x);
  x = multiply_add(n, broadcast(2.12194440e-4f), x);
  f32x16 p = broadcast(1.9875691500e-4f);
  p = multiply_add(p, x, broadcast(1.3981999507e-3f));
  p = multiply_add(p, x, broadcast(8.3334519073e-3f));
  p = multiply_add(p, x, broadcast(4.1665795894e-2f));
  p = multiply_add(p, x, broadcast(1.6666665459e-1f));
  p = multiply_add(p, x, broadcast(5.0000001201e-1f));
  p = multiply_add(p, x * x, x) + 1.f;
  i32x16 power = (round_to_integers(n) + 127) << 23;
  return choose(none, broadcast(0.f), p * bits_of<f32x16>(power));
}

// ---- a square of 16 by 16 lanes, transposed --------------------------------------------------------

template <int Distance, int... Lane>
INLINE void exchange(i32x16::Part& a, i32x16::Part& b, std::integer_sequence<int, Lane...>) {
  i32x16::Part low =
      __builtin_shufflevector(a, b, (Lane & Distance ? NATIVE + Lane - Distance : Lane)...);
  b = __builtin_shufflevector(a, b, (Lane & Distance ? NATIVE + Lane : Lane + Distance)...);
  a = low;
}

// Transpose a square of registers: swap ever larger blocks of it.
template <int Distance>
INLINE void transpose_square(i32x16::Part* rows) {
  if constexpr (Distance < NATIVE) {
    each<NATIVE>([&](auto i) {
      if constexpr (!(i & Distance))
        exchange<Distance>(rows[i], rows[i + Distance], std::make_integer_sequence<int, NATIVE>());
    });
    transpose_square<2 * Distance>(rows);
  }
}

INLINE void transpose(i32x16* rows) {
  i32x16 out[LANES];
  for (int i = 0; i < PARTS; i++)
    for (int j = 0; j < PARTS; j++) {
      i32x16::Part square[NATIVE];
      each<NATIVE>([&](auto k) { square[k] = rows[i * NATIVE + k].part[j]; });
      transpose_square<1>(square);
      each<NATIVE>([&](auto k) { out[j * NATIVE + k].part[i] = square[k]; });
    }
  for (int i = 0; i < LANES; i++) rows[i] = out[i];
}

}  // namespace VARIANT
