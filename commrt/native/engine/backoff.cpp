// SPDX-License-Identifier: Apache-2.0
// Spinning, yielding and sleeping.
#include "engine/backoff.hpp"

#include <sched.h>

#include <algorithm>

#include "engine/relay.hpp"
#include "engine/tcp_poller.hpp"

namespace commrt {

namespace {

// The last wait of this thread, if it has ended without anything that advanced.
struct LastWait {
  double since_s = 0, end_s = 0;
};
thread_local LastWait last_wait;

double idle_since(double now) {
  constexpr double kBetween_s = 5e-3;
  return last_wait.since_s != 0 && now - last_wait.end_s < kBetween_s ? last_wait.since_s : now;
}

// The end of this thread's last yield for which somebody else had the core for long.
thread_local double last_long_yield_s = 0;

void yield_to_others() {
  constexpr double kLong_s = 3e-4;
  const double before = now_s();
  sched_yield();
  const double now = now_s();
  if (now - before > kLong_s) last_long_yield_s = now;
}

// To sleep and to be woken costs some 50 us. So who waits looks for twice that before it sleeps,
// and lets other ranks that wait look, too. A thread that computes would keep the core for a whole
// slice after a yield; who sleeps is let in beside it at once.
bool still_yields(double yielding_s) {
  constexpr double kYieldsFor_s = 1e-4, kRemembered_s = 0.05;
  const bool has_neighbors = Relay::expects_neighbors();
  // Threads of another carrier need the core.
  if (!TcpPoller::is_used() && !has_neighbors) return false;
  if (yielding_s >= kYieldsFor_s) return false;
  return has_neighbors || last_long_yield_s == 0 ||
         now_s() - last_long_yield_s >= kRemembered_s;
}

}  // namespace

Backoff::~Backoff() {
  if (since_s_ != 0) last_wait = {since_s_, now_s()};
  if (bell_ != nullptr) Engine::rise();
}

void Backoff::reset() {
  if (since_s_ != 0) last_wait.since_s = 0;
  count_ = 0;
  since_s_ = first_yield_s_ = 0;
}

bool Backoff::pause(double until_s, bool looked) {
  ++count_;
  const uint32_t looks = library_looks_.load(std::memory_order_relaxed);
  const bool sleeps_soon = sleeps_soon_ && looks == std::exchange(seen_library_looks_, looks);
  // Each look then asks the kernel, which wakes who sleeps.
  constexpr int kLooksAtKernel = 64;
  const bool asks_kernel = sleeps_soon && TcpPoller::is_used();
  if (count_ <= (asks_kernel ? std::min(spins_, kLooksAtKernel) : spins_)) {
    relax();
    return false;
  }
  if (sleeps_soon) {
    const double now = now_s();
    if (since_s_ == 0) since_s_ = idle_since(now);
    if (first_yield_s_ == 0) first_yield_s_ = now;
    if (now - since_s_ < patience_s_) {
      if (!still_yields(now - first_yield_s_)) {
        Relay::wait_for_change(seen_);
        return true;
      }
      yield_to_others();
      return false;
    }
  }
  constexpr int kYields = 20000, kYieldsBetweenClocks = 32;
  const bool looks_at_clock = count_ % kYieldsBetweenClocks == 0 || count_ > spins_ + kYields;
  const double now = looks_at_clock || since_s_ == 0 ? now_s() : 0;
  if (since_s_ == 0) since_s_ = idle_since(now);
  const bool is_patient = !looks_at_clock || now - since_s_ < patience_s_;
  if (is_patient && count_ <= spins_ + kYields) {
    sched_yield();
    return false;
  }
  count_ = spins_ + kYields;  // from here on, it looks at the clock each time
  return rest(until_s, looked);
}

bool Backoff::rest(double until_s, bool looked) {
  const double left = std::min(until_s - now_s(), Bells::kLongest_s);
  if (left <= 0) return true;
  if (engine_ == nullptr) {
    nap(std::min(left, 20 * Bells::kNap_s));
    return true;
  }
  if (lay_down_ != 0) {
    if (bell_->is_rung(lay_down_)) {  // before it slept
      lay_down_ = 0;
      was_rung_ = true;
      return true;
    }
    if (!looked) {
      nap(std::min(left, Bells::kNap_s));
      return true;
    }
    if (TcpPoller::is_used()) TcpPoller::instance().hand_over(false);
    switch (bell_->sleep(lay_down_, std::min(left, engine_->longest_sleep_s()))) {
      case Bells::Woken::ByBell:
        reset();
        patience_s_ = kPatienceAfterSleep_s;
        lay_down_ = 0;
        was_rung_ = true;
        break;
      case Bells::Woken::BySignal: was_interrupted_ = true; break;
      case Bells::Woken::ByTime: break;
    }
    return true;
  }
  if (bell_ == nullptr) {
    bell_ = engine_->bell();
    Engine::lie_down();
  }
  lay_down_ = bell_->lie_down();
  engine_->look_closely();
  nap(std::min(left, Bells::kNap_s));
  return true;
}

}  // namespace commrt
