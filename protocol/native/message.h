// A message of two frames as `protocol.stream_wire` lays it out: a header, of which all but a few
// numbers is known before, and the numbers of one tensor. In a slot of shared memory, or on a stream.
#pragma once

#include <stdint.h>

#include "lane.h"

// What precedes the tensor, and where in it the numbers stand, 8 bytes each and big-endian: a
// request's id and time-out, a reply's id and two times. 0: there is no such number.
struct MessageShape {
  int64_t head_bytes, payload_bytes, number_at[3];
  char head[];
};

constexpr int64_t MAX_HEAD_BYTES = 1024;
constexpr uint64_t MAX_TIMING_US = uint64_t{1} << 53;  // as in `protocol.messages`
enum : int64_t { LANE_TAKEN = 1, LANE_NOTHING = 0, LANE_OTHER = -1, STREAM_TAKEN = -1 };

// Put a request into an area and let the other end see it, as `lane_publish`.
bool lane_put(const MessageShape* shape, int64_t id, int64_t timeout_ms, const void* payload,
              char* area, LaneLine* line, int64_t number, const uint32_t* sleeps);

// Copy the reply with this id out of an area, its tensor to `payload` (null: it is left there); each
// byte is read once. Looks for it `spin_us`, or less than 0: it was seen. Returns LANE_TAKEN, or
// LANE_NOTHING where none has come, or LANE_OTHER for another message, which then counts as seen.
int64_t lane_take(const MessageShape* shape, int64_t id, const char* area, const LaneLine* line,
                  LaneSeen* seen, int64_t spin_us, void* payload, int64_t* times);

// Write a request to a socket without waiting; returns how much of it was taken, 0 for an error.
int64_t stream_put(const MessageShape* shape, int64_t id, int64_t timeout_ms, const void* payload,
                   int64_t socket);

// Receive the reply with this id, if it is the next message: its tensor goes to `payload`. Looks for
// it `spin_us` and then sleeps `wait_ms`. Returns STREAM_TAKEN, or how many bytes of another came.
int64_t stream_take(const MessageShape* shape, int64_t id, int64_t socket, char* buffer,
                    int64_t spin_us, int64_t wait_ms, void* payload, int64_t* times);
