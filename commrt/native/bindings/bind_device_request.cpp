// SPDX-License-Identifier: Apache-2.0
// Binds requests of calls on arrays on devices.
#include "bindings/bindings.hpp"
#include "calls/device_request.hpp"

namespace commrt {

namespace {

int traverse_request(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (!nb::inst_ready(self)) return 0;
  return nb::inst_ptr<DeviceRequest>(self)->traverse(visit, arg);
}

int clear_request(PyObject* self) {
  if (nb::inst_ready(self)) nb::inst_ptr<DeviceRequest>(self)->clear();
  return 0;
}

PyType_Slot collected[] = {{Py_tp_traverse, reinterpret_cast<void*>(traverse_request)},
                           {Py_tp_clear, reinterpret_cast<void*>(clear_request)},
                           {0, nullptr}};

}  // namespace

void bind_device_request(nb::module_& m) {
  using R = DeviceRequest;
  nb::class_<R>(m, "DeviceRequest", nb::type_slots(collected), nb::is_weak_referenceable(),
                "One started call on arrays on a device; has the methods of Request.")
      .def("__init__",
           [](R* self, nb::object comm, const PyDeviceCall& call, nb::object result,
              nb::str operation, double timeout_s, nb::object device, std::uint64_t stream,
              nb::object array) {
             nb::cast<Group&>(comm);  // or it is a TypeError
             new (self) R(std::move(comm), call, std::move(result), std::move(operation),
                          timeout_s, std::move(device), stream, std::move(array));
           },
           nb::arg("comm"), nb::arg("call"), nb::arg("result").none(), nb::arg("operation"),
           nb::arg("timeout_s"), nb::arg("device"), nb::arg("stream"), nb::arg("array").none())
      .def("wait", &R::wait, nb::kw_only(), nb::arg("stream") = nb::none(),
           nb::arg("timeout_s") = nb::none(),
           "Let a stream wait for the end, and return the output at once. `stream` is the current "
           "one of the array's library by itself. The host is not blocked: what is given to that "
           "stream from now on comes after the operation. Idempotent; raises the operation's "
           "error if it has failed by now.")
      .def("synchronize", &R::synchronize, nb::kw_only(), nb::arg("timeout_s") = nb::none(),
           "Block the host until the operation is complete; return the output.")
      .def("test", &R::test,
           "Run a little progress; True once complete. Raises the operation's error.")
      .def("be_quiet", &R::be_quiet, "Do not warn where it is dropped.")
      .def_prop_ro("done", &R::done,
                   "Whether the host has seen the end, without progress. Never of what was "
                   "captured into a graph: nobody looks at its launches.")
      .def_prop_ro("seq", &R::seq, "Sequence number of its first piece on the communicator.")
      .def_prop_ro("operation", &R::operation, "Name of the operation.")
      .def_prop_ro("received_nbytes", [](const R&) { return -1; },
                   "Bytes that messages brought; -1 for other operations.")
      .def_prop_ro("source", [](const R&) { return -1; },
                   "The rank that a message came from; -1 for other operations.")
      .def_prop_ro("timeout_s", &R::timeout_s, "Default limit of synchronize, in seconds.")
      .def_prop_ro("device", &R::device, "Number of the device of its arrays.")
      .def_prop_ro("stream", &R::stream, "Stream that it was ordered after, as an integer.")
      .def_prop_ro("comm", &R::group)
      .def_prop_ro("call", [](const R& self) { return self.call(); })
      .def_prop_ro("title", &R::what, "Its name in messages.")
      .def("waits_for", &R::who_is_missing, "Return who keeps it waiting, in words.")
      .def("__repr__", &R::repr)
      .def("__bool__", [](const R& self) -> bool {
        throw nb::type_error(("the truth of a request is not its completion: call test() or "
                              "wait() on " + std::string(self.repr().c_str())).c_str());
      });
}

}  // namespace commrt
