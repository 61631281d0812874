// x86-64 with AVX-512 and VNNI: Intel Ice Lake.
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,aes,vaes")
#define WITH_AVX512
#define WITH_AES
// GCC 12 warns of the undefined operand in its own intrinsics (its bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#define VARIANT vnni
#define VARIANT_NAME "vnni"
#include "variant.h"
#endif
