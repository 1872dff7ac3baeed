// SPDX-License-Identifier: Apache-2.0
// A collective bound to its arrays: planned once, started any number of times.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>

#include "calls/group.hpp"

namespace commrt {

class PersistentCall {
 public:
  // `source`: if the operation reads a copy, the memory whose `nbytes` bytes are copied anew before
  // each run.
  PersistentCall(nb::object group, PlanPtr plan, uint64_t in, uint64_t out, nb::object keep_x,
                 nb::object keep_out, nb::object result, nb::object operation, uint64_t source,
                 uint64_t nbytes);

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
  void check_place(const nb::object& array, const void* place) const;

  nb::object group_;
  PlanPtr plan_;
  const void* in_;
  void* out_;
  nb::object keep_x_, keep_out_, result_, operation_;
  const void* source_;
  uint64_t nbytes_;
  const void *at_x_, *at_out_;  // where the arrays' first elements were; null: not known
};

}  // namespace commrt
