// x86-64 with AVX-512, VNNI and BF16: AMD Genoa and later, Intel Sapphire Rapids and later.
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,avx2,fma,aes,vaes")
#define WITH_AVX512
#define WITH_BF16
#define WITH_AES
// GCC 12 warns of the undefined operand in its own intrinsics (its bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#define VARIANT avx512
#define VARIANT_NAME "avx512"
#include "variant.h"
#endif
