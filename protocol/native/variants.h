// The variants that were compiled, and which of them this processor has.
#pragma once

#include "kernels.h"

namespace portable {
extern const Kernels table;
}
#if defined(__x86_64__)
namespace avx2 {
extern const Kernels table;
}
namespace vnni {
extern const Kernels table;
}
namespace avx512 {
extern const Kernels table;
}
namespace amx {
extern const Kernels table;
bool permitted();
}
#endif

struct Variant {
  const Kernels* kernels;
  bool here;
};

// The best one last.
static inline const Variant* variants(int* count) {
#if defined(__x86_64__)
  static const bool vnni_here =
      __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("vaes");
  static const bool avx512_here = vnni_here && __builtin_cpu_supports("avx512bf16");
  // Whether the system saves tiles (XCR0) is part of what a processor supports; it is asked last.
  static const bool amx_here = avx512_here && __builtin_cpu_supports("amx-tile") &&
                               __builtin_cpu_supports("amx-int8") &&
                               __builtin_cpu_supports("amx-bf16") && amx::permitted();
#endif
  static const Variant all[] = {
      {&portable::table, true},
#if defined(__x86_64__)
      {&avx2::table, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                          __builtin_cpu_supports("aes")},
      {&vnni::table, vnni_here},
      {&avx512::table, avx512_here},
      {&amx::table, amx_here},
#endif
  };
  *count = sizeof all / sizeof *all;
  return all;
}
