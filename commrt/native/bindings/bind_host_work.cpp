// SPDX-License-Identifier: Apache-2.0
// Binds calls on device memory whose work is the host's (device_calls/host_work.py).
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <tuple>

#include "bindings/bind_staged_work.hpp"
#include "gil.hpp"
#include "staging/host_work.hpp"

namespace commrt {

namespace {

using PyHostWork = PyWork<HostWork>;
using ArrayRow = std::tuple<uint64_t, size_t, bool, bool>;

// A thread that waits wakes up so often, to see what else there is.
constexpr double kSlice_s = 0.05;

PyDeviceCall start(const PyHostWork& self, const std::vector<ArrayRow>& rows, uint64_t stream,
                   bool asked_for, nb::handle keep, double timeout_s) {
  std::vector<HostArray> arrays;
  for (const auto& [address, nbytes, reads, writes] : rows) {
    arrays.push_back({as_memory(address), nbytes, reads, writes});
  }
  return started(self, keep, nb::none(), timeout_s, [&](void* const* kept) {
    return self.own().start(std::move(arrays), stream, asked_for, kept, timeout_s);
  });
}

}  // namespace

void bind_host_work(nb::module_& m) {
  nb::class_<PyHostWork, PyDeviceWork> work(
      m, "HostWork", "A communicator's calls on one device whose work is the host's.");
  bind_staged_work(work);
  work.def("start", &start, nb::arg("arrays"), nb::arg("stream"), nb::arg("asked_for"),
           nb::arg("keep"), nb::arg("timeout_s"),
           "Give the device the copies to the host; rows are (address, bytes, whether the host "
           "reads it, whether it writes it).")
      .def("give_back",
           [](const PyHostWork& self, const PyDeviceCall& call) {
             guarded([&] {
               self.own().give_back(call.call);
               return 0;
             });
           }, nb::arg("call"),
           "Give the device the copies back, once somebody has the host's part or has done it.")
      .def("places",
           [](const PyHostWork& self, const PyDeviceCall& call) {
             return self.own().places(call.call);
           }, nb::arg("call"), "Where each array of a call lies in pinned memory.")
      .def("has_come",
           [](const PyHostWork& self, const PyDeviceCall& call) {
             return guarded([&] { return self.own().has_come(call.call); });
           }, nb::arg("call"), "Whether what is read is there, or the call has failed.")
      .def("wait_until_come",
           [](const PyHostWork& self, const PyDeviceCall& call, double limit_s) {
             const double slice_s = std::min(limit_s, kSlice_s);
             return guarded([&] { return self.own().wait_until_come(call.call, slice_s); });
           }, nb::arg("call"), nb::arg("limit_s"),
           "The same once it is so, or after that time, 0.05 s at most.")
      .def("done",
           [](const PyHostWork& self, const PyDeviceCall& call) {
             guarded([&] {
               self.own().done(call.call);
               return 0;
             });
           }, nb::arg("call"), "The host has written what goes back.")
      .def("fail",
           [](const PyHostWork& self, const PyDeviceCall& call, const std::string& kind,
              const std::string& why) {
             guarded([&] {
               self.own().fail_call(call.call, kind, why);
               return 0;
             });
           }, nb::arg("call"), nb::arg("kind"), nb::arg("why"),
           "The host's part has failed; after a \"timeout\" the communicator is of no more use.")
      .def("announce",
           [](const PyHostWork& self) {
             ReleasedGil release;
             self.own().announce();
           }, "Let a simulated device know that the host did something.")
      .def("plant",
           [](const PyHostWork& self, const std::string& name) {
             self.own().planted.plant(name);
           }, nb::arg("name"), "Plant a bug, for tests.");

  m.def("planted_host_work_bugs", &PlantedBug<PlantedHostWork>::names,
        "Names of the bugs that tests can plant in calls whose work is the host's.");
}

}  // namespace commrt
