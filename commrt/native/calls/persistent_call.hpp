// SPDX-License-Identifier: Apache-2.0
// A collective bound to its arrays: planned once, started any number of times.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>
#include <string>

#include "arrays/places.hpp"
#include "calls/group.hpp"

namespace commrt {

class PersistentCall {
 public:
  // `source`: if the operation reads a copy, the memory whose `nbytes` bytes are copied anew before
  // each run. `places`: where the arrays of the program lie; none: they stay. `look`: raises where
  // the values of arrays in parts must not leave; none: they lie at `in`.
  PersistentCall(nb::object group, PlanPtr plan, uint64_t in, uint64_t out, nb::object keep_x,
                 nb::object keep_out, nb::object result, nb::object operation,
                 std::shared_ptr<Places> places, uint64_t source, uint64_t nbytes, nb::object look);

  // The call that users make. It is recorded while somebody records.
  nb::object call(bool nonblocking);
  // Runs it with the group's limit, or with another one.
  nb::object run(bool nonblocking);
  nb::object run(bool nonblocking, double timeout_s);

  nb::object recorded;  // calls run()

  nb::object operation() const { return operation_; }
  std::string label() const { return plan_->label; }
  const void* in() const { return in_; }
  void* out() const { return out_; }

 private:
  nb::object group_;
  PlanPtr plan_;
  const void* in_;
  void* out_;
  nb::object keep_x_, keep_out_, result_, operation_, look_;
  std::shared_ptr<Places> places_;
  const void* source_;
  uint64_t nbytes_;
};

}  // namespace commrt
