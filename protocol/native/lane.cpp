#include "lane.h"

#include <sched.h>

#include <atomic>
#include <chrono>

#include "pause.h"

namespace {

// Looks between two looks at the clock, and the turn that another program gets of this core.
constexpr int LOOKS = 64;

template <class T>
T load(const T& word, int order) {
  T value;
  __atomic_load(&word, &value, order);
  return value;
}

int64_t changed(const LaneLine* lines, LaneSeen* seen, int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    uint32_t number = load(lines[i].number, __ATOMIC_ACQUIRE);
    if (number == seen[i].number) continue;
    seen[i] = {number, load(lines[i].bytes, __ATOMIC_RELAXED)};
    return i;
  }
  return -1;
}

}  // namespace

int64_t lane_look(const LaneLine* lines, LaneSeen* seen, int64_t count, int64_t spin_us) {
  int64_t found = changed(lines, seen, count);
  if (found >= 0 || spin_us <= 0) return found;
  auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(spin_us);
  do {
    for (int i = 0; i < LOOKS; i++) {
      found = changed(lines, seen, count);
      if (found >= 0) return found;
      PAUSE();
    }
    sched_yield();
  } while (std::chrono::steady_clock::now() < until);
  return -1;
}

bool lane_publish(LaneLine* line, int64_t number, int64_t bytes, const uint32_t* sleeps) {
  __atomic_store_n(&line->bytes, static_cast<uint64_t>(bytes), __ATOMIC_RELAXED);
  __atomic_store_n(&line->number, static_cast<uint32_t>(number), __ATOMIC_RELEASE);
  // One of two happens: we see that the other end sleeps, or it sees the message before it does.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  return load(*sleeps, __ATOMIC_RELAXED) != 0;
}

void lane_sleep(uint32_t* sleeps, int64_t asleep) {
  __atomic_store_n(sleeps, static_cast<uint32_t>(asleep), __ATOMIC_RELAXED);
  std::atomic_thread_fence(std::memory_order_seq_cst);
}
