// Kernels over rows of floats: norms, activations, rotations, the cache.
#pragma once

#include "../../protocol/native/tasks.h"

namespace VARIANT {

template <class T>
INLINE float mean_square(const T* h, int64_t features) {
  f32x16 squares = broadcast(0.f);
  each_vector(features, [&](int64_t k, int64_t count) {
    f32x16 x = load_floats(h + k, count);
    squares = multiply_add(x, x, squares);
  });
  return sum(squares) / (float)features;
}

static void rms_norm(Float type, const void* h, int64_t stride, int64_t rows, int64_t features,
                     const void* weight, float eps, void* out, Pool* pool) {
  with_type(type, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    share(pool, rows, rows * features, 0, [=](int64_t row, char*) {
      const T *from = (const T*)h + row * stride, *gain = (const T*)weight;
      T* to = (T*)out + row * features;
      f32x16 scale = broadcast(1.f / sqrtf(mean_square(from, features) + eps));
      each_vector(features, [&](int64_t k, int64_t count) {
        f32x16 normed = rounded_to(from, load_floats(from + k, count) * scale);
        store_floats(to + k, normed * load_floats(gain + k, count), count);
      });
    });
  });
}

static void silu_mul(Float type, const void* gate, const void* up, int64_t stride, int64_t rows,
                     int64_t features, void* out, Pool* pool) {
  // In parts of a row, so that one row is shared, too.
  const int64_t part = 1024, parts = (features + part - 1) / part;
  with_type(type, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    share(pool, rows * parts, rows * features, 0, [=](int64_t task, char*) {
      int64_t row = task / parts, first = task % parts * part;
      int64_t last = first + part < features ? first + part : features;
      const T *g = (const T*)gate + row * stride, *u = (const T*)up + row * stride;
      T* to = (T*)out + row * features;
      each_vector(last - first, [&](int64_t k, int64_t count) {
        f32x16 x = load_floats(g + first + k, count);
        f32x16 silu = rounded_to(g, x / (exponential(negative(x)) + 1.f));
        store_floats(to + first + k, silu * load_floats(u + first + k, count), count);
      });
    });
  });
}

static void residual(Float type, void* h, const void* y, int64_t count) {
  with_type(type, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    T* to = (T*)h;
    const T* from = (const T*)y;
    each_vector(count, [&](int64_t k, int64_t here) {
      store_floats(to + k, load_floats(to + k, here) + load_floats(from + k, here), here);
    });
  });
}

static void rope(Float type, const void* x, int64_t stride, int64_t rows, int64_t heads,
                 int64_t dim, const void* cos, const void* sin, void* out, Pool* pool) {
  with_type(type, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    share(pool, rows, rows * heads * dim, 0, [=](int64_t row, char*) {
      const int64_t half = dim / 2;
      const T *c = (const T*)cos + row * dim, *s = (const T*)sin + row * half;
      for (int64_t head = 0; head < heads; head++) {
        const T* from = (const T*)x + row * stride + head * dim;
        T* to = (T*)out + (row * heads + head) * dim;
        each_vector(half, [&](int64_t k, int64_t count) {
          f32x16 first = load_floats(from + k, count), second = load_floats(from + half + k, count);
          f32x16 sine = load_floats(s + k, count);
          f32x16 a = rounded_to(from, first * load_floats(c + k, count));
          f32x16 b = rounded_to(from, second * load_floats(c + half + k, count));
          store_floats(to + k, multiply_add(negative(second), sine, a), count);
          store_floats(to + half + k, multiply_add(first, sine, b), count);
        });
      }
    });
  });
}

static void append(Float type, const void* k, int64_t k_stride, const void* v, int64_t v_stride,
                   int64_t heads, int64_t dim, const Sequence* sequences, int64_t count,
                   int64_t layer) {
  const int64_t bytes = type == Float::f32 ? 4 : 2, size = dim * bytes;
  auto write = [&](const Sequence& s, const void* x, int64_t stride, void* cache) {
    for (int64_t head = 0; head < heads; head++)
      for (int64_t row = 0; row < s.rows; row++)
        memcpy((char*)cache + ((layer * heads + head) * s.capacity + s.context - s.rows + row) * size,
               (const char*)x + ((s.first + row) * stride + head * dim) * bytes, size);
  };
  for (const Sequence* s = sequences; s < sequences + count; s++)
    write(*s, k, k_stride, s->keys), write(*s, v, v_stride, s->values);
}

}  // namespace VARIANT
