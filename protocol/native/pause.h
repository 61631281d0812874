// What a thread does between two looks at a word that another writes.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#define PAUSE() _mm_pause()
#else
#include <thread>
#define PAUSE() std::this_thread::yield()
#endif
