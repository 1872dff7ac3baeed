// SPDX-License-Identifier: Apache-2.0
// Bound calls, and the comparison of calls that runs one.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.hpp"
#include "calls/call_check.hpp"
#include "calls/persistent_call.hpp"

namespace commrt {

namespace {

void bind_check(nb::module_& m) {
  m.def("number_of_text",
        [](const nb::bytes& text) { return number_of_text(text.c_str(), text.size()); },
        nb::arg("text"), "Return a number of 64 bits of a text; 0 for an empty one.");
  nb::class_<CallCheck>(m, "CallCheck",
                        "Compares the calls of a group's ranks before they run, in check mode.")
      .def(nb::init<nb::object, int, uint64_t>(), nb::arg("make_exchange"), nb::arg("size"),
           nb::arg("seed"),
           "`make_exchange` returns a PersistentCall: an allgather of two int64 of each rank. "
           "`seed` is a number of what is equal in all calls.")
      .def("fingerprint",
           [](const CallCheck& self, int coll, int dtype, int redop, int root, int64_t count,
              const std::vector<int64_t>& counts, uint64_t seq, uint64_t name, uint64_t rest) {
             const PlanKey key{count, PlanKey::pack(coll, static_cast<DType>(dtype), redop, kHost),
                               root};
             return self.fingerprint(key, counts.data(), counts.size(), seq, name, rest);
           }, nb::arg("coll"), nb::arg("dtype"), nb::arg("redop"), nb::arg("root"),
           nb::arg("count"), nb::arg("counts"), nb::arg("seq"), nb::arg("name"), nb::arg("rest"),
           "Return the number of a call. `name` is a number of its name, `rest` one of all that the "
           "others do not say.")
      .def("pairs",
           [](const CallCheck& self, int rank, const std::vector<int64_t>& sent,
              const std::vector<int64_t>& received) {
             return self.pairs(rank, sent.data(), received.data());
           }, nb::arg("rank"), nb::arg("sent"), nb::arg("received"),
           "Return this rank's part of a sum that is 0 where all pairs agree on their lengths.")
      .def("are_same", &CallCheck::are_same, nb::arg("fingerprint"), nb::arg("pairs"),
           nb::arg("timeout_s"),
           "Return whether all ranks make the same call; collective. 0 is no call.")
      .def("take_difference", &CallCheck::take_difference,
           "Return, once, whether the engine itself has found that the ranks' calls differ.");
}

}  // namespace

void bind_persistent(nb::module_& m) {
  nb::class_<PersistentCall>(m, "PersistentCall", nb::is_weak_referenceable(),
                             "A collective bound to its arrays; call it, or start() it.")
      .def(nb::init<nb::object, PlanPtr, uint64_t, uint64_t, nb::object, nb::object, nb::object,
                    nb::object, std::shared_ptr<Places>, uint64_t, uint64_t, nb::object>(),
           nb::arg("group"), nb::arg("plan"), nb::arg("data_in"), nb::arg("data_out"),
           nb::arg("keep_x").none(), nb::arg("keep_out").none(), nb::arg("result").none(),
           nb::arg("operation"), nb::arg("places") = nb::none(), nb::arg("source") = 0,
           nb::arg("nbytes") = 0, nb::arg("look") = nb::none())
      .def("__call__", [](PersistentCall& self) { return self.call(false); },
           "Run the operation and return its output.")
      .def("start", [](PersistentCall& self) { return self.call(true); },
           "Start the operation and return its Request; wait before starting it again.")
      .def("run_bound", [](PersistentCall& self, bool nonblocking) { return self.run(nonblocking); },
           nb::arg("nonblocking"))
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
  bind_check(m);
}

}  // namespace commrt
