#include "pool.h"

#include <stdlib.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "pause.h"

namespace {

constexpr int64_t ALIGNMENT = 64;
constexpr int SPINS_PER_LOOK = 64;
constexpr int64_t MOST_TASKS = 0xffffffff;  // that `left_` has bits for

struct Free {
  void operator()(char* memory) const { free(memory); }
};

// Memory that only grows, for one thread at a time.
class Scratch {
 public:
  char* at_least(int64_t bytes) {
    if (bytes > size_) {
      int64_t size = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
      size_ = 0;  // what was there goes first, and stays away where there is no memory
      memory_.reset();
      memory_.reset(static_cast<char*>(aligned_alloc(ALIGNMENT, size)));
      if (!memory_) throw std::bad_alloc();
      size_ = size;
    }
    return memory_.get();
  }

 private:
  std::unique_ptr<char, Free> memory_;
  int64_t size_ = 0;
};

}  // namespace

// A job's tasks are handed out by `left_`: the job's number above, the tasks that nobody has taken
// below. Whoever lowers it has a task, and the job cannot end before that task does: what describes
// a job is read after that. A worker that wakes up late holds an old job's number; it finds another
// number, or no task left (never a number of tasks that a newer job brought), and touches nothing.
struct Pool {
 public:
  Pool(int threads, int spin_us) : spin_(spin_us), scratch_(threads) {
    workers_.reserve(threads);
    try {
      for (int i = 1; i < threads; i++) workers_.emplace_back([this, i] { attend(i); });
    } catch (const std::system_error&) {  // a limit on threads: the ones that there are do it all
    }
  }

  ~Pool() {
    stop_ = true;
    wake();
    for (std::thread& worker : workers_) worker.join();
  }

  char* memory(int64_t bytes) { return memory_.at_least(bytes); }
  int threads() const { return static_cast<int>(scratch_.size()); }

  void run(int64_t count, int64_t scratch_bytes, Task task, void* kernel) {
    if (count <= 0) return;
    if (count == 1 || count > MOST_TASKS || workers_.empty()) {
      char* scratch = scratch_[0].at_least(scratch_bytes);
      for (int64_t i = 0; i < count; i++) task(kernel, i, scratch);
      return;
    }
    // Here, where a failure to get memory still has a caller.
    for (Scratch& scratch : scratch_) scratch.at_least(scratch_bytes);
    job_ = {task, kernel, scratch_bytes, count};
    done_.store(0, std::memory_order_relaxed);
    uint64_t job = ((left_.load(std::memory_order_relaxed) >> 32) + 1) & MOST_TASKS;
    left_.store(job << 32 | static_cast<uint64_t>(count));
    if (asleep_.load() > 0) wake();
    work(0, job);
    for (int spins = 0; done_.load(std::memory_order_acquire) < count; spins++) {
      PAUSE();
      // The thread that has the last task may need this core.
      if (spins % SPINS_PER_LOOK == SPINS_PER_LOOK - 1) std::this_thread::yield();
    }
  }

 private:
  struct Job {
    Task task;
    void* kernel;
    int64_t scratch_bytes;
    int64_t count;
  };

  void work(int thread, uint64_t job) {
    for (;;) {
      uint64_t left = left_.load(std::memory_order_relaxed);
      if (left >> 32 != job || (left & 0xffffffff) == 0) return;
      if (!left_.compare_exchange_weak(left, left - 1, std::memory_order_acq_rel)) continue;
      int64_t index = job_.count - static_cast<int64_t>(left & 0xffffffff);
      job_.task(job_.kernel, index, scratch_[thread].at_least(job_.scratch_bytes));
      done_.fetch_add(1, std::memory_order_release);
    }
  }

  void attend(int thread) {
    uint64_t seen = 0;
    while (!stop_) {
      uint64_t job = wait_for_job_after(seen);
      work(thread, job);
      seen = job;
    }
  }

  uint64_t wait_for_job_after(uint64_t seen) {
    auto until = std::chrono::steady_clock::now() + spin_;
    do {
      for (int i = 0; i < SPINS_PER_LOOK; i++) {
        uint64_t job = left_.load(std::memory_order_acquire) >> 32;
        if (job != seen || stop_.load(std::memory_order_relaxed)) return job;
        PAUSE();
      }
    } while (std::chrono::steady_clock::now() < until);
    std::unique_lock<std::mutex> lock(mutex_);
    asleep_++;
    awake_.wait(lock, [&] { return left_.load() >> 32 != seen || stop_; });
    asleep_--;
    return left_.load() >> 32;
  }

  void wake() {
    // With the lock: a worker is either before its look at `left_`, or waiting.
    { std::lock_guard<std::mutex> lock(mutex_); }
    awake_.notify_all();
  }

  const std::chrono::microseconds spin_;
  std::vector<Scratch> scratch_;
  Scratch memory_;
  alignas(64) std::atomic<uint64_t> left_{0};
  alignas(64) std::atomic<int64_t> done_{0};
  alignas(64) Job job_{};
  std::atomic<int> asleep_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::condition_variable awake_;
  std::vector<std::thread> workers_;
};

Pool* pool_new(int threads, int spin_us) { return new Pool(threads, spin_us); }
void pool_free(Pool* pool) { delete pool; }
char* pool_memory(Pool* pool, int64_t bytes) { return pool->memory(bytes); }
int pool_threads(const Pool* pool) { return pool->threads(); }

void pool_run(Pool* pool, int64_t count, int64_t scratch_bytes, Task task, void* kernel) {
  pool->run(count, scratch_bytes, task, kernel);
}
