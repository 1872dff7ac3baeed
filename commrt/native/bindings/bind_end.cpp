// SPDX-License-Identifier: Apache-2.0
// Binds what a process needs at its end.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.hpp"
#include "engine/end_limit.hpp"
#include "engine/far_packets.hpp"

namespace nb = nanobind;

namespace commrt {

void bind_end(nb::module_& m) {
  m.def("far_packets_sent",
        [](size_t size) { return FarPackets::of_process().sent(size); }, nb::arg("size"),
        "Packets that this process has sent to each rank of its MPI communicator.");
  m.def("far_packets_taken", [] { return FarPackets::of_process().taken(); },
        "Packets that this process has taken from MPI.");
  m.def("limit_end", &limit_end, nb::arg("seconds"), nb::arg("status"), nb::arg("message"),
        "Let this process end after a time, with a message, whatever its threads do.");
}

}  // namespace commrt
