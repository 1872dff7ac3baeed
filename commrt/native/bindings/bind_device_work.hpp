// SPDX-License-Identifier: Apache-2.0
// What the bindings of work on devices share.
#pragma once

#include <string>

#include "bindings/bindings.hpp"
#include "calls/device_call.hpp"

namespace commrt {

// The bug of a name, of those that tests plant; `names` begin with that of none.
template <class Bug>
Bug planted_bug(const std::string& name, const char* const* names, int count) {
  for (int i = 0; i < count; ++i) {
    if (name == names[i]) return static_cast<Bug>(i);
  }
  throw nb::value_error(("no bug is called " + name).c_str());
}

}  // namespace commrt
