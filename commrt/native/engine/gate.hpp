// SPDX-License-Identifier: Apache-2.0
// What an operation waits for before its first step.
#pragma once

#include <atomic>
#include <cstdint>

namespace commrt {

double now_s();

// An operation begins only once its gate is open. Somebody else raises the count `opened`, which
// is compared with `value` cyclically. A gate may also have a time before which it stays closed.
struct Gate {
  const std::atomic<uint32_t>* opened = nullptr;  // null: open
  uint32_t value = 0;
  double until_s = 0;  // 0: no such time
  bool is_open() const {
    if (until_s != 0 && now_s() < until_s) return false;
    return opened == nullptr ||
           static_cast<int32_t>(opened->load(std::memory_order_acquire) - value) >= 0;
  }
};

}  // namespace commrt
