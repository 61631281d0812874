// x86-64 with AVX2 and FMA: AMD Milan, Intel before Ice Lake.
#if defined(__x86_64__)
#pragma GCC target("avx2,fma,aes")
#define WITH_AVX2
#define WITH_AES
#define VARIANT avx2
#define VARIANT_NAME "avx2"
#include "variant.h"
#endif
