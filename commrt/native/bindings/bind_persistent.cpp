// SPDX-License-Identifier: Apache-2.0
// A collective bound to its arrays: planned once, started any number of times.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <cstring>
#include <string>

#include "arrays/tensor_view.hpp"
#include "bindings/bindings.hpp"
#include "calls/group.hpp"
#include "calls/group_methods.hpp"
#include "python_callbacks.hpp"

namespace commrt {

namespace {

class PersistentCall {
 public:
  PersistentCall(nb::object group, PlanPtr plan, uint64_t in, uint64_t out, nb::object keep_x,
                 nb::object keep_out, nb::object result, nb::object operation, uint64_t source,
                 uint64_t nbytes)
      : group_(std::move(group)), plan_(std::move(plan)),
        in_(reinterpret_cast<const void*>(in)), out_(reinterpret_cast<void*>(out)),
        keep_x_(std::move(keep_x)), keep_out_(std::move(keep_out)),
        result_(std::move(result)), operation_(std::move(operation)),
        source_(reinterpret_cast<const void*>(source)), nbytes_(nbytes),
        at_x_(address_on_host(keep_x_.ptr())), at_out_(address_on_host(keep_out_.ptr())) {}

  nb::object run(bool nonblocking) {
    Group& group = *nb::inst_ptr<Group>(group_);
    if (group.slow || group.comm->broken.load(std::memory_order_relaxed) ||
        Engine::forked.load(std::memory_order_relaxed)) {
      group_.attr(group_methods::kCheckUsable)();
    }
    check_place(keep_x_, at_x_);
    check_place(keep_out_, at_out_);
    if (source_ != nullptr) std::memcpy(const_cast<void*>(in_), source_, nbytes_);
    return run_plan(group_, plan_, in_, out_, keep_x_, keep_out_, result_, operation_,
                    nonblocking, group.timeout_s);
  }

  // The call that users make. It is recorded while somebody records.
  nb::object call(bool nonblocking) {
    if (!recorded.is_valid()) return run(nonblocking);
    return recorded(nb::arg("nonblocking") = nonblocking);
  }

  nb::object recorded;  // calls run()

  nb::object operation() const { return operation_; }
  std::string label() const { return plan_->label; }

 private:
  // An array may get other memory after the plan was made, and its old memory is gone then.
  void check_place(const nb::object& array, const void* place) const {
    if (place == nullptr || address_on_host(array.ptr()) == place) return;
    const std::string text =
        nb::cast<std::string>(operation_) +
        ": an array that this call is bound to has other memory than when it was planned, as by "
        "resize(), x.data = y, or untyped_storage().resize_(): plan the call again";
    raise_error("UsageError", text.c_str());
  }

  nb::object group_;
  PlanPtr plan_;
  const void* in_;
  void* out_;
  nb::object keep_x_, keep_out_, result_, operation_;
  // If the operation reads a copy: the memory and bytes that are copied anew before each run.
  const void* source_;
  uint64_t nbytes_;
  const void *at_x_, *at_out_;  // where the arrays' first elements were; null: not known
};

}  // namespace

void bind_persistent(nb::module_& m) {
  nb::class_<PersistentCall>(m, "PersistentCall", nb::is_weak_referenceable(),
                             "A collective bound to its arrays; call it, or start() it.")
      .def(nb::init<nb::object, PlanPtr, uint64_t, uint64_t, nb::object, nb::object, nb::object,
                    nb::object, uint64_t, uint64_t>(),
           nb::arg("group"), nb::arg("plan"), nb::arg("data_in"), nb::arg("data_out"),
           nb::arg("keep_x").none(), nb::arg("keep_out").none(), nb::arg("result").none(),
           nb::arg("operation"), nb::arg("source") = 0, nb::arg("nbytes") = 0)
      .def("__call__", [](PersistentCall& self) { return self.call(false); },
           "Run the operation and return its output.")
      .def("start", [](PersistentCall& self) { return self.call(true); },
           "Start the operation and return its Request; wait before starting it again.")
      .def("run_bound", &PersistentCall::run, nb::arg("nonblocking"))
      .def("record_by",
           [](PersistentCall& self, const nb::object& method) {
             self.recorded = method.is_none() ? nb::object() : method;
           }, nb::arg("method").none(), "Let runs go through a method that calls run_bound.")
      .def_prop_ro("operation", &PersistentCall::operation, "Name of the operation.")
      .def_prop_ro("label", &PersistentCall::label,
                   "The candidate that runs it: backend/algorithm{params}.")
      .def("__repr__", [](const PersistentCall& self) {
        return nb::str("<commrt.PersistentCall {} by {}>").format(self.operation(), self.label());
      });
}

}  // namespace commrt
