// SPDX-License-Identifier: Apache-2.0
// How a thread waits that looks again and again: it spins, then yields, and after some milliseconds
// sleeps until somebody rings (bell.hpp).
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

#include "engine/engine.hpp"

namespace commrt {

class Backoff {
 public:
  // Null: nobody rings, so it naps instead.
  Backoff(Engine* engine, int spins) : engine_(engine), spins_(spins) {}
  Backoff(Engine& engine, int spins) : Backoff(&engine, spins) {}
  ~Backoff();
  Backoff(const Backoff&) = delete;
  Backoff& operator=(const Backoff&) = delete;

  // Something has advanced. A thread whose waits end one after the other without that, as their
  // time is up, is as patient as one that waits once.
  void reset();
  void spin_at_most(int spins) { spins_ = spins; }
  // The time in which it yields before it sleeps.
  void be_patient_for(double seconds) { patience_s_ = seconds; }
  // `soon`: threads of this process carry messages (relay.hpp) and need the core.
  void sleep_soon(bool soon) { sleeps_soon_ = soon; }
  // A look has asked a library for the end of a collective. Nobody wakes those who sleep when that
  // comes, so whoever waits looks on.
  static void note_library_look() { library_looks_.fetch_add(1, std::memory_order_relaxed); }
  // To be called after each look that found nothing; returns for another one. `looked`: false where
  // another thread had the lock. A sleep ends at `until_s` (now_s()), with a signal, or as somebody
  // rings. True if the time is to be looked at.
  bool pause(double until_s = kNever, bool looked = true);
  // The same without spinning and yielding before.
  bool rest(double until_s = kNever, bool looked = true);
  // True once after a signal has ended a sleep of this thread.
  bool take_interrupt() { return std::exchange(was_interrupted_, false); }
  // True if somebody has ended a sleep, which is then forgotten.
  bool take_ring() { return std::exchange(was_rung_, false); }

 private:
  Engine* const engine_;
  std::shared_ptr<Bells> bell_;  // once this thread has lain down
  uint32_t lay_down_ = 0;        // the bell's word then; 0: it is to lie down
  bool sleeps_soon_ = false;
  bool was_interrupted_ = false;
  bool was_rung_ = false;
  uint64_t seen_ = 0;  // of relays' changes
  uint32_t seen_library_looks_ = library_looks_.load(std::memory_order_relaxed);
  int spins_;
  int count_ = 0;
  double since_s_ = 0;        // the first yield, also of waits just before; 0: none yet
  double first_yield_s_ = 0;  // that of this wait, where it sleeps soon
  double patience_s_ = kPatience_s;

  static inline std::atomic<uint32_t> library_looks_{0};
  static constexpr double kPatience_s = 0.02, kPatienceAfterSleep_s = 2e-4;
};

}  // namespace commrt
