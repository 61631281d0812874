// The words by which two processes hand messages to each other in memory that both map
// (`protocol.shared_memory`). The other end may write anything there at any time: a number or size
// is read once, into memory of our own, and believed for nothing but that there is something to
// look at. No futex: words of a virtual machine's memory have none on its host.
#pragma once

#include <stdint.h>

// What one end has last put into a slot: how many messages so far, and how large this one is.
// One line of the cache each, written by one end alone.
struct alignas(64) LaneLine {
  uint32_t number;
  uint64_t bytes;
};

// What this end has last seen of a line; private.
struct LaneSeen {
  uint64_t number, bytes;
};

// Return the first line whose number differs from what was seen, and note it as seen; -1 where none
// does for `spin_us`.
int64_t lane_look(const LaneLine* lines, LaneSeen* seen, int64_t count, int64_t spin_us);

// Let the other end see a message, which is in its place; returns whether that end sleeps.
bool lane_publish(LaneLine* line, int64_t number, int64_t bytes, const uint32_t* sleeps);

// Say whether this end sleeps; before it does, it must look once more.
void lane_sleep(uint32_t* sleeps, int64_t asleep);
