// SPDX-License-Identifier: Apache-2.0
// Learns, run by run, which kind of stores is faster for a plan.
//
// Slots: near each other's core, plain stores win (by 1.4 to 1.7 at 512 KiB to 8 MiB); far
// from it, non-temporal ones do (by 4), because a line that the peer has just read need not
// be fetched back. Results too large for the cache: non-temporal stores spare memory the
// reading of what is overwritten (1.1 to 1.2 from 16 MiB on, in both states).
// Virtual machines move between near and far within seconds. Ranks need not agree, as each rank
// may write in its own way. So each plan tries the other kinds now and then, and at once when its
// runs have become slow. The winner of a trial of three runs may just have met a better moment. It
// has to prove itself in the next runs, or it is given up again.
// A finding of one plan mostly holds for the communicator's other plans, too. A new plan begins
// with the slots' stores that another has found, and one that hears of a change tries soon.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/kernels.hpp"

namespace commrt {

class StoreChoice {
 public:
  // `open`: which of the two destinations is decided here, Stream2 (slots) among them; the
  // others stay as in `first`.
  void start_with(Store first, Store open) {
    kind_ = bits(first);
    open_ = bits(open);
  }

  // Another plan has proved one kind of stores to slots. A plan that has not run yet begins with
  // it. A plan that uses the other kind tries all kinds, once it knows how long its own takes by
  // now. Then it is deaf for a while, and longer after each trial in vain: plans of different
  // lengths may well differ.
  void hear(bool streams_slots) {
    const unsigned slots = bits(Store::Stream2);
    if ((open_ & slots) == 0 || ((kind_ & slots) != 0) == streams_slots) return;
    if (runs_ == 0) {
      kind_ ^= slots;
    } else if (deaf_until_ <= runs_ && is_settled()) {
      tries_at_ = runs_ + kRecent + 1;
      deaf_until_ = runs_ + (deaf_for_ = std::min(2 * deaf_for_, kPeriod));
    }
  }

  // The kind for a run that is not timed.
  Store current() const { return static_cast<Store>(kind_); }

  // True if current() has proved faster than the others, and is not only the kind it began with.
  bool has_tried() const { return tried_ && is_settled(); }

  // The kind for the next timed run; report() must follow before the next call.
  Store next() {
    if (is_settled() && (++runs_ % kPeriod == kFirst || slow_runs_ >= kSlowRuns ||
                         runs_ == tries_at_)) {
      if (slow_runs_ >= kSlowRuns) slow_runs_ = 0;  // else they may have only begun
      flipped_ = 0;
      best_trial_ = UINT64_MAX;
      try_another();
    }
    return static_cast<Store>(trials_left_ > 0 ? kind_ ^ flipped_ : kind_);
  }

  // Takes the ticks of the run for which next() was asked. `only_writes`: without the time that
  // its readers need. Readers of streamed payloads find them in memory and not in a cache. Near,
  // plain writes alone take 1.2 to 3.5 times as long as streamed ones, though whole runs are no
  // slower; far, they take 4 (8 KiB) to 18 times as long.
  void report(uint64_t ticks, bool only_writes = false) {
    const unsigned kind = trials_left_ > 0 ? kind_ ^ flipped_ : kind_;
    if (only_writes && (kind & bits(Store::Stream2)) != 0) ticks *= kReadersShare;
    if (trials_left_ == 0) {
      const uint64_t best = best_recent();
      slow_runs_ = best != UINT64_MAX && ticks > best + best / 2 + best / 4 ? slow_runs_ + 1 : 0;
      recent_[place_++ % kRecent] = ticks;
      if (on_probation_ > 0 && --on_probation_ == 0) prove();
      return;
    }
    if (ticks < best_trial_) {
      best_trial_ = ticks;
      best_flip_ = flipped_;
    }
    if (--trials_left_ > 0 || try_another()) return;
    tried_ = true;
    // Compared with the last few runs, not with the best ever: the state may have changed.
    const uint64_t best = best_recent();
    if (best_trial_ >= best - best / 8) return;
    kind_ ^= best_flip_;
    best_before_ = best;
    on_probation_ = kRecent;
    deaf_for_ = kDeaf;
  }

 private:
  static constexpr uint32_t kPeriod = 1024, kFirst = 8, kDeaf = 64, kReadersShare = 3;
  // So many slow runs start a trial: as many as are remembered, so that the trial is compared with
  // slow runs alone.
  static constexpr int kTrials = 3, kRecent = 4, kSlowRuns = kRecent;

  bool is_settled() const { return trials_left_ == 0 && on_probation_ == 0; }
  static unsigned bits(Store kind) { return static_cast<unsigned>(kind); }
  uint64_t best_recent() const { return *std::min_element(recent_, recent_ + kRecent); }

  // Called after the first runs of a new kind. Goes back to the old kind unless they were faster.
  void prove() {
    if (best_recent() >= best_before_ - best_before_ / 16) kind_ ^= best_flip_;
  }

  // Goes on to the next combination of what is open; false after the last one.
  bool try_another() {
    do {
      if (++flipped_ > bits(Store::StreamBoth)) return false;
    } while ((flipped_ & ~open_) != 0);
    trials_left_ = kTrials;
    return true;
  }

  bool tried_ = false;
  unsigned kind_ = 0, open_ = 0;
  unsigned flipped_ = 0, best_flip_ = 0;  // what the present, and the best, trial changes
  uint32_t runs_ = 0, place_ = 0;
  uint32_t tries_at_ = 0, deaf_until_ = 0, deaf_for_ = kDeaf;  // runs
  int trials_left_ = 0, slow_runs_ = 0, on_probation_ = 0;
  uint64_t best_before_ = 0;  // of the kind that the present one has replaced
  uint64_t best_trial_ = UINT64_MAX;
  uint64_t recent_[kRecent] = {UINT64_MAX, UINT64_MAX, UINT64_MAX, UINT64_MAX};
};

}  // namespace commrt
