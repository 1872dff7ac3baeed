// SPDX-License-Identifier: Apache-2.0
// Notices that a wait could not look: its process was stopped, or other threads kept it from it.
#pragma once

#include <time.h>

namespace commrt {

// The longest time in which a wait did not look; 0: none worth a word.
struct Starvation {
  double longest_s = 0;
  bool process_ran = false;  // its process computed meanwhile
};

// Counts the time between the looks of one wait. Looks at the clock are rare, every 50 ms, so this
// costs nothing that shows.
class LookWatch {
 public:
  // A machine that is busy leaves a thread without a core for some tenths of a second.
  static constexpr double kStarved_s = 1.0;
  // What a wait gets that was starved when its time was up: what it waits for may be there by now,
  // and ranks that were stopped with it need a moment, too.
  static constexpr double kSecondLook_s = 2.0;

  explicit LookWatch(double now) : last_s_(now), last_cpu_s_(cpu_s()) {}

  // At a look: true if it comes so late that the wait was starved.
  bool is_late(double now) {
    constexpr double kLeast_s = 0.02;
    const double gap = now - last_s_;
    if (gap < kLeast_s) return false;
    const double cpu = cpu_s(), used = cpu - last_cpu_s_;
    last_s_ = now;
    last_cpu_s_ = cpu;
    if (gap < kStarved_s) return false;
    if (gap > found.longest_s) found = {gap, used > gap / 4};
    return true;
  }
  // The time since the last look was the program's own: it ran code of this thread.
  void leave_out(double now) {
    last_s_ = now;
    last_cpu_s_ = cpu_s();
  }
  Starvation found;

 private:
  static double cpu_s() {
    timespec used;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
    return static_cast<double>(used.tv_sec) + 1e-9 * static_cast<double>(used.tv_nsec);
  }
  double last_s_, last_cpu_s_;
};

}  // namespace commrt
