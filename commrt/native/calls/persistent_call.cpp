// SPDX-License-Identifier: Apache-2.0
// Runs of a collective that is bound to its arrays.
#include "calls/persistent_call.hpp"

#include <nanobind/stl/shared_ptr.h>

#include <cstring>

#include "calls/group_methods.hpp"
#include "kernels/finite.hpp"

namespace commrt {

PersistentCall::PersistentCall(nb::object group, PlanPtr plan, uint64_t in, uint64_t out,
                               nb::object keep_x, nb::object keep_out, nb::object result,
                               nb::object operation, std::shared_ptr<Places> places,
                               uint64_t source, uint64_t nbytes, nb::object look)
    : group_(std::move(group)), plan_(std::move(plan)), in_(reinterpret_cast<const void*>(in)),
      out_(reinterpret_cast<void*>(out)), keep_x_(std::move(keep_x)),
      keep_out_(std::move(keep_out)), result_(std::move(result)),
      operation_(std::move(operation)), look_(std::move(look)), places_(std::move(places)),
      source_(reinterpret_cast<const void*>(source)), nbytes_(nbytes) {}

nb::object PersistentCall::call(bool nonblocking) {
  if (!recorded.is_valid()) return run(nonblocking);
  return recorded(nb::arg("nonblocking") = nonblocking);
}

nb::object PersistentCall::run(bool nonblocking) {
  return run(nonblocking, nb::inst_ptr<Group>(group_)->timeout_s);
}

nb::object PersistentCall::run(bool nonblocking, double timeout_s) {
  Group& group = *nb::inst_ptr<Group>(group_);
  if (group.slow || group.comm->broken.load(std::memory_order_relaxed) ||
      Engine::forked.load(std::memory_order_relaxed)) {
    group_.attr(group_methods::kCheckUsable)();
  }
  if (places_ && !places_->hold()) group_.attr(group_methods::kCheckPlaces)(places_, operation_);
  if (source_ != nullptr) std::memcpy(const_cast<void*>(in_), source_, nbytes_);
  if (group.nan_check && !look_.is_none()) {
    group_.attr(group_methods::kCheckBound)(look_);
  } else if (group.nan_check && plan_->in_elems != 0 && plan_->most_slots == 0) {
    const int64_t index = first_not_finite(plan_->dtype, in_, plan_->in_elems);
    if (index >= 0) {
      group_.attr(group_methods::kRefuseNotFinite)(operation_, "x", index, plan_->in_elems,
                                                   is_nan_at(plan_->dtype, in_, index));
    }
  }
  return run_plan(group_, plan_, in_, out_, keep_x_, keep_out_, result_, operation_, nonblocking,
                  timeout_s);
}

}  // namespace commrt
