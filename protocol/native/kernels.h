// The table of kernels that every instruction-set variant fills. Sizes are counts of elements, and
// the caller has checked them: kernels trust their arguments, but not what a service computed.
//
// Matrices are dense and row by row unless a stride is given (in elements). `Float` is the type
// of activations. Integers wrap modulo 2^32, sums of checks modulo 2^64. A row's bits depend on
// that row and the variant alone.
#pragma once

#include <stdint.h>

#include "pool.h"

enum class Float : int { f32 = 0, bf16 = 1 };

// Activations of an MLP: x / (1 + e^-x); GELU by its approximation with tanh; max(x, 0)^2; xIELU
// (arXiv 2411.13010) by alpha_p, alpha_n, beta and eps.
enum class Activation : int { silu, gelu_pytorch_tanh, relu2, xielu };

// Secret vectors that a product of integers is checked with.
constexpr int CHECKS = 2;

// Rows of a batch, from `first` on, that are the last of `context` positions of one sequence. Its
// keys and values: [layers, kv_heads, capacity, dim].
struct Sequence {
  int64_t first, rows;
  void *keys, *values;
  int64_t capacity, context;
};

// Elements of AES-256-CTR under a key: from the `element`-th after the counter block high | low (128
// bits, big endian) on, little endian. `low` does not wrap. What `protocol.native.STREAM` has.
struct Stream {
  uint8_t key[32];
  uint64_t high, low, element;
};

struct Kernels {
  const char* name;

  // ---- integers ---------------------------------------------------------------------------------

  // out = the sums of streams, int32 [rows, features]; streams [rows, parts]. Returns whether this
  // variant draws at all.
  bool (*draw)(const Stream* streams, int64_t rows, int64_t parts, int64_t features, int32_t* out,
               Pool* pool);

  // sent = q + r, with q = round(x / scale) and r given or drawn (`streams` [rows, parts]), or none.
  // x [rows, in]; r, sent [rows, in]. `scales` [rows] gets each row's scale, its largest element /
  // `largest`, or the smallest normal number. With `low`, `expected` gets what `expect` makes of q.
  // Returns whether x is finite; false, and nothing else, where this variant does not draw.
  bool (*encode)(Float type, const void* x, int64_t rows, int64_t in, float largest, float* scales,
                 const int32_t* r, const Stream* streams, int64_t parts, const int32_t* low,
                 const int32_t* high, uint64_t* expected, int32_t* sent, Pool* pool);

  // expected[row][c] = sum_k q[row][k] * products[c][k] mod 2^64. `low`, `high` [CHECKS, in] are
  // the signed halves of the products: low + 2^32 high; `high` may be absent.
  void (*expect)(const int32_t* q, int64_t rows, int64_t in, const int32_t* low,
                 const int32_t* high, uint64_t* expected, Pool* pool);

  // out = (y - u) * scales * factor + bias. y, u [rows, outs] int32; scales, float32 [rows], and
  // factor, float32 [outs]; u and bias may be absent; bias and out in `type`, rounded to it before
  // and after the bias. With `vectors` [CHECKS, outs], returns whether sum_j (y - u)[row][j] *
  // vectors[c][j] is as expected in every row; without, true. Each element of y and u is read once.
  bool (*decode)(Float type, const int32_t* y, const int32_t* u, int64_t rows, int64_t outs,
                 const float* scales, const float* factor, const void* bias, void* out,
                 const int32_t* vectors, const uint64_t* expected, Pool* pool);

  // y = q weight^T mod 2^32, of the lowest `digits` (1 to 4) balanced base-256 digits of q.
  // q [rows, in], y [rows, outs]; weight int8 [outs, in] with a stride between outputs. `in` is
  // below 2^17.
  void (*product)(const int32_t* q, int64_t rows, int64_t in, int digits, const int8_t* weight,
                  int64_t stride, int64_t outs, int32_t* y, Pool* pool);

  // out = x weight^T + bias, with each row of x as `encode` rounds it, in so many digits (1 to 4) as
  // hold `largest`, and each output of the weight under its `factor`. x [rows, in], out [rows, outs];
  // bias may be absent. Returns whether x is finite.
  bool (*linear)(Float type, const void* x, int64_t rows, int64_t in, float largest, int digits,
                 const int8_t* weight, int64_t stride, const float* factor, const void* bias,
                 int64_t outs, void* out, Pool* pool);

  // ---- floats -----------------------------------------------------------------------------------

  // RMSNorm: out = round(h / sqrt(mean(h^2) + eps)) * weight; LayerNorm where `centred`: out =
  // (h - mean(h)) / sqrt(variance(h) + eps) * weight + bias, which may be absent. h [rows, features]
  // with a stride between rows; out is dense.
  void (*norm)(Float type, const void* h, int64_t stride, int64_t rows, int64_t features,
               const void* weight, const void* bias, float eps, int centred, void* out, Pool* pool);

  // out = f(gate) * up, or f(gate) where up is absent; gate and up [rows, features] with a stride
  // between rows; out is dense. `parameters`: four floats, of xIELU.
  void (*activate)(Float type, Activation kind, const void* gate, const void* up, int64_t stride,
                   int64_t rows, int64_t features, const float* parameters, void* out, Pool* pool);

  // h = h + scale y.
  void (*residual)(Float type, void* h, const void* y, float scale, int64_t count);

  // Rotate the first `turned` elements of each head: its halves, or pairs of `neighbours`; the others
  // stay. x [rows, heads, dim] with a stride between rows, out is dense; cos [rows, turned], sin
  // [rows, turned / 2], whose halves are the same.
  void (*rope)(Float type, const void* x, int64_t stride, int64_t rows, int64_t heads, int64_t dim,
               int64_t turned, int neighbours, const void* cos, const void* sin, void* out,
               Pool* pool);

  // Write each sequence's rows of keys and values to their positions in a layer. k, v [all rows,
  // heads, dim] with a stride between rows each.
  void (*append)(Float type, const void* k, int64_t k_stride, const void* v, int64_t v_stride,
                 int64_t heads, int64_t dim, const Sequence* sequences, int64_t count,
                 int64_t layer);

  // Causal grouped-query attention of each sequence's rows in a layer: softmax(s) v of s = scale q
  // k^T, or of cap tanh(s / cap) unless `cap` is 0. q [all rows, heads, dim] with a stride between
  // rows, out [all rows, heads, dim] dense. A row looks at itself and what comes before it, at most
  // `window` positions in all (0: no limit).
  void (*attention)(Float type, const void* q, int64_t stride, int64_t heads, int64_t kv_heads,
                    int64_t dim, const Sequence* sequences, int64_t count, int64_t layer,
                    int64_t window, float scale, float cap, void* out, Pool* pool);
};

// Static: compiled with the target options of each variant, so that no two may be merged.
static inline int64_t padded(int64_t size, int64_t multiple) {
  return (size + multiple - 1) / multiple * multiple;
}
