// Which instructions this processor and system offer, and the threads that use them.
#include "levels.h"

#include <atomic>
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif
#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace pf {
namespace {

#if defined(__x86_64__)
// Tile registers must be asked for (Linux 5.16 or later): ARCH_REQ_XCOMP_PERM for XTILEDATA.
bool may_use_tiles() {
#if defined(__linux__)
  return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#else
  return false;
#endif
}

int64_t detect() {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return PF_BASE;
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
    return PF_AVX2;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a & 1u << 5)) return PF_AVX512;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return PF_BF16;
  bool tiles = (d & 1u << 22) && (d & 1u << 24);  // AMX-BF16, AMX-TILE
  return tiles && may_use_tiles() ? PF_AMX : PF_BF16;
}
#else
int64_t detect() { return PF_BASE; }
#endif

int64_t best() {
  static const int64_t level = detect();
  return level;
}

const Backend &at(int64_t level) {
#if defined(__x86_64__)
  if (level == PF_AMX) return amx::backend();
  if (level == PF_BF16) return avx512_bf16::backend();
  if (level == PF_AVX512) return avx512::backend();
  if (level == PF_AVX2) return avx2::backend();
#endif
  return base::backend();
}

std::atomic<const Backend *> chosen{nullptr};
std::atomic<int64_t> chosen_level{-1};

// Threads that wait for a round of tasks and share them out by a counter. They spin for a while
// after each round: the next one follows within microseconds during a pass.
class Pool {
 public:
  explicit Pool(int64_t helpers) {
    for (int64_t i = 0; i < helpers; i++) threads_.emplace_back([this] { serve(); });
  }

  ~Pool() {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
      round_++;
    }
    wake_.notify_all();
    for (auto &thread : threads_) thread.join();
  }

  void run(int64_t count, void (*task)(int64_t, void *), void *context) {
    task_ = task, context_ = context, count_ = count;
    next_.store(0, std::memory_order_relaxed);
    busy_.store((int64_t)threads_.size(), std::memory_order_relaxed);
    {
      std::lock_guard lock(mutex_);
      round_++;
    }
    wake_.notify_all();
    work();
    while (busy_.load(std::memory_order_acquire)) pause();
  }

 private:
  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    std::this_thread::yield();
#endif
  }

  void work() {
    for (int64_t i; (i = next_.fetch_add(1)) < count_;) task_(i, context_);
  }

  void serve() {
    uint64_t seen = 0;
    for (;;) {
      for (int spin = 0; spin < 4000 && round_.load() == seen; spin++) pause();
      if (round_.load() == seen) {
        std::unique_lock lock(mutex_);
        wake_.wait(lock, [&] { return round_.load() != seen; });
      }
      seen = round_.load();
      if (stopping_) return;
      work();
      busy_.fetch_sub(1, std::memory_order_release);
    }
  }

  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<uint64_t> round_{0};
  std::atomic<int64_t> next_{0}, busy_{0};
  std::atomic<bool> stopping_{false};
  void (*task_)(int64_t, void *) = nullptr;
  void *context_ = nullptr;
  int64_t count_ = 0;
};

// One computation at a time: a second caller waits for the pool.
std::mutex pool_mutex;
std::unique_ptr<Pool> pool;
std::atomic<int64_t> threads{1};

}  // namespace

const Backend &current() {
  const Backend *backend = chosen.load(std::memory_order_acquire);
  return backend ? *backend : at(best());
}

int64_t thread_count() { return threads.load(std::memory_order_relaxed); }

void parallel(int64_t count, void (*task)(int64_t, void *), void *context) {
  if (count > 1 && thread_count() > 1) {
    std::lock_guard lock(pool_mutex);
    if (pool) return pool->run(count, task, context);
  }
  for (int64_t i = 0; i < count; i++) task(i, context);
}

}  // namespace pf

extern "C" {

int64_t pf_abi_version(void) { return 1; }

int64_t pf_best_level(void) { return pf::best(); }

int64_t pf_use_level(int64_t level) {
  level = level < 0 ? 0 : level < pf::best() ? level : pf::best();
  pf::chosen_level.store(level);
  pf::chosen.store(&pf::at(level), std::memory_order_release);
  return level;
}

int64_t pf_current_level(void) {
  int64_t level = pf::chosen_level.load();
  return level < 0 ? pf::best() : level;
}

void pf_set_threads(int64_t count) {
  count = count < 1 ? 1 : count;
  std::lock_guard lock(pf::pool_mutex);
  if (count == pf::thread_count()) return;
  pf::pool.reset();
  if (count > 1) pf::pool = std::make_unique<pf::Pool>(count - 1);
  pf::threads.store(count);
}

// Bytes per second at which one core reads memory, in four streams: a sum over `bytes` of it.
double pf_read_bandwidth(int64_t bytes, int64_t repeats) {
  constexpr int64_t HUGE_PAGE = 2 << 20;
  bytes = (bytes + 4 * HUGE_PAGE - 1) / (4 * HUGE_PAGE) * (4 * HUGE_PAGE);
  auto *data = static_cast<uint64_t *>(std::aligned_alloc(HUGE_PAGE, bytes));
  if (!data) return 0;
#if defined(__linux__)
  madvise(data, bytes, MADV_HUGEPAGE);
#endif
  std::memset(data, 1, bytes);
  const int64_t part = bytes / 8 / 4;
  double fastest = 0;
  for (int64_t r = 0; r < repeats; r++) {
    auto begun = std::chrono::steady_clock::now();
    uint64_t lanes[4][8] = {};
    for (int64_t i = 0; i < part; i += 8)
      for (int64_t stream = 0; stream < 4; stream++)
        for (int64_t j = 0; j < 8; j++) lanes[stream][j] += data[stream * part + i + j];
    std::chrono::duration<double> took = std::chrono::steady_clock::now() - begun;
    uint64_t total = 0;
    for (auto &stream : lanes)
      for (uint64_t lane : stream) total += lane;
    if (total) fastest = std::max(fastest, bytes / took.count());
  }
  std::free(data);
  return fastest;
}

}  // extern "C"
