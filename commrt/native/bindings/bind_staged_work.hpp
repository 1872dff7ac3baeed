// SPDX-License-Identifier: Apache-2.0
// The bindings that all kinds of StagedWork share.
#pragma once

#include <memory>

#include "bindings/bindings.hpp"
#include "calls/device_call.hpp"
#include "device_calls/staged_work.hpp"
#include "gil.hpp"

namespace commrt {

// Binds the methods that each of them has.
template <class Work>
void bind_staged_work(nb::class_<PyWork<Work>, PyDeviceWork>& type) {
  using Py = PyWork<Work>;
  type.def("__init__",
           [](Py* self, Group& group, const PyDevice& device, int slots, size_t first_nbytes,
              size_t most_nbytes, uint32_t first_value, bool flags) {
             const StagerOptions options{slots, first_nbytes, most_nbytes, first_value, flags};
             make_work(self, group, [&, on = device.device, keeps = device.keeps] {
               return std::make_shared<Work>(*group.comm, *group.engine, on, keeps, options);
             });
           }, nb::arg("group"), nb::arg("device"), nb::arg("slots"), nb::arg("first_nbytes"),
           nb::arg("most_nbytes"), nb::arg("first_value") = 0, nb::arg("flags") = true)
      .def("refuse_capture",
           [](const Py& self, uint64_t stream) {
             guarded([&] {
               self.own().refuse_capture(stream);
               return 0;
             });
           }, nb::arg("stream"), "Raise CaptureError where a stream is captured.")
      .def("release_rest",
           [](const Py& self) {
             ReleasedGil release;
             return static_cast<int>(self.own().release_rest());
           }, "Give back what is left of one that failed: 1 done, 2 never, 0 later.")
      .def_prop_ro("pinned_nbytes",
                   [](const Py& self) {
                     ReleasedGil release;
                     return self.own().pinned_nbytes();
                   }, "Pinned memory for data.");
}

}  // namespace commrt
