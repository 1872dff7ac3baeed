// SPDX-License-Identifier: Apache-2.0
// Learns, run by run, which stores into shared slots are faster for a plan.
//
// Near each other's core, plain stores win (by 1.4 to 1.7 at 512 KiB to 8 MiB); far from
// it, non-temporal ones do (by 4), because a line that the peer has just read need not be
// fetched back. Virtual machines move between the two within seconds, and ranks need not
// agree: how a rank writes its own slots is its own affair. So each plan tries the other
// kind now and then, and at once when its runs have become slow.
#pragma once

#include <algorithm>
#include <cstdint>

namespace commrt {

class StoreChoice {
 public:
  void start_with(bool streaming) { streaming_ = streaming; }

  // The kind for a run that is not timed.
  bool current() const { return streaming_; }

  // The kind for the next timed run; report() must follow before the next call.
  bool next() {
    if (trials_left_ == 0 && (++runs_ % kPeriod == kFirst || slow_runs_ >= kSlowRuns)) {
      trials_left_ = kTrials;
      best_trial_ = UINT64_MAX;
      slow_runs_ = 0;
    }
    return trials_left_ > 0 ? !streaming_ : streaming_;
  }

  // True if the kind has changed.
  bool report(uint64_t ticks) {
    if (trials_left_ == 0) {
      const uint64_t best = best_recent();
      slow_runs_ = best != UINT64_MAX && ticks > best + best / 2 + best / 4 ? slow_runs_ + 1 : 0;
      recent_[place_++ % kRecent] = ticks;
      return false;
    }
    best_trial_ = std::min(best_trial_, ticks);
    if (--trials_left_ > 0) return false;
    // Compared with the last few runs, not with the best ever: the state may have changed.
    const uint64_t best = best_recent();
    if (best_trial_ >= best - best / 8) return false;
    streaming_ = !streaming_;
    for (uint64_t& run : recent_) run = best_trial_;
    return true;
  }

 private:
  static constexpr uint32_t kPeriod = 1024, kFirst = 8;
  static constexpr int kTrials = 3, kRecent = 4, kSlowRuns = 3;

  uint64_t best_recent() const { return *std::min_element(recent_, recent_ + kRecent); }

  bool streaming_ = false;
  uint32_t runs_ = 0, place_ = 0;
  int trials_left_ = 0, slow_runs_ = 0;
  uint64_t best_trial_ = UINT64_MAX;
  uint64_t recent_[kRecent] = {UINT64_MAX, UINT64_MAX, UINT64_MAX, UINT64_MAX};
};

}  // namespace commrt
