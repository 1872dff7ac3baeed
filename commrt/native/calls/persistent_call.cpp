// SPDX-License-Identifier: Apache-2.0
// Runs of a collective that is bound to its arrays.
#include "calls/persistent_call.hpp"

#include <cstring>

#include "arrays/tensor_view.hpp"
#include "calls/group_methods.hpp"
#include "python_callbacks.hpp"

namespace commrt {

PersistentCall::PersistentCall(nb::object group, PlanPtr plan, uint64_t in, uint64_t out,
                               nb::object keep_x, nb::object keep_out, nb::object result,
                               nb::object operation, uint64_t source, uint64_t nbytes)
    : group_(std::move(group)), plan_(std::move(plan)), in_(reinterpret_cast<const void*>(in)),
      out_(reinterpret_cast<void*>(out)), keep_x_(std::move(keep_x)),
      keep_out_(std::move(keep_out)), result_(std::move(result)),
      operation_(std::move(operation)), source_(reinterpret_cast<const void*>(source)),
      nbytes_(nbytes), at_x_(address_on_host(keep_x_.ptr())),
      at_out_(address_on_host(keep_out_.ptr())) {}

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
  check_place(keep_x_, at_x_);
  check_place(keep_out_, at_out_);
  if (source_ != nullptr) std::memcpy(const_cast<void*>(in_), source_, nbytes_);
  return run_plan(group_, plan_, in_, out_, keep_x_, keep_out_, result_, operation_, nonblocking,
                  timeout_s);
}

// An array may get other memory after the plan was made, and its old memory is gone then.
void PersistentCall::check_place(const nb::object& array, const void* place) const {
  if (place == nullptr || address_on_host(array.ptr()) == place) return;
  const std::string text =
      nb::cast<std::string>(operation_) +
      ": an array that this call is bound to has other memory than when it was planned, as by "
      "resize(), x.data = y, or untyped_storage().resize_(): plan the call again";
  raise_error("UsageError", text.c_str());
}

}  // namespace commrt
