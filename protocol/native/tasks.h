// Splits a kernel's rows among threads. Included by each variant, inside its target options.
#pragma once

#include "kernels.h"
#include "vectors.h"

namespace VARIANT {

// Work, in elements of a pass over memory (some 4 a nanosecond), below which waking others costs
// more than they save.
constexpr int64_t WORTH_SHARING = 1 << 17;

// Run body(task, scratch) for each task; on this thread alone where there is little `work`.
template <class Body>
void share(Pool* pool, int64_t tasks, int64_t work, int64_t scratch_bytes, Body&& body) {
  Task call = [](void* kernel, int64_t task, char* scratch) {
    (*static_cast<Body*>(kernel))(task, scratch);
  };
  // A job of one task runs on the caller, and has scratch as any other.
  if (work >= WORTH_SHARING && tasks > 1) return pool_run(pool, tasks, scratch_bytes, call, &body);
  auto all = [&](int64_t, char* scratch) {
    for (int64_t task = 0; task < tasks; task++) body(task, scratch);
  };
  Task whole = [](void* kernel, int64_t task, char* scratch) {
    (*static_cast<decltype(all)*>(kernel))(task, scratch);
  };
  pool_run(pool, 1, scratch_bytes, whole, &all);
}

// Call body with a null pointer of the type of activations.
template <class Body>
INLINE void with_type(Float type, Body&& body) {
  if (type == Float::f32)
    body(static_cast<float*>(nullptr));
  else
    body(static_cast<bf16*>(nullptr));
}

}  // namespace VARIANT
