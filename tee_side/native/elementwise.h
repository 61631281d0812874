// Kernels over rows of floats: norms, activations, rotations, the cache.
#pragma once

#include "../../protocol/native/tasks.h"

namespace VARIANT {

// The mean of (h - around)^2.
template <class T>
INLINE float mean_square(const T* h, int64_t features, float around) {
  f32x16 squares = broadcast(0.f);
  each_vector(features, [&](int64_t k, int64_t count) {
    f32x16 x = load_floats(h + k, count) - around;
    if (count < LANES) {  // what is no element is no distance
      float some[LANES];
      store(some, x);
      x = load_floats(some, count);
    }
    squares = multiply_add(x, x, squares);
  });
  return sum(squares) / (float)features;
}

template <class T>
INLINE float mean_of(const T* h, int64_t features) {
  f32x16 total = broadcast(0.f);
  each_vector(features, [&](int64_t k, int64_t count) { total = total + load_floats(h + k, count); });
  return sum(total) / (float)features;
}

static void norm(Float type, const void* h, int64_t stride, int64_t rows, int64_t features,
                 const void* weight, const void* bias, float eps, int centred, void* out,
                 Pool* pool) {
  with_type(type, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    share(pool, rows, rows * features, 0, [=](int64_t row, char*) {
      const T *from = (const T*)h + row * stride, *gain = (const T*)weight, *more = (const T*)bias;
      T* to = (T*)out + row * features;
      const float mean = centred ? mean_of(from, features) : 0.f;
      f32x16 scale = broadcast(1.f / sqrtf(mean_square(from, features, mean) + eps));
      each_vector(features, [&](int64_t k, int64_t count) {
        f32x16 x = load_floats(from + k, count);
        x = centred ? (x - mean) * scale : rounded_to(from, x * scale);
        x = x * load_floats(gain + k, count);
        store_floats(to + k, more ? x + load_floats(more + k, count) : x, count);
      });
    });
  });
}

template <Activation Kind>
INLINE f32x16 activated(f32x16 x, const float* p) {
  if constexpr (Kind == Activation::silu) return x / (exponential(negative(x)) + 1.f);
  if constexpr (Kind == Activation::gelu_pytorch_tanh) {
    // x (1 + tanh u) / 2 = x / (1 + e^-2u), for u = sqrt(2 / pi) (x + 0.044715 x^3).
    f32x16 u = multiply_add(x * x, x * 0.044715f, x) * -1.5957691216f;
    return x / (exponential(u) + 1.f);
  }
  if constexpr (Kind == Activation::relu2) {
    f32x16 positive = choose(x < broadcast(0.f), broadcast(0.f), x);
    return positive * positive;
  }
  if constexpr (Kind == Activation::xielu) {
    f32x16 below = choose(x > broadcast(p[3]), broadcast(p[3]), x);
    f32x16 low = (exponential(below) - 1.f - x) * p[1], high = x * x * p[0];
    return choose(x > broadcast(0.f), high, low) + x * p[2];
  }
}

template <Activation Kind>
static void activate_as(Float type, const void* gate, const void* up, int64_t stride, int64_t rows,
                        int64_t features, const float* parameters, void* out, Pool* pool) {
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
        f32x16 y = activated<Kind>(load_floats(g + first + k, count), parameters);
        if (up) y = rounded_to(g, y) * load_floats(u + first + k, count);
        store_floats(to + first + k, y, count);
      });
    });
  });
}

static void activate(Float type, Activation kind, const void* gate, const void* up, int64_t stride,
                     int64_t rows, int64_t features, const float* parameters, void* out,
                     Pool* pool) {
  constexpr decltype(&activate_as<Activation::silu>) each[] = {
      activate_as<Activation::silu>, activate_as<Activation::gelu_pytorch_tanh>,
      activate_as<Activation::relu2>, activate_as<Activation::xielu>};
  each[(int)kind](type, gate, up, stride, rows, features, parameters, out, pool);
}

static void residual(Float type, void* h, const void* y, float scale, int64_t count) {
  with_type(type, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    T* to = (T*)h;
    const T* from = (const T*)y;
    each_vector(count, [&](int64_t k, int64_t here) {
      f32x16 more = rounded_to(from, load_floats(from + k, here) * scale);
      store_floats(to + k, load_floats(to + k, here) + more, here);
    });
  });
}

static void rope(Float type, const void* x, int64_t stride, int64_t rows, int64_t heads,
                 int64_t dim, int64_t turned, int neighbours, const void* cos, const void* sin,
                 void* out, Pool* pool) {
  with_type(type, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    share(pool, rows, rows * heads * dim, 0, [=](int64_t row, char*) {
      const int64_t half = turned / 2;
      const T *c = (const T*)cos + row * turned, *s = (const T*)sin + row * half;
      T pairs[2 * LANES], apart[2 * LANES];
      for (int64_t head = 0; head < heads; head++) {
        const T* from = (const T*)x + row * stride + head * dim;
        T* to = (T*)out + (row * heads + head) * dim;
        memcpy(to + turned, from + turned, (dim - turned) * sizeof(T));
        each_vector(half, [&](int64_t k, int64_t count) {
          const T *one = from + k, *two = from + half + k;
          T *to_one = to + k, *to_two = to + half + k;
          if (neighbours) {
            for (int64_t i = 0; i < count; i++)
              apart[i] = from[2 * (k + i)], apart[LANES + i] = from[2 * (k + i) + 1];
            one = apart, two = apart + LANES, to_one = pairs, to_two = pairs + LANES;
          }
          f32x16 first = load_floats(one, count), second = load_floats(two, count);
          f32x16 sine = load_floats(s + k, count);
          f32x16 a = rounded_to(from, first * load_floats(c + k, count));
          f32x16 b = rounded_to(from, second * load_floats(c + half + k, count));
          store_floats(to_one, multiply_add(negative(second), sine, a), count);
          store_floats(to_two, multiply_add(first, sine, b), count);
          if (neighbours)
            for (int64_t i = 0; i < count; i++)
              to[2 * (k + i)] = pairs[i], to[2 * (k + i) + 1] = pairs[LANES + i];
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
