// SPDX-License-Identifier: Apache-2.0
// The line of a communicator: what it was made from, and what that was made from.
#pragma once

#include <memory>

namespace commrt {

class Comm;

struct Kin {
  Comm* comm;  // null once it has gone: the line goes on all the same
  std::shared_ptr<Kin> origin;

  // The next one that is still there, or null. Forgets those between.
  Kin* next() {
    while (origin != nullptr && origin->comm == nullptr) origin = origin->origin;
    return origin.get();
  }
};

}  // namespace commrt
