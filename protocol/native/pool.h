// Threads that share the rows of one kernel, and spin between two of them.
#pragma once

#include <stdint.h>

struct Pool;

// A task of a kernel: `scratch` is this thread's own memory, as large as the kernel asked for.
typedef void (*Task)(void* kernel, int64_t task, char* scratch);

// `threads` counts the caller, at least 1. A worker that finds nothing to do for `spin_us` sleeps.
Pool* pool_new(int threads, int spin_us);
void pool_free(Pool* pool);
int pool_threads(const Pool* pool);

// Memory of the caller that lives until it asks again.
char* pool_memory(Pool* pool, int64_t bytes);

// Run tasks 0 ... count - 1, and return when all have ended. One caller at a time.
void pool_run(Pool* pool, int64_t count, int64_t scratch_bytes, Task task, void* kernel);
