// Grouped-query attention over a cache, in one order for one row and for many.
//
// The cache is cut into segments of SEGMENT positions and these into blocks of BLOCK, both counted
// from the sequence's first position. A block's scores are taken together; a segment goes through
// its blocks with a running maximum; segments are merged from the first to the last. So a row's
// bits depend on nothing but the row and the cache before it, and segments may run side by side.
#pragma once

#include "../../protocol/native/tasks.h"
#if defined(WITH_AMX)
#include "attention_tiles.h"
#endif

namespace VARIANT {

constexpr int64_t BLOCK = 64;
constexpr int64_t SEGMENT = 512;
// Queries (rows times heads of a group) that share a packed block of keys and values.
constexpr int64_t QUERIES = 64;
constexpr float MINUS_INFINITY = -__builtin_inff();
constexpr int32_t LANE_NUMBERS[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// ---- products of 16 lanes by one broadcast element -----------------------------------------------
// An element of a packed operand is a float, or a pair of bfloat16 that one instruction multiplies
// and adds up.

struct Floats {
  typedef float Element;
  static constexpr int64_t WIDTH = 1;
  static inline __attribute__((always_inline)) f32x16 multiply_add_to(const f32x16& sum, const Element* lanes, Element one) {
    return multiply_add(load<f32x16>(lanes), broadcast(one), sum);
  }
};

template <class T>
struct MathOf {
  typedef Floats type;
};
#if defined(WITH_BF16)
struct Pairs {
  typedef uint32_t Element;
  static constexpr int64_t WIDTH = 2;
  static inline __attribute__((always_inline)) f32x16 multiply_add_to(const f32x16& sum, const Element* lanes, Element one) {
    return {{(f32x16::Part)_mm512_dpbf16_ps(sum.part[0], (__m512bh)_mm512_loadu_si512(lanes),
                                    (__m512bh)_mm512_set1_epi32((int)one))}};
  }
};
template <>
struct MathOf<bf16> {
  typedef Pairs type;
};
#endif

// 16 elements of a row that begin at dim k, as lanes; zeros behind `dim`.
template <class T>
INLINE i32x16 elements(const Floats*, const T* row, int64_t k, int64_t dim) {
  return bits_of<i32x16>(load_floats(row + k, dim - k));
}
#if defined(WITH_BF16)
INLINE i32x16 elements(const Pairs*, const bf16* row, int64_t k, int64_t dim) {
  if (2 * k + 2 * LANES <= dim) return load<i32x16>(row + 2 * k);
  bf16 some[2 * LANES] = {};
  if (2 * k < dim) memcpy(some, row + 2 * k, (dim - 2 * k) * sizeof(bf16));
  return load<i32x16>(some);
}
#endif

// Keys [count, dim] to [dim / width][BLOCK]; rows behind `count` are zero.
template <class M, class T>
static void pack_keys(const T* keys, int64_t count, int64_t dim, typename M::Element* to) {
  const int64_t depth = (dim + M::WIDTH - 1) / M::WIDTH;
  for (int64_t first = 0; first < BLOCK; first += LANES)
    for (int64_t k = 0; k < depth; k += LANES) {
      i32x16 rows[LANES];
      for (int64_t i = 0; i < LANES; i++)
        rows[i] = first + i < count
                      ? elements((const M*)nullptr, keys + (first + i) * dim, k, dim)
                      : broadcast<int32_t>(0);
      transpose(rows);
      for (int64_t i = 0; i < LANES && k + i < depth; i++) store(to + (k + i) * BLOCK + first, rows[i]);
    }
}

// Values [count, dim] to [BLOCK / width][padded dim]; rows behind `count` are zero.
template <class T>
INLINE void pack_values(const Floats*, const T* values, int64_t count, int64_t dim, int64_t wide,
                        float* to) {
  for (int64_t j = 0; j < BLOCK; j++)
    for (int64_t k = 0; k < wide; k += LANES)
      store(to + j * wide + k, j < count && k < dim ? load_floats(values + j * dim + k, dim - k)
                                                    : broadcast(0.f));
}
#if defined(WITH_BF16)
INLINE void pack_values(const Pairs*, const bf16* values, int64_t count, int64_t dim, int64_t wide,
                        uint32_t* to) {
  // 32 elements of a row from k on; zeros behind `dim`, and of rows that are not there.
  auto row = [&](int64_t j, int64_t k) {
    const int64_t left = j < count && k < dim ? dim - k : 0;
    return _mm512_maskz_loadu_epi16(left < 32 ? (1u << left) - 1 : ~0u, values + j * dim + k);
  };
  const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i low = lane | _mm512_slli_epi32(lane | _mm512_set1_epi32(32), 16);
  const __m512i high = low | _mm512_set1_epi16(16);
  for (int64_t j = 0; j < BLOCK; j += 2)
    for (int64_t k = 0; k < wide; k += 2 * LANES) {
      const __m512i first = row(j, k), second = row(j + 1, k);
      uint32_t* at = to + j / 2 * wide + k;
      _mm512_storeu_si512(at, _mm512_permutex2var_epi16(first, low, second));
      _mm512_storeu_si512(at + LANES, _mm512_permutex2var_epi16(first, high, second));
    }
}
#endif

// A query's elements, one behind another.
template <class M, class T>
INLINE void pack_query(const T* q, int64_t dim, typename M::Element* to) {
  const int64_t depth = (dim + M::WIDTH - 1) / M::WIDTH;
  for (int64_t k = 0; k < depth; k += LANES) {
    i32x16 some = elements((const M*)nullptr, q, k, dim);
    int64_t count = depth - k < LANES ? depth - k : LANES;
    int32_t lanes[LANES];
    store(lanes, some);
    memcpy(to + k, lanes, count * sizeof(typename M::Element));
  }
}

// out[query][lane] (+)= sum over depth of one[query][k] * lanes[k][lane], as many lanes at a time as
// have their sums in registers.
template <class M, int Queries>
INLINE void multiply_lanes(const typename M::Element* one, int64_t one_stride,
                           const typename M::Element* lanes, int64_t wide, int64_t depth,
                           float* out, int64_t out_stride, int vectors, bool add) {
  constexpr int AT_ONCE = PARTS == 1 || Queries == 1 ? 4 : 1;
  for (int v = 0; v < vectors; v += AT_ONCE) {
    f32x16 sums[Queries][AT_ONCE];
    each<Queries>([&](auto i) {
      each<AT_ONCE>([&](auto u) {
        sums[i][u] = add ? load<f32x16>(out + i * out_stride + (v + u) * LANES) : broadcast(0.f);
      });
    });
    const typename M::Element* from = lanes + v * LANES;
    for (int64_t k = 0; k < depth; k++)
      each<Queries>([&](auto i) {
        each<AT_ONCE>([&](auto u) {
          sums[i][u] = M::multiply_add_to(sums[i][u], from + k * wide + u * LANES,
                                          one[i * one_stride + k]);
        });
      });
    each<Queries>([&](auto i) {
      each<AT_ONCE>([&](auto u) { store(out + i * out_stride + (v + u) * LANES, sums[i][u]); });
    });
  }
}

template <class M>
INLINE void multiply_queries(int64_t queries, const typename M::Element* one, int64_t one_stride,
                             const typename M::Element* lanes, int64_t wide, int64_t depth,
                             float* out, int64_t out_stride, int vectors, bool add) {
#if defined(WITH_AMX)
  if constexpr (M::WIDTH == 2)
    if (depth % TILE_PAIRS == 0 && vectors % TILE_VECTORS == 0)
      return multiply_queries_tiled(queries, one, one_stride, lanes, wide, depth, out, out_stride,
                                    vectors, add);
#endif
  int64_t i = 0;
  for (; i + 4 <= queries; i += 4)
    multiply_lanes<M, 4>(one + i * one_stride, one_stride, lanes, wide, depth, out + i * out_stride,
                         out_stride, vectors, add);
  for (; i < queries; i++)
    multiply_lanes<M, 1>(one + i * one_stride, one_stride, lanes, wide, depth, out + i * out_stride,
                         out_stride, vectors, add);
}

// ---- softmax -------------------------------------------------------------------------------------

// What some positions give one query: the largest score, and sums of e^(score - largest).
struct Partial {
  float largest, total;
};

// Take the scores of positions first ... last of a block in: probabilities for the next product,
// and the sums so far scaled to the new largest score.
template <class M>
INLINE void soften(const float* scores, int64_t first, int64_t last, float scale, float cap,
                   Partial& so_far, float* out, int64_t wide, typename M::Element* weights) {
  f32x16 scaled[BLOCK / LANES], most = broadcast(MINUS_INFINITY);
  for (int64_t v = 0; v < BLOCK / LANES; v++) {
    i32x16 lane = load<i32x16>(LANE_NUMBERS) + (int32_t)(v * LANES);
    i32x16 seen = (lane >= broadcast((int32_t)first)) & (lane <= broadcast((int32_t)last));
    f32x16 score = load<f32x16>(scores + v * LANES) * scale;
    if (cap != 0.f)  // cap tanh(score / cap), of e^(2 score / cap)
      score = broadcast(cap) - broadcast(2.f * cap) / (exponential(score * (2.f / cap)) + 1.f);
    scaled[v] = choose(seen, score, broadcast(MINUS_INFINITY));
    most = maximum(scaled[v], most);
  }
  float before = so_far.largest, now = largest(most) > before ? largest(most) : before;
  // Scores that are all NaN or -infinity have no softmax: NaN, from here to the end.
  if (now == MINUS_INFINITY) now = __builtin_nanf("");
  f32x16 total = broadcast(0.f);
  for (int64_t v = 0; v < BLOCK / LANES; v++) {
    f32x16 weight = exponential(scaled[v] - now);
    total = total + weight;
    if constexpr (M::WIDTH == 1)
      store(weights + v * LANES, weight);
    else
      store((bf16*)weights + v * LANES, narrow(weight));
  }
  so_far.largest = now;
  if (before == MINUS_INFINITY) {
    so_far.total = sum(total);
    return;
  }
  float less = exponential(broadcast(before - now))[0];
  so_far.total = so_far.total * less + sum(total);
  if (less != 1.f)
    for (int64_t k = 0; k < wide; k += LANES) store(out + k, load<f32x16>(out + k) * less);
}

// Put what a later segment gives to what the ones before it gave.
INLINE void merge(Partial& into, float* out, const Partial& later, const float* its, int64_t wide) {
  if (later.largest == MINUS_INFINITY) return;
  if (into.largest == MINUS_INFINITY) {
    into = later;
    memcpy(out, its, wide * sizeof(float));
    return;
  }
  float now = into.largest > later.largest ? into.largest : later.largest;
  float a = exponential(broadcast(into.largest - now))[0];
  float b = exponential(broadcast(later.largest - now))[0];
  into.total = into.total * a + later.total * b;
  into.largest = now;
  for (int64_t k = 0; k < wide; k += LANES)
    store(out + k, load<f32x16>(out + k) * a + load<f32x16>(its + k) * b);
}

// ---- the kernel ----------------------------------------------------------------------------------

template <class T>
struct Attention {
  typedef typename MathOf<T>::type M;
  typedef typename M::Element Element;

  const T* q;
  int64_t stride, rows, heads, kv_heads, dim;
  const T *keys, *values;
  int64_t capacity, context, window;
  float scale, cap;
  T* out;

  int64_t group() const { return heads / kv_heads; }
  int64_t wide() const { return padded(dim, 4 * LANES); }
  int64_t depth() const { return (dim + M::WIDTH - 1) / M::WIDTH; }
  int64_t rows_at_once() const { return QUERIES > group() ? QUERIES / group() : 1; }
  int64_t queries() const { return rows_at_once() * group(); }
  int64_t segments() const { return (context + SEGMENT - 1) / SEGMENT; }
  int64_t work() const { return rows * context * heads * dim / 8; }
  int64_t position(int64_t row) const { return context - rows + row; }
  int64_t first_seen(int64_t row) const {
    return window && position(row) >= window ? position(row) - window + 1 : 0;
  }

  // A thread's memory, all at multiples of 64 bytes.
  struct Memory {
    Element *keys, *values, *query, *weights;
    float *scores, *segment, *whole;
    Partial *partial, *all;
    int64_t bytes;
    Memory(const Attention& a, char* at) {
      char* begin = at;
      auto take = [&](auto*& pointer, int64_t count) {
        pointer = (std::remove_reference_t<decltype(pointer)>)at;
        at += padded(count * (int64_t)sizeof *pointer, 64);
      };
      take(keys, a.depth() * BLOCK), take(values, BLOCK / M::WIDTH * a.wide());
      take(query, a.queries() * a.depth()), take(weights, a.queries() * (BLOCK / M::WIDTH));
      take(scores, a.queries() * BLOCK);
      take(segment, a.queries() * a.wide()), take(whole, a.queries() * a.wide());
      take(partial, a.queries()), take(all, a.queries());
      bytes = at - begin;
    }
    // Laid out nowhere, to be counted.
    static int64_t size(const Attention& a) { return Memory(a, (char*)64).bytes; }
  };

  // One segment for rows first ... first + count - 1 and one key/value head: sums in `out`.
  void segment(int64_t kv_head, int64_t first, int64_t count, int64_t number, const Memory& m,
               Partial* partial, float* sums) const {
    const int64_t G = group(), size = count * G;
    const int64_t end = position(first + count - 1) + 1;
    const int64_t begin = number * SEGMENT;
    const int64_t stop = end < begin + SEGMENT ? end : begin + SEGMENT;
    for (int64_t i = 0; i < size; i++) partial[i] = {MINUS_INFINITY, 0.f};
    memset(sums, 0, size * wide() * sizeof(float));
    int64_t block = begin;
    while (block + BLOCK <= first_seen(first)) block += BLOCK;
    const T* head_keys = keys + kv_head * capacity * dim;
    const T* head_values = values + kv_head * capacity * dim;
    for (; block < stop; block += BLOCK) {
      const int64_t here = stop - block < BLOCK ? stop - block : BLOCK;
      pack_keys<M>(head_keys + block * dim, here, dim, m.keys);
      multiply_queries<M>(size, m.query, depth(), m.keys, BLOCK, depth(), m.scores, BLOCK,
                          BLOCK / LANES, false);
      pack_values((const M*)nullptr, head_values + block * dim, here, dim, wide(), m.values);
      for (int64_t i = 0; i < size; i++) {
        const int64_t row = first + i / G;
        int64_t from = first_seen(row) - block, last = position(row) - block;
        if (from < 0) from = 0;
        Element* weights = m.weights + i * (BLOCK / M::WIDTH);
        if (last < 0 || from >= BLOCK)
          memset(weights, 0, BLOCK / M::WIDTH * sizeof(Element));
        else
          soften<M>(m.scores + i * BLOCK, from, last, scale, cap, partial[i], sums + i * wide(),
                    wide(), weights);
      }
      multiply_queries<M>(size, m.weights, BLOCK / M::WIDTH, m.values, wide(), BLOCK / M::WIDTH,
                          sums, wide(), (int)(wide() / LANES), true);
    }
  }

  void pack_rows(int64_t kv_head, int64_t first, int64_t count, const Memory& m) const {
    for (int64_t i = 0; i < count * group(); i++)
      pack_query<M>(q + (first + i / group()) * stride + (kv_head * group() + i % group()) * dim,
                    dim, m.query + i * depth());
  }

  void finish(int64_t row, int64_t head, const Partial& partial, const float* sums) const {
    T* to = out + (row * heads + head) * dim;
    for (int64_t k = 0; k < dim; k += LANES)
      store_floats(to + k, load<f32x16>(sums + k) / partial.total, dim - k);
  }

  int64_t tasks() const { return (rows + rows_at_once() - 1) / rows_at_once() * kv_heads; }

  // A task goes through all segments of its rows, the longest contexts first: nothing is left for
  // one thread alone.
  void run(int64_t task, char* scratch) const {
    const int64_t first = (tasks() - 1 - task) / kv_heads * rows_at_once(), head = task % kv_heads;
    const int64_t count = rows - first < rows_at_once() ? rows - first : rows_at_once();
    Memory m(*this, scratch);
    pack_rows(head, first, count, m);
    const int64_t end = position(first + count - 1) + 1;
    for (int64_t i = 0; i < count * group(); i++) m.all[i] = {MINUS_INFINITY, 0.f};
    for (int64_t number = 0; number * SEGMENT < end; number++) {
      segment(head, first, count, number, m, m.partial, m.segment);
      for (int64_t i = 0; i < count * group(); i++)
        merge(m.all[i], m.whole + i * wide(), m.partial[i], m.segment + i * wide(), wide());
    }
    for (int64_t i = 0; i < count * group(); i++)
      finish(first + i / group(), head * group() + i % group(), m.all[i], m.whole + i * wide());
  }

  // Few rows: a task is one segment of a key/value head. `partials` and `sums` keep all of them.
  void few(Pool* pool, char* memory) const {
    const int64_t each = rows * group(), n = segments();
    Partial* partials = (Partial*)memory;
    float* sums = (float*)(memory + padded(kv_heads * n * each * (int64_t)sizeof(Partial), 64));
    share(pool, kv_heads * n, work(), Memory::size(*this),
          [&](int64_t task, char* scratch) {
            Memory m(*this, scratch);
            pack_rows(task / n, 0, rows, m);
            segment(task / n, 0, rows, task % n, m, partials + task * each,
                    sums + task * each * wide());
          });
    for (int64_t head = 0; head < kv_heads; head++)
      for (int64_t i = 0; i < each; i++) {
        const int64_t at = head * n * each + i;
        for (int64_t number = 1; number < n; number++)
          merge(partials[at], sums + at * wide(), partials[at + number * each],
                sums + (at + number * each) * wide(), wide());
        finish(i / group(), head * group() + i % group(), partials[at], sums + at * wide());
      }
  }

  int64_t few_bytes() const {
    const int64_t all = kv_heads * segments() * rows * group();
    return padded(all * (int64_t)sizeof(Partial), 64) + all * wide() * (int64_t)sizeof(float);
  }
};

static void attention(Float type, const void* q, int64_t stride, int64_t heads, int64_t kv_heads,
                      int64_t dim, const Sequence* sequences, int64_t count, int64_t layer,
                      int64_t window, float scale, float cap, void* out, Pool* pool) {
  with_type(type, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    auto of = [&](const Sequence& s) {
      const int64_t before = layer * kv_heads * s.capacity * dim;
      return Attention<T>{(const T*)q + s.first * stride, stride, s.rows, heads, kv_heads, dim,
                          (const T*)s.keys + before, (const T*)s.values + before, s.capacity,
                          s.context, window, scale, cap, (T*)out + s.first * heads * dim};
    };
    // Segments side by side where rows and heads are too few to share.
    if (const auto one = of(*sequences); count == 1 && one.rows <= one.rows_at_once() && one.segments() > 1)
      return one.few(pool, pool_memory(pool, one.few_bytes()));
    int64_t* ends = (int64_t*)pool_memory(pool, count * (int64_t)sizeof(int64_t));
    int64_t tasks = 0, work = 0;
    for (int64_t i = 0; i < count; i++) {
      ends[i] = tasks += of(sequences[i]).tasks();
      work += of(sequences[i]).work();
    }
    share(pool, tasks, work, Attention<T>::Memory::size(of(*sequences)),
          [&](int64_t task, char* scratch) {
            const int64_t i = std::upper_bound(ends, ends + count, task) - ends;
            of(sequences[i]).run(task - (i ? ends[i - 1] : 0), scratch);
          });
  });
}

}  // namespace VARIANT
