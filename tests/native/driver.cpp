// Every kernel of every variant that this processor has, over odd sizes and several threads, in
// buffers with not one element to spare. Built under sanitizers, which report; it compares variants
// besides. `driver overrun`, `driver overflow` and `driver race` do what a sanitizer must notice.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "../../protocol/native/message.h"
#include "../../protocol/native/variants.h"

namespace {

// Memory of exactly `count` elements, `shift` bytes behind where malloc aligned it.
template <class T>
class Buffer {
 public:
  explicit Buffer(int64_t count, int shift = 0)
      : bytes_(count * sizeof(T)), memory_(new char[bytes_ + shift]), shift_(shift) {}
  T* get() const { return reinterpret_cast<T*>(memory_.get() + shift_); }
  size_t bytes() const { return bytes_; }

 private:
  size_t bytes_;
  std::unique_ptr<char[]> memory_;
  int shift_;
};

// What the kernels of one variant gave, one result behind the other.
struct Trace {
  std::string exact;
  std::vector<float> near;
};

class Trial {
 public:
  Trial(const Kernels& kernels, int threads, int spin_us)
      : kernels_(kernels), pool_(pool_new(threads, spin_us)) {}
  ~Trial() { pool_free(pool_); }

  Trace run() {
    for (int64_t rows : {1, 2, 3, 9})
      for (int64_t in : {2, 17, 64, 201}) integers(rows, in, 83);
    // Enough to be shared among threads: many rows, and few.
    integers(9, 15001, 130);
    integers(2, 2113, 500);
    integers(33, 201, 83);  // more than two tiles of rows, where there are tiles
    for (Float type : {Float::f32, Float::bf16}) {
      for (int64_t features : {2, 30, 150}) floats(type, 3, features);
      floats(type, 9, 15002);
      attention(type, 1, 4, 4, 16, 1, 0);
      attention(type, 5, 6, 2, 24, 130, 0);
      attention(type, 1, 6, 2, 36, 1300, 700);
      attention(type, 70, 8, 1, 20, 610, 0);
    }
    return trace_;
  }

 private:
  uint32_t number() { return state_ = state_ * 1664525u + 1013904223u, state_ ^ state_ >> 15; }

  template <class T>
  Buffer<T> integers_of(int64_t count, int shift = 0) {
    Buffer<T> buffer(count, shift);
    for (int64_t i = 0; i < count; i++) {
      T value = static_cast<T>(number());
      memcpy(reinterpret_cast<char*>(buffer.get()) + i * sizeof(T), &value, sizeof(T));
    }
    return buffer;
  }

  float one_float() { return static_cast<float>(number() >> 8) / (1 << 22) - 2.f; }

  Buffer<char> floats_of(Float type, int64_t count) {
    const size_t size = type == Float::f32 ? 4 : 2;
    Buffer<char> buffer(count * size);
    for (int64_t i = 0; i < count; i++) {
      float value = one_float();
      memcpy(buffer.get() + i * size, reinterpret_cast<char*>(&value) + 4 - size, size);
    }
    return buffer;
  }

  template <class T>
  void keep(const Buffer<T>& buffer) {
    trace_.exact.append(reinterpret_cast<const char*>(buffer.get()), buffer.bytes());
  }

  void integers(int64_t rows, int64_t in, int64_t outs) {
    // Elements of a request and of a reply lie where the message has them.
    auto q = integers_of<int32_t>(rows * in, 1), y = integers_of<int32_t>(rows * outs, 3);
    auto u = integers_of<int32_t>(rows * outs), vectors = integers_of<int32_t>(CHECKS * outs);
    auto low = integers_of<int32_t>(CHECKS * in), high = integers_of<int32_t>(CHECKS * in);
    const int64_t stride = in + 5;
    auto weight = integers_of<int8_t>((outs - 1) * stride + in);
    Buffer<int32_t> product(rows * outs);
    Buffer<uint64_t> expected(rows * CHECKS);
    kernels_.expect(q.get(), rows, in, low.get(), high.get(), expected.get(), pool_);
    keep(expected);
    for (int digits = 1; digits <= 4; digits++) {
      kernels_.product(q.get(), rows, in, digits, weight.get(), stride, outs, product.get(), pool_);
      keep(product);
    }
    Buffer<float> factor(outs);
    for (int64_t i = 0; i < outs; i++) factor.get()[i] = one_float();
    for (Float type : {Float::f32, Float::bf16}) {
      auto bias = floats_of(type, outs), out = floats_of(type, rows * outs);
      const int32_t* pads[] = {nullptr, u.get()};
      auto x = floats_of(type, rows * in);
      Buffer<float> scales(rows);
      auto r = integers_of<int32_t>(rows * in);
      Buffer<int32_t> sent(rows * in);
      kernels_.encode(type, x.get(), rows, in, 127.f, scales.get(), r.get(), nullptr, 0, low.get(),
                      high.get(), expected.get(), sent.get(), pool_);
      keep(scales), keep(expected), keep(sent);
      drawn(type, rows, in, x, low, high);
      for (const int32_t* pad : pads) {
        bool holds = kernels_.decode(type, y.get(), pad, rows, outs, scales.get(), factor.get(),
                                     bias.get(), out.get(), vectors.get(), expected.get(), pool_);
        trace_.exact += holds ? '1' : '0';
        keep(out);
        kernels_.decode(type, y.get(), pad, rows, outs, scales.get(), factor.get(), nullptr,
                        out.get(), nullptr, nullptr, pool_);
        keep(out);
      }
      for (int digits = 1; digits <= 4; digits++) {
        const float largest[] = {127.f, 32639.f, 4194304.f, 1073741824.f};
        kernels_.linear(type, x.get(), rows, in, largest[digits - 1], digits, weight.get(), stride,
                        factor.get(), digits & 1 ? bias.get() : nullptr, outs, out.get(), pool_);
        keep(out);
      }
      // Without a pad, and then what is not finite.
      for (bool spoilt : {false, true}) {
        const float endless = INFINITY;
        const size_t size = type == Float::f32 ? 4 : 2;
        if (spoilt) memcpy(x.get(), reinterpret_cast<const char*>(&endless) + 4 - size, size);
        bool finite = kernels_.encode(type, x.get(), rows, in, 32639.f, scales.get(), nullptr, nullptr,
                                      0, nullptr, nullptr, nullptr, sent.get(), pool_);
        trace_.exact += finite ? '1' : '0';
        keep(scales), keep(sent);
      }
    }
  }

  // Pads that are drawn as they are added are those that were drawn before, and so are the sums.
  void drawn(Float type, int64_t rows, int64_t in, const Buffer<char>& x, const Buffer<int32_t>& low,
             const Buffer<int32_t>& high) {
    const int64_t parts = 2;
    auto words = integers_of<uint64_t>(rows * parts * (sizeof(Stream) / sizeof(uint64_t)));
    auto* streams = reinterpret_cast<const Stream*>(words.get());
    Buffer<int32_t> r(rows * in), before(rows * in), after(rows * in);
    if (!kernels_.draw(streams, rows, parts, in, r.get(), pool_)) return;
    Buffer<float> scales(rows);
    Buffer<uint64_t> sums(rows * CHECKS), again(rows * CHECKS);
    kernels_.encode(type, x.get(), rows, in, 127.f, scales.get(), r.get(), nullptr, 0, low.get(),
                    high.get(), sums.get(), before.get(), pool_);
    kernels_.encode(type, x.get(), rows, in, 127.f, scales.get(), nullptr, streams, parts, low.get(),
                    high.get(), again.get(), after.get(), pool_);
    if (memcmp(before.get(), after.get(), before.bytes())) abort();
    if (memcmp(sums.get(), again.get(), sums.bytes())) abort();
  }

  void floats(Float type, int64_t rows, int64_t features) {
    const int64_t stride = features + 3, size = (rows - 1) * stride + features;
    auto x = floats_of(type, size), up = floats_of(type, size), gain = floats_of(type, features);
    auto out = floats_of(type, rows * features), h = floats_of(type, rows * features);
    for (int centred : {0, 1}) {
      kernels_.norm(type, x.get(), stride, rows, features, gain.get(), centred ? gain.get() : nullptr,
                    1e-5f, centred, out.get(), pool_);
      keep(out);
    }
    const float xielu[] = {0.8f, 1.3f, 0.5f, -1e-6f};
    for (int kind = 0; kind < 4; kind++) {
      kernels_.activate(type, static_cast<Activation>(kind), x.get(), kind < 2 ? up.get() : nullptr, stride, rows,
                        features, xielu, out.get(), pool_);
      keep(out);
    }
    kernels_.residual(type, h.get(), out.get(), 0.7f, rows * features);
    keep(h);
    auto cos = floats_of(type, rows * features), sin = floats_of(type, rows * features / 2);
    for (int neighbours : {0, 1}) {
      const int64_t turned = neighbours ? features / 4 * 2 : features;
      kernels_.rope(type, x.get(), stride, rows, 1, features, turned, neighbours, cos.get(),
                    sin.get(), out.get(), pool_);
      keep(out);
    }
  }

  void attention(Float type, int64_t rows, int64_t heads, int64_t kv_heads, int64_t dim,
                 int64_t context, int64_t window) {
    const int64_t stride = heads * dim + 7;
    auto q = floats_of(type, (rows - 1) * stride + heads * dim);
    auto keys = floats_of(type, 2 * kv_heads * context * dim);
    auto values = floats_of(type, 2 * kv_heads * context * dim);
    auto out = floats_of(type, rows * heads * dim);
    // The first row as a sequence of its own, which is as long as it sees.
    const Sequence both[] = {
        {0, 1, keys.get(), values.get(), context, context - rows + 1},
        {1, rows - 1, keys.get(), values.get(), context, context},
    };
    const int64_t count = rows > 1 ? 2 : 1, layer = 1;
    auto v = floats_of(type, rows * kv_heads * dim);
    kernels_.append(type, q.get(), stride, v.get(), kv_heads * dim, kv_heads, dim, both, count,
                    layer);
    kernels_.attention(type, q.get(), stride, heads, kv_heads, dim, both, count, layer, window, 0.2f,
                       window ? 3.f : 0.f, out.get(), pool_);
    if (type == Float::f32) return keep(out);
    for (int64_t i = 0; i < rows * heads * dim; i++) {
      uint32_t bits = 0;
      memcpy(reinterpret_cast<char*>(&bits) + 2, out.get() + 2 * i, 2);
      float value;
      memcpy(&value, &bits, 4);
      trace_.near.push_back(value);
    }
  }

  const Kernels& kernels_;
  Pool* pool_;
  uint32_t state_ = 1;
  Trace trace_;
};

bool same(const Trace& a, const Trace& b) {
  bool near = a.near.size() == b.near.size();
  for (size_t i = 0; near && i < a.near.size(); i++) near = fabsf(a.near[i] - b.near[i]) < 0.05f;
  return near && a.exact == b.exact;
}

int compare() {
  int count, wrong = 0;
  const Variant* all = variants(&count);
  const Trace right = Trial(portable::table, 1, 0).run();
  for (int i = 0; i < count; i++) {
    if (!all[i].here) continue;
    // Three callers at once, each with a pool of its own: threads that sleep, spin and come late.
    Trace found[3];
    std::vector<std::thread> callers;
    for (int caller = 0; caller < 3; caller++)
      callers.emplace_back([&, caller] {
        found[caller] = Trial(*all[i].kernels, caller + 2, 20 * caller).run();
      });
    for (std::thread& caller : callers) caller.join();
    bool fits = true;
    for (const Trace& trace : found) fits &= same(trace, right);
    printf("%s: %s\n", all[i].kernels->name, fits ? "as portable" : "differs from portable");
    wrong += !fits;
  }
  return wrong ? 1 : 0;
}

// Jobs of all sizes back to back: the last task of one, the first of the next, threads asleep.
int hand_out() {
  std::unique_ptr<Pool, void (*)(Pool*)> pool(pool_new(4, 1), pool_free);
  for (int64_t job = 0; job < 3000; job++) {
    std::vector<int> seen(job % 9);
    Task count = [](void* kernel, int64_t task, char* scratch) {
      scratch[0] = static_cast<char>(task);
      ++(*static_cast<std::vector<int>*>(kernel))[task];
    };
    pool_run(pool.get(), seen.size(), 64 * (1 + job % 5), count, &seen);
    for (int times : seen)
      if (times != 1) return printf("a task ran %d times\n", times), 1;
  }
  return 0;
}

// ---- messages over a slot and over a socket, both ends of which are here

constexpr int64_t HEAD = 96, PAYLOAD = 400, TOTAL = HEAD + PAYLOAD;

struct Link {
  // A shape in a buffer that ends with its head.
  Buffer<char> shape_memory{static_cast<int64_t>(sizeof(MessageShape)) + HEAD};
  Buffer<char> sent{PAYLOAD}, taken{PAYLOAD}, area{TOTAL};
  LaneLine line{};
  LaneSeen seen{};
  uint32_t sleeps = 1;
  int64_t times[2] = {};

  Link() {
    memset(shape(), 7, shape_memory.bytes());
    MessageShape sizes{HEAD, PAYLOAD, {64, 80, 88}};
    memcpy(shape(), &sizes, sizeof sizes);
    memset(shape()->head + 80, 0, 16);
    memset(area.get(), 0, area.bytes());
    for (int64_t i = 0; i < PAYLOAD; i++) sent.get()[i] = static_cast<char>(i);
  }
  MessageShape* shape() { return reinterpret_cast<MessageShape*>(shape_memory.get()); }
  bool arrived() { return !memcmp(sent.get(), taken.get(), PAYLOAD); }
};

// One thread puts messages, another takes each; then bytes that are none are looked at.
int slots() {
  Link link;
  std::atomic<int64_t> taken{0};
  bool right = true, took = true;
  std::thread client([&] {
    for (int64_t id = 1; id <= 2000; id++) {
      while (lane_take(link.shape(), id, link.area.get(), &link.line, &link.seen, 50,
                       link.taken.get(), link.times) != LANE_TAKEN) {
      }
      took &= link.arrived() && link.times[0] == 9;
      taken.store(id, std::memory_order_release);
    }
  });
  for (int64_t id = 1; id <= 2000; id++) {
    // A request has two numbers, of which the second is where a reply has its first time.
    right &= lane_put(link.shape(), id, 9, link.sent.get(), link.area.get(), &link.line, id,
                      &link.sleeps);
    while (taken.load(std::memory_order_acquire) < id) std::this_thread::yield();
  }
  client.join();
  right &= took;
  uint32_t random = 1;
  for (int round = 0; round < 5000; round++) {
    for (int64_t i = 0; i < TOTAL; i++)
      link.area.get()[i] = static_cast<char>((random = random * 1664525 + 1013904223) >> 24);
    link.seen.bytes = round % 2 ? TOTAL : random;
    right &= lane_take(link.shape(), 1, link.area.get(), nullptr, &link.seen, -1,
                       link.taken.get(), link.times) == LANE_OTHER;
  }
  if (!right) printf("a message over a slot was not taken as it was put\n");
  return right ? 0 : 1;
}

int sockets() {
  Link link;
  Buffer<char> scratch(TOTAL);
  int pair[2];
  if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair)) return 1;
  auto take = [&](int64_t id, int64_t wait_ms) {
    return stream_take(link.shape(), id, pair[1], scratch.get(), 10, wait_ms, link.taken.get(),
                       link.times);
  };
  bool right = take(1, 1) == 0;  // nothing is there
  for (int64_t id = 1; id <= 500; id++) {
    right &= stream_put(link.shape(), id, 9, link.sent.get(), pair[0]) == TOTAL;
    right &= take(id, 100) == STREAM_TAKEN && link.arrived();
    right &= stream_put(link.shape(), id, 9, link.sent.get(), pair[0]) == TOTAL;
    right &= take(id + 1, 100) == TOTAL;  // another id
    right &= write(pair[0], link.sent.get(), 33) == 33 && take(id, 100) == 33;
  }
  close(pair[0]);
  right &= take(1, 100) == 0 && stream_put(link.shape(), 1, 9, link.sent.get(), pair[1]) == 0;
  close(pair[1]);
  if (!right) printf("a message over a socket was not taken as it was put\n");
  return right ? 0 : 1;
}

// ---- what a sanitizer must notice

// Two tasks that write one number, each on a thread of its own: they wait for one another.
void race(void* number, int64_t, char*) {
  static std::atomic<int> arrived{0};
  arrived.fetch_add(1, std::memory_order_relaxed);
  while (arrived.load(std::memory_order_relaxed) < 2) std::this_thread::yield();
  ++*static_cast<int32_t*>(number);
}

int fault(const std::string& kind) {
  Buffer<int32_t> q(2 * 64), y(2 * 16 - 1);  // an output too few
  Buffer<int8_t> weight(16 * 64);
  memset(q.get(), 0, q.bytes()), memset(weight.get(), 0, weight.bytes());
  Pool* pool = pool_new(2, 0);
  if (kind == "overrun")
    portable::table.product(q.get(), 2, 64, 4, weight.get(), 64, 16, y.get(), pool);
  else if (kind == "overflow")  // a digit that there is not: shifts by 32
    portable::table.product(q.get(), 1, 64, 5, weight.get(), 64, 16, y.get(), pool);
  else
    pool_run(pool, 2, 0, race, y.get());
  pool_free(pool);
  return 0;
}

}  // namespace

int main(int count, char** arguments) {
  if (count > 1) return fault(arguments[1]);
  return hand_out() || slots() || sockets() || compare();
}
