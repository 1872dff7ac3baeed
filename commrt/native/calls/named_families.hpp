// SPDX-License-Identifier: Apache-2.0
// The families of calls that name their algorithm, as the dispatcher finds them.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <vector>

#include "calls/plan_cache.hpp"

namespace commrt {

namespace nb = nanobind;

// Python says once which family a name stands for. A family that was dropped meanwhile has no plans
// any more, so such a call goes to Python again, which says it anew.
class NamedFamilies {
 public:
  // The key of the family of calls like this one; null if Python has not said it. `name`: a str.
  const PlanKey* find(const PlanKey& call, PyObject* name) const {
    for (const Known& each : known_) {  // mostly the very object of the call before
      if (each.name.ptr() == name && each.is_like(call)) return &each.family;
    }
    for (const Known& each : known_) {
      if (each.is_like(call) && PyUnicode_Compare(each.name.ptr(), name) == 0) return &each.family;
    }
    return nullptr;
  }

  void add(const PlanKey& call, nb::str name, const PlanKey& family) {
    const auto same = std::find_if(known_.begin(), known_.end(), [&](const Known& each) {
      return each.is_like(call) && PyUnicode_Compare(each.name.ptr(), name.ptr()) == 0;
    });
    if (same != known_.end()) {
      same->family = family;
    } else if (known_.size() < kMost) {
      known_.push_back({call.what, call.root, std::move(name), family});
    } else {
      known_[next_++ % kMost] = {call.what, call.root, std::move(name), family};
    }
  }

 private:
  static constexpr size_t kMost = 64;
  struct Known {
    uint32_t what;
    int32_t root;
    nb::str name;
    PlanKey family;
    bool is_like(const PlanKey& call) const { return what == call.what && root == call.root; }
  };
  std::vector<Known> known_;
  size_t next_ = 0;
};

}  // namespace commrt
