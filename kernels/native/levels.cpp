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
#include <sched.h>
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

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

// Tasks that threads take one by one.
struct Round {
  void (*task)(int64_t, void *);
  void *context;
  int64_t count;
  std::atomic<int64_t> next{0};

  void work() {
    for (int64_t i; (i = next.fetch_add(1)) < count;) task(i, context);
  }
};

// Threads that help with one round after another. They spin for a while after each: the next one
// follows within microseconds during a pass. Who comes too late is not waited for.
class Team {
 public:
  // One thread for each entry; -1: on any core of the process.
  explicit Team(const std::vector<int64_t> &cores) {
    for (int64_t core : cores) threads_.emplace_back([this, core] { serve(core); });
  }

  ~Team() {
    stopping_ = true;
    open(nullptr);
    for (auto &thread : threads_) thread.join();
  }

  int64_t size() const { return (int64_t)threads_.size(); }

  void open(Round *round) {
    round_.store(round);
    {
      std::lock_guard lock(mutex_);
      number_++;
    }
    wake_.notify_all();
  }

  // Returns when no thread works on the round any more, and none will.
  void close() {
    round_.store(nullptr);
    while (working_.load()) pause();
  }

 private:
  void serve([[maybe_unused]] int64_t core) {
#if defined(__linux__)
    if (core >= 0) {
      cpu_set_t set;
      CPU_ZERO(&set);
      CPU_SET(core, &set);
      sched_setaffinity(0, sizeof set, &set);
    }
#endif
    for (uint64_t seen = 0;;) {
      for (int spin = 0; spin < 2000 && number_.load() == seen; spin++) pause();
      if (number_.load() == seen) {
        std::unique_lock lock(mutex_);
        wake_.wait(lock, [&] { return number_.load() != seen; });
      }
      seen = number_.load();
      if (stopping_) return;
      working_++;  // before the look at the round: `close` sees either this or the task's end
      if (Round *round = round_.load()) round->work();
      working_--;
    }
  }

  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<Round *> round_{nullptr};
  std::atomic<uint64_t> number_{0};
  std::atomic<int64_t> working_{0};
  std::atomic<bool> stopping_{false};
};

// One computation at a time: a second caller computes alone.
std::mutex teams_mutex;
std::unique_ptr<Team> own, borrowed;
std::atomic<int64_t> own_threads{1}, borrowed_threads{0};
std::atomic<const int64_t *> lender_busy{nullptr};

bool may_borrow() {
  const int64_t *busy = lender_busy.load(std::memory_order_relaxed);
  return busy && !__atomic_load_n(busy, __ATOMIC_RELAXED);
}

}  // namespace

const Backend &current() {
  const Backend *backend = chosen.load(std::memory_order_acquire);
  return backend ? *backend : at(best());
}

int64_t thread_count() {
  return own_threads.load(std::memory_order_relaxed) +
         (may_borrow() ? borrowed_threads.load(std::memory_order_relaxed) : 0);
}

void parallel(int64_t count, void (*task)(int64_t, void *), void *context) {
  std::unique_lock lock(teams_mutex, std::defer_lock);
  if (count == 1 || thread_count() == 1 || !lock.try_lock()) {
    for (int64_t i = 0; i < count; i++) task(i, context);
    return;
  }
  Round round{task, context, count};
  Team *teams[] = {own.get(), may_borrow() ? borrowed.get() : nullptr};
  for (Team *team : teams)
    if (team) team->open(&round);
  round.work();
  for (Team *team : teams)
    if (team) team->close();
}

}  // namespace pf

extern "C" {

int64_t pf_abi_version(void) { return 2; }

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
  std::lock_guard lock(pf::teams_mutex);
  if (count == pf::own_threads.load()) return;
  pf::own.reset();
  if (count > 1) pf::own = std::make_unique<pf::Team>(std::vector<int64_t>(count - 1, -1));
  pf::own_threads.store(count);
}

void pf_borrow(const int64_t *busy, const int64_t *cores, int64_t count) {
  std::lock_guard lock(pf::teams_mutex);
  pf::lender_busy.store(nullptr);
  pf::borrowed.reset();
  if (count > 0)
    pf::borrowed = std::make_unique<pf::Team>(std::vector<int64_t>(cores, cores + count));
  pf::borrowed_threads.store(count);
  pf::lender_busy.store(count > 0 ? busy : nullptr);
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
