// Products and attention by tiles that are emulated, against their definition: odd shapes, random
// and extreme values, threads, in buffers with not one byte to spare. Built under sanitizers, over
// the portable vectors (products alone) or (`-DWITH_AVX512`) those that the variant has. `tiles
// attention` compares that alone; `tiles NAME` misuses an instruction.
#include <math.h>

#include <string>
#include <vector>

#include "emulated_tiles.h"

#if defined(WITH_AVX512)
#define WITH_BF16
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,avx2,fma")
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#define WITH_AMX
#define VARIANT tiled
#include "protocol/native/product.h"
#if defined(WITH_AVX512)
#include "tee_side/native/attention.h"
#endif

namespace {

enum Values { RANDOM, LOWEST, HIGHEST, MIXED };

uint32_t number() {
  static uint32_t state = 1;
  state = state * 1664525u + 1013904223u;
  return state ^ state >> 15;
}

// Of an element, or of a weight as its own only digit: every digit -128, every digit 127, or either.
int32_t value(Values values) {
  uint32_t bits = number();
  if (values == LOWEST || (values == MIXED && bits & 1 << 9)) return static_cast<int32_t>(0x7f7f7f80);
  return values == RANDOM ? static_cast<int32_t>(bits) : 0x7f7f7f7f;
}

// What the lowest `digits` balanced digits of an element come to.
int32_t lowest_of(int32_t element, int digits) {
  const uint32_t all = digits == 4 ? ~0u : (1u << (8 * digits)) - 1, half = 0x80808080u & all;
  return static_cast<int32_t>(((static_cast<uint32_t>(element) + half) & all) - half);
}

// Returns how many outputs differ from the definition, or 1 where the wrong instructions ran.
int differs(int64_t rows, int64_t in, int64_t outs, int64_t gap, int digits, Values of_q,
            Values of_weight, Pool* pool) {
  const int64_t stride = in + gap;
  std::vector<int32_t> q(rows * in), y(rows * outs, 77);
  std::vector<int8_t> weight((outs - 1) * stride + in);
  for (int32_t& element : q) element = value(of_q);
  for (int8_t& byte : weight) byte = static_cast<int8_t>(value(of_weight));
  const int64_t before = emulated::products;
  tiled::product(q.data(), rows, in, digits, weight.data(), stride, outs, y.data(), pool);
  if (emulated::state.in_use()) return printf("tiles: left in use\n"), 1;
  // One task at least is this thread's, unless others were faster.
  const bool by_tiles = emulated::products > before, meant = rows >= 16 && rows * digits > 16;
  if (pool_threads(pool) == 1 && by_tiles != meant) return printf("tiles: %d\n", by_tiles), 1;
  int wrong = 0;
  for (int64_t row = 0; row < rows; row++)
    for (int64_t j = 0; j < outs; j++) {
      uint32_t right = 0;
      for (int64_t k = 0; k < in; k++)
        right += static_cast<uint32_t>(lowest_of(q[row * in + k], digits)) *
                 static_cast<uint32_t>(weight[j * stride + k]);
      wrong += static_cast<uint32_t>(y[row * outs + j]) != right;
    }
  if (wrong)
    printf("%d of [%d, %d] x [%d, %d], %d digits, values %d and %d\n", wrong, int(rows), int(in),
           int(in), int(outs), digits, of_q, of_weight);
  return wrong;
}

bool all_right(Pool* alone, Pool* three) {
  for (int64_t rows : {1, 15, 16, 17, 31, 32, 33, 47, 49, 64})
    for (int64_t in : {1, 63, 64, 65, 200})
      for (int64_t outs : {1, 16, 17, 33, 64, 83})
        for (int digits : {1, 4})
          if (differs(rows, in, outs, outs % 3, digits, RANDOM, RANDOM, alone)) return false;
  for (Values of_q : {LOWEST, HIGHEST, MIXED})
    for (Values of_weight : {LOWEST, HIGHEST, MIXED, RANDOM})
      for (int digits = 1; digits <= 4; digits++)
        if (differs(37, 330, 83, 0, digits, of_q, of_weight, alone)) return false;
  for (int i = 0; i < 20; i++)
    if (differs(40, 260, 300 + i, 1, 4, RANDOM, RANDOM, three)) return false;
  return !differs(1000, 130, 50, 3, 2, RANDOM, RANDOM, alone) &&
         !differs(16, 131071, 2, 0, 2, LOWEST, LOWEST, alone);  // a sum that wraps
}

#if defined(WITH_AVX512)
using tiled::bf16;
float fraction() { return static_cast<float>(number() % 2001) / 1000 - 1; }
bf16 narrowed(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return {static_cast<uint16_t>(bits >> 16)};
}
double wide(bf16 value) {
  uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float number;
  memcpy(&number, &bits, 4);
  return number;
}

// Whether attention is that of its definition, by tiles, and of one row alone
// the same bits as among others.
bool attends(int64_t rows, int64_t heads, int64_t kv_heads, int64_t dim, int64_t context,
             int64_t window, Pool* pool) {
  const int64_t capacity = context + 3;
  std::vector<bf16> q(rows * heads * dim), keys(kv_heads * capacity * dim), values(keys.size());
  std::vector<bf16> out(q.size()), last(heads * dim);
  for (auto* some : {&q, &keys, &values})
    for (bf16& one : *some) one = narrowed(2 * fraction());
  const int64_t before = emulated::products, stride = heads * dim;
  auto attend = [&](int64_t first, int64_t count, bf16* to) {
    const Sequence one{0, count, keys.data(), values.data(), capacity, context};
    tiled::attention(Float::bf16, q.data() + first * stride, stride, heads, kv_heads, dim, &one, 1,
                     0, window, to, pool);
  };
  attend(0, rows, out.data());
  attend(rows - 1, 1, last.data());
  if (emulated::state.in_use()) return printf("attention: left in use\n"), false;
  if (pool_threads(pool) == 1 && emulated::products == before)
    return printf("attention: nothing by tiles\n"), false;
  if (memcmp(last.data(), out.data() + (rows - 1) * stride, stride * sizeof(bf16)))
    return printf("attention: a row differs from itself among %d\n", int(rows)), false;
  for (int64_t row = 0; row < rows; row++)
    for (int64_t head = 0; head < heads; head++) {
      const int64_t end = context - rows + row + 1, kv = head / (heads / kv_heads);
      const int64_t begin = window && end > window ? end - window : 0;
      const bf16* query = q.data() + row * stride + head * dim;
      std::vector<double> weight(end), sum(dim);
      double total = 0;
      for (int64_t s = begin; s < end; s++) {
        double score = 0;
        for (int64_t k = 0; k < dim; k++)
          score += wide(query[k]) * wide(keys[(kv * capacity + s) * dim + k]);
        total += weight[s] = exp(score / sqrt(static_cast<double>(dim)));
      }
      for (int64_t s = begin; s < end; s++)
        for (int64_t k = 0; k < dim; k++)
          sum[k] += weight[s] / total * wide(values[(kv * capacity + s) * dim + k]);
      for (int64_t k = 0; k < dim; k++)
        if (double got = wide(out[row * stride + head * dim + k]); !(fabs(got - sum[k]) < 0.02))
          return printf("attention: %g, not %g, of [%d, %d of %d, %d], %d, %d\n", got, sum[k],
                        int(rows), int(heads), int(kv_heads), int(dim), int(context), int(window)),
                 false;
    }
  return true;
}

bool all_attend(Pool* alone, Pool* three) {
  for (int64_t rows : {1, 3, 16, 17, 40})
    for (int64_t window : {0, 33})
      if (!attends(rows, 4, 2, 64, 100, window, alone)) return false;
  return attends(5, 3, 1, 128, 70, 0, alone) && attends(5, 4, 4, 80, 70, 0, alone) &&
         attends(5, 2, 1, 32, 70, 0, alone) && attends(2, 8, 2, 64, 1200, 0, alone) &&
         attends(90, 6, 2, 64, 700, 0, three);
}
#else
bool all_attend(Pool*, Pool*) { return true; }
#endif

int compare(bool attention) {
  Pool *alone = pool_new(1, 0), *three = pool_new(3, 20);
  const bool right = (attention || all_right(alone, three)) && all_attend(alone, three);
  pool_free(three);
  pool_free(alone);
  return right ? 0 : 1;
}

// What a processor refuses, and what an emulator that does not is no test of.
int misuse(const std::string& kind) {
  emulated::Config config{1, 0, {}, {64, 64, 64, 32}, {16, 16, 16, 16}};
  std::vector<int8_t> row(64 * 16);
  if (kind == "palette") config.palette = 2;
  if (kind == "rows") config.rows[0] = 17;
  if (kind == "bytes") config.row_bytes[0] = 68;
  if (kind == "reserved") config.reserved[13] = 1;
  if (kind == "half") config.rows[2] = 0;
  if (kind != "unset") _tile_loadconfig(&config);
  if (kind == "overrun") _tile_loadd(0, row.data() + 1, 64);
  if (kind == "absent") _tile_zero(4);
  if (kind == "twice") _tile_dpbssd(0, 1, 1);
  if (kind == "mismatch") _tile_dpbssd(0, 1, 3);
  _tile_zero(0);
  if (kind != "kept") _tile_release();
  return 0;
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 2) return compare(false);
  const std::string kind = arguments[1];
  return kind == "attention" ? compare(true) : misuse(kind);
}
