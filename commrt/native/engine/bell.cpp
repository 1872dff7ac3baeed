// SPDX-License-Identifier: Apache-2.0
// The words of bells, and the futexes on them.
#include "engine/bell.hpp"

#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "engine/engine.hpp"

namespace commrt {

namespace {

timespec as_timespec(double seconds) {
  const double whole = std::max(0.0, seconds);
  timespec span;
  span.tv_sec = static_cast<time_t>(whole);
  span.tv_nsec = static_cast<long>((whole - static_cast<double>(span.tv_sec)) * 1e9);
  return span;
}

// Not the private kind: other processes wake who sleeps here.
long futex(std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* span) {
  static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, span, nullptr, 0);
}

}  // namespace

void nap(double seconds) {
  const timespec span = as_timespec(seconds);
  nanosleep(&span, nullptr);
}

// A region begins with its rank's word. In the first region, the number of sleepers follows.
struct Bells::Memory {
  Memory(void* mapped, size_t region, int members)
      : base(static_cast<unsigned char*>(mapped)), region_nbytes(region),
        nbytes(region * static_cast<size_t>(members)) {}
  // Of threads.
  explicit Memory(int members)
      : words(new std::atomic<uint32_t>[2 * kLineBytes * static_cast<size_t>(members) /
                                        sizeof(uint32_t)]()),
        base(reinterpret_cast<unsigned char*>(words.get())), region_nbytes(2 * kLineBytes) {}
  ~Memory() {
    if (words == nullptr) munmap(base, nbytes);
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  std::unique_ptr<std::atomic<uint32_t>[]> words;
  unsigned char* const base;
  const size_t region_nbytes;
  const size_t nbytes = 0;
};

Bells::Bells(std::string name_, std::shared_ptr<Memory> memory, int own_)
    : name(std::move(name_)), own(own_), memory_(std::move(memory)),
      asleep_(reinterpret_cast<std::atomic<uint32_t>*>(memory_->base + kLineBytes)) {}

Bells::Bells(std::string name_, void* base, size_t region_nbytes, int members, int own_)
    : Bells(std::move(name_), std::make_shared<Memory>(base, region_nbytes, members), own_) {}

std::shared_ptr<Bells> Bells::of_threads(const std::string& name, int members, int own) {
  static std::mutex mutex;
  static auto* const all = new std::unordered_map<std::string, std::weak_ptr<Memory>>();
  const std::lock_guard<std::mutex> lock(mutex);
  std::shared_ptr<Memory> memory = (*all)[name].lock();
  if (memory == nullptr) {
    for (auto it = all->begin(); it != all->end();) {
      it = it->second.expired() ? all->erase(it) : std::next(it);
    }
    memory = std::make_shared<Memory>(members);
    (*all)[name] = memory;
  }
  return std::shared_ptr<Bells>(new Bells(name, std::move(memory), own));
}

Bells::~Bells() = default;

std::atomic<uint32_t>& Bells::word(int member) const {
  return *reinterpret_cast<std::atomic<uint32_t>*>(
      memory_->base + static_cast<size_t>(member) * memory_->region_nbytes);
}

void Bells::ring(int member) {
  std::atomic<uint32_t>& bell = word(member);
  uint32_t before = bell.load(std::memory_order_relaxed);
  // One of those that ring at the same time wakes it. Odd: the next number has the bit cleared.
  if ((before & 1) == 0 || !bell.compare_exchange_strong(before, before + 1)) return;
  asleep_->fetch_sub(1);
  futex(bell, FUTEX_WAKE, INT_MAX, nullptr);
}

uint32_t Bells::lie_down() {
  // Counted first: whoever sees the bit finds that somebody sleeps.
  asleep_->fetch_add(1);
  const uint32_t before = word(own).fetch_or(1);
  if ((before & 1) != 0) asleep_->fetch_sub(1);
  return before | 1;
}

Bells::Woken Bells::sleep(uint32_t since, double seconds) {
  const timespec span = as_timespec(std::min(seconds, kLongest_s));
  const bool failed = futex(word(own), FUTEX_WAIT, since, &span) != 0;
  const int why = errno;
  if (is_rung(since)) return Woken::ByBell;
  return failed && why == EINTR ? Woken::BySignal : Woken::ByTime;
}

// Behind a rank's bell, on the same line: how often it was asked for something, by whom the last
// time, and the latest question that it has answered.
enum class Beside : size_t { Asked = 1, By = 2, Answered = 3 };

std::atomic<uint32_t>& Bells::beside(int member, size_t which) const { return (&word(member))[which]; }

void Bells::ask_beside(int member, uint32_t by) {
  beside(member, static_cast<size_t>(Beside::By)).store(by, std::memory_order_relaxed);
  std::atomic<uint32_t>& asked = beside(member, static_cast<size_t>(Beside::Asked));
  asked.fetch_add(1, std::memory_order_release);
  futex(asked, FUTEX_WAKE, INT_MAX, nullptr);
}

uint32_t Bells::wait_for_question(uint32_t& told) {
  std::atomic<uint32_t>& asked = beside(own, static_cast<size_t>(Beside::Asked));
  while (asked.load(std::memory_order_acquire) == told) {
    futex(asked, FUTEX_WAIT, told, nullptr);
  }
  told = asked.load(std::memory_order_acquire);
  return beside(own, static_cast<size_t>(Beside::By)).load(std::memory_order_relaxed);
}

void Bells::answer_beside(uint32_t told) {
  std::atomic<uint32_t>& answered = beside(own, static_cast<size_t>(Beside::Answered));
  answered.store(told, std::memory_order_release);
  futex(answered, FUTEX_WAKE, INT_MAX, nullptr);
}

bool Bells::is_answered(int member, double seconds) {
  std::atomic<uint32_t>& answered = beside(member, static_cast<size_t>(Beside::Answered));
  const uint32_t asked =
      beside(member, static_cast<size_t>(Beside::Asked)).load(std::memory_order_acquire);
  const double deadline = now_s() + seconds;
  for (;;) {
    const uint32_t now = answered.load(std::memory_order_acquire);
    if (static_cast<int32_t>(now - asked) >= 0) return true;
    const double left_s = deadline - now_s();
    if (left_s <= 0) return false;
    const timespec span = as_timespec(left_s);
    futex(answered, FUTEX_WAIT, now, &span);
  }
}

}  // namespace commrt
