#include "message.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <string.h>
#include <sys/socket.h>

#include <chrono>

namespace {

void write_head(const MessageShape* shape, int64_t id, int64_t timeout_ms, char* to) {
  const int64_t numbers[] = {id, timeout_ms};
  memcpy(to, shape->head, shape->head_bytes);
  for (int i = 0; i < 2; i++) {
    uint64_t big_endian = __builtin_bswap64(static_cast<uint64_t>(numbers[i]));
    memcpy(to + shape->number_at[i], &big_endian, sizeof big_endian);
  }
}

// Whether this head is as expected; its times to `times`. Changes the head.
bool is_expected(const MessageShape* shape, int64_t id, char* head, int64_t* times) {
  uint64_t numbers[3];
  for (int i = 0; i < 3; i++) {
    char* at = head + shape->number_at[i];
    memcpy(&numbers[i], at, sizeof numbers[i]);
    numbers[i] = __builtin_bswap64(numbers[i]);
    memcpy(at, shape->head + shape->number_at[i], sizeof numbers[i]);
  }
  if (numbers[0] != static_cast<uint64_t>(id) || memcmp(head, shape->head, shape->head_bytes))
    return false;
  for (int i = 0; i < 2; i++) {
    if (numbers[i + 1] > MAX_TIMING_US) return false;
    times[i] = static_cast<int64_t>(numbers[i + 1]);
  }
  return true;
}

}  // namespace

bool lane_put(const MessageShape* shape, int64_t id, int64_t timeout_ms, const void* payload,
              char* area, LaneLine* line, int64_t number, const uint32_t* sleeps) {
  write_head(shape, id, timeout_ms, area);
  memcpy(area + shape->head_bytes, payload, shape->payload_bytes);
  return lane_publish(line, number, shape->head_bytes + shape->payload_bytes, sleeps);
}

int64_t lane_take(const MessageShape* shape, int64_t id, const char* area, const LaneLine* line,
                  LaneSeen* seen, int64_t spin_us, void* payload, int64_t* times) {
  if (spin_us >= 0 && lane_look(line, seen, 1, spin_us) < 0) return LANE_NOTHING;
  if (seen->bytes != uint64_t(shape->head_bytes + shape->payload_bytes)) return LANE_OTHER;
  char head[MAX_HEAD_BYTES];
  memcpy(head, area, shape->head_bytes);
  // The copy must not become reads of what the other end may have changed by then.
  __asm__ volatile("" : : "r"(head) : "memory");
  if (!is_expected(shape, id, head, times)) return LANE_OTHER;
  if (payload) memcpy(payload, area + shape->head_bytes, shape->payload_bytes);
  return LANE_TAKEN;
}

int64_t stream_put(const MessageShape* shape, int64_t id, int64_t timeout_ms, const void* payload,
                   int64_t socket) {
  char head[MAX_HEAD_BYTES];
  write_head(shape, id, timeout_ms, head);
  iovec pieces[] = {
      {head, static_cast<size_t>(shape->head_bytes)},
      {const_cast<void*>(payload), static_cast<size_t>(shape->payload_bytes)},
  };
  msghdr message = {};
  message.msg_iov = pieces;
  message.msg_iovlen = 2;
  ssize_t written = sendmsg(static_cast<int>(socket), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
  return written < 0 ? 0 : written;
}

int64_t stream_take(const MessageShape* shape, int64_t id, int64_t socket, char* buffer,
                    int64_t spin_us, int64_t wait_ms, void* payload, int64_t* times) {
  const int64_t total = shape->head_bytes + shape->payload_bytes;
  auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(spin_us);
  int64_t come = 0;
  while (come < total) {
    ssize_t received = recv(static_cast<int>(socket), buffer + come, total - come, MSG_DONTWAIT);
    if (received > 0) {
      come += received;
    } else if (received == 0 || (errno != EAGAIN && errno != EINTR)) {
      return come;  // the next to receive finds the same
    } else if (std::chrono::steady_clock::now() < until) {
      sched_yield();
    } else if (wait_ms > 0 && come == 0) {
      pollfd readable = {static_cast<int>(socket), POLLIN, 0};
      if (poll(&readable, 1, static_cast<int>(wait_ms)) <= 0) return 0;
      wait_ms = 0;
    } else {
      return come;
    }
  }
  char head[MAX_HEAD_BYTES];
  memcpy(head, buffer, shape->head_bytes);
  if (!is_expected(shape, id, head, times)) return come;
  memcpy(payload, buffer + shape->head_bytes, shape->payload_bytes);
  return STREAM_TAKEN;
}
