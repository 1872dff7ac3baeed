// SPDX-License-Identifier: Apache-2.0
// Binds what all calls on device memory, and all works, share (device_calls/requests.py).
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.hpp"
#include "calls/device_call.hpp"
#include "engine/p2p.hpp"
#include "gil.hpp"

namespace commrt {

namespace {

// Returns the bytes that have come so far, for each receive of a call of messages.
std::vector<uint64_t> received_nbytes(const PyDeviceCall& self) {
  const Op* const op = self.call->messages();
  if (op == nullptr) return {};
  const std::lock_guard<std::mutex> own(self.engine->mutex);
  return op->p2p->parts->received;
}

// Says what a call of messages waits for; empty where it waits for nobody.
std::string waits_for(const PyDeviceCall& self) {
  const Op* const op = self.call->messages();
  if (op == nullptr) return "";
  const std::lock_guard<std::mutex> own(self.engine->mutex);
  return op->finished() ? "" : op->comm->p2p->waits_for(*op);
}

}  // namespace

void bind_device_work(nb::module_& m) {
  nb::class_<PyDeviceCall>(m, "DeviceCall", "One started call on device memory.")
      .def("wait_on", &PyDeviceCall::wait_on, nb::arg("stream"),
           "Let a stream wait for the end.")
      .def("synchronize", &PyDeviceCall::synchronize, nb::arg("timeout_s"),
           "Block the host until the end; False where time ran out.")
      .def("test", &PyDeviceCall::test, "Run a little progress; whether it has ended.")
      .def_prop_ro("ended", &PyDeviceCall::ended, "Whether it has ended, without progress.")
      .def_prop_ro("failure", [](const PyDeviceCall& self) -> nb::object {
        if (!self.call->failed()) return nb::none();
        return nb::make_tuple(self.call->kind, self.call->error);
      }, "(kind, text) of what went wrong; None where nothing did.")
      .def_prop_ro("is_captured",
                   [](const PyDeviceCall& self) { return self.call->is_captured(); },
                   "Whether it was recorded in a graph, and runs as that is launched.")
      .def("let_be",
           [](const PyDeviceCall& self) {
             guarded([&] {
               self.work().let_be(self.call);
               return 0;
             });
           }, "Give the device all of it, as nobody will ask for it again.")
      .def_prop_ro("received_nbytes", &received_nbytes, "Bytes of each receive, so far.")
      .def_prop_ro("waits_for", &waits_for, "The messages it waits for, in words; empty: none.")
      .def_prop_ro("seq", [](const PyDeviceCall& self) { return self.call->seq; },
                   "Sequence number on the communicator, of its first piece.");

  nb::class_<PyDeviceWork>(m, "DeviceWork", "A communicator's work of a kind on one device.")
      .def("give_up",
           [](const PyDeviceWork& self, const std::string& why) {
             ReleasedGil release;
             self.work->give_up("revoked", why);
           }, nb::arg("why"), "Fail what is under way, and let its streams go.")
      .def("close", [](const PyDeviceWork& self) { self.work->close(); },
           nb::call_guard<ReleasedGil>(),
           "Nobody calls any more: give back what is not in use, at once or later.")
      .def_prop_ro("outstanding", [](const PyDeviceWork& self) { return self.work->outstanding(); },
                   "Calls whose end the host has not seen.")
      .def_prop_ro("num_events",
                   [](const PyDeviceWork& self) { return self.work->events().size(); },
                   "Events that wait for the next call.")
      .def_prop_ro("failed", [](const PyDeviceWork& self) { return self.work->failed(); },
                   "Whether something failed, so that nothing more is taken.");
}

}  // namespace commrt
