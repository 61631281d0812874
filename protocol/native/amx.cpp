// x86-64 as avx512.cpp has it, and tiles of bytes and bfloat16 besides: Intel Sapphire Rapids and later.
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,avx2,fma,aes,vaes")
#pragma GCC target("amx-tile,amx-int8,amx-bf16")
#define WITH_AVX512
#define WITH_BF16
#define WITH_AES
#define WITH_AMX
// GCC 12 warns of the undefined operand in its own intrinsics (its bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#define VARIANT amx
#define VARIANT_NAME "amx"
#include <sys/syscall.h>
#include <unistd.h>

#include "variant.h"

namespace amx {

// Ask Linux for the registers of tiles, 8 KiB that a thread has from its first use on; every thread
// of the process may then. A system that does not know them, or has no room, says no.
bool permitted() {
  constexpr int REQUEST = 0x1023, TILES = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, REQUEST, TILES) == 0;
}

}  // namespace amx
#endif
