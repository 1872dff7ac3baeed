// SPDX-License-Identifier: Apache-2.0
// Binds what processes and groups need at their end.
#include <mutex>

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.hpp"
#include "calls/group.hpp"
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
  m.def("end_together",
        [](Group& made, Group& origin) {
          const std::lock_guard<std::mutex> lock(made.engine->mutex);
          made.comm->end_with(*origin.comm);
        }, nb::arg("made"), nb::arg("origin"),
        "Let a group that was made from another end where a rank has ended that for all ranks.");
  m.def("limit_end", &limit_end, nb::arg("seconds"), nb::arg("status"), nb::arg("message"),
        "Let this process end after a time, with a message, whatever its threads do.");
}

}  // namespace commrt
