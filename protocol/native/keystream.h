// Elements of the ring drawn from AES-256 in counter mode, by a processor's own instructions: no
// table whose use a neighbour could watch. A variant without them draws nothing (`draws`).
#pragma once

#include "tasks.h"

namespace VARIANT {

#if defined(WITH_AES)

constexpr int ROUNDS = 14, BLOCK_WORDS = 4;
#if defined(WITH_AVX512)
typedef __m512i Blocks;
#define OF_BLOCKS(NAME) _mm512_##NAME
#define AES_ROUND(NAME) _mm512_##NAME##_epi128
#define SPREAD(BLOCK) _mm512_broadcast_i32x4(BLOCK)
#define XOR _mm512_xor_si512
#else
typedef __m128i Blocks;
#define OF_BLOCKS(NAME) _mm_##NAME
#define AES_ROUND(NAME) _mm_##NAME##_si128
#define SPREAD(BLOCK) (BLOCK)
#define XOR _mm_xor_si128
#endif
constexpr int WIDE = sizeof(Blocks) / 16, AT_ONCE = 8;  // rounds take several cycles, and overlap

// FIPS 197, 5.2: two words of the schedule from the two before them.
template <int Constant>
INLINE __m128i next_key(__m128i before, __m128i last) {
  __m128i assisted = _mm_aeskeygenassist_si128(last, Constant);
  // RotWord, SubWord and Rcon for an even one, SubWord alone for an odd one.
  assisted = Constant ? _mm_shuffle_epi32(assisted, 0xff) : _mm_shuffle_epi32(assisted, 0xaa);
  before = _mm_xor_si128(before, _mm_slli_si128(before, 4));
  before = _mm_xor_si128(before, _mm_slli_si128(before, 8));
  return _mm_xor_si128(before, assisted);
}

template <int Round>
INLINE void expand_key(__m128i* keys) {
  if constexpr (Round <= ROUNDS) {
    keys[Round] = next_key<Round % 2 ? 0 : 1 << (Round / 2 - 1)>(keys[Round - 2], keys[Round - 1]);
    expand_key<Round + 1>(keys);
  }
}

struct Cipher {
  Blocks keys[ROUNDS + 1];

  explicit Cipher(const uint8_t* key) {
    __m128i narrow[ROUNDS + 1];
    narrow[0] = _mm_loadu_si128((const __m128i*)key);
    narrow[1] = _mm_loadu_si128((const __m128i*)key + 1);
    expand_key<2>(narrow);
    for (int i = 0; i <= ROUNDS; i++) keys[i] = SPREAD(narrow[i]);
  }

  // Encrypt `Count` times WIDE counters from high | low on, both in this machine's order.
  template <int Count>
  inline __attribute__((always_inline)) void blocks(uint64_t high, uint64_t low, Blocks* out) const {
    const Blocks reversed = SPREAD(_mm_set_epi64x(0x08090a0b0c0d0e0f, 0x0001020304050607));
#if defined(WITH_AVX512)
    Blocks counters = _mm512_set_epi64(low + 3, high, low + 2, high, low + 1, high, low, high);
#else
    Blocks counters = _mm_set_epi64x(low, high);
#endif
    const Blocks step = SPREAD(_mm_set_epi64x(WIDE, 0));
    for (int i = 0; i < Count; i++) {
      out[i] = XOR(OF_BLOCKS(shuffle_epi8)(counters, reversed), keys[0]);
      counters = OF_BLOCKS(add_epi64)(counters, step);
    }
    for (int round = 1; round < ROUNDS; round++)
      for (int i = 0; i < Count; i++) out[i] = AES_ROUND(aesenc)(out[i], keys[round]);
    for (int i = 0; i < Count; i++) out[i] = AES_ROUND(aesenclast)(out[i], keys[ROUNDS]);
  }
};

// Write `count` elements of a stream, or add them to what is there.
static void draw_stream(const Stream& stream, int64_t count, bool add, int32_t* out) {
  const Cipher cipher(stream.key);
  uint64_t low = stream.low + stream.element / BLOCK_WORDS;
  int64_t skipped = stream.element % BLOCK_WORDS;
  for (int64_t here; count; count -= here, out += here, skipped = 0, low += AT_ONCE * WIDE) {
    Blocks drawn[AT_ONCE];
    cipher.blocks<AT_ONCE>(stream.high, low, drawn);
    const int32_t* words = (const int32_t*)drawn + skipped;
    here = std::min<int64_t>(count, AT_ONCE * WIDE * BLOCK_WORDS - skipped);
    if (add)
      for (int64_t k = 0; k < here; k++) out[k] = (int32_t)((uint32_t)out[k] + (uint32_t)words[k]);
    else
      memcpy(out, words, here * sizeof *out);
  }
}

#undef OF_BLOCKS
#undef AES_ROUND
#undef SPREAD
#undef XOR
constexpr bool DRAWS = true;
#else
constexpr bool DRAWS = false;
static void draw_stream(const Stream&, int64_t, bool, int32_t*) {}
#endif

// Of an element, in passes over memory.
constexpr int64_t AES_WORK = 4;

// Write the sum of a row's streams.
INLINE void draw_row(const Stream* streams, int64_t parts, int64_t count, int32_t* out) {
  for (int64_t part = 0; part < parts; part++) draw_stream(streams[part], count, part > 0, out);
}

static bool draw(const Stream* streams, int64_t rows, int64_t parts, int64_t features, int32_t* out,
                 Pool* pool) {
  share(pool, DRAWS ? rows : 0, AES_WORK * rows * parts * features, 0, [=](int64_t row, char*) {
    draw_row(streams + row * parts, parts, features, out + row * features);
  });
  return DRAWS;
}

}  // namespace VARIANT
