// SPDX-License-Identifier: Apache-2.0
// Binds what processes and groups need at their end.
#include <mutex>

#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.hpp"
#include "calls/group.hpp"
#include "engine/device_refusals.hpp"
#include "engine/end_limit.hpp"
#include "engine/far_packets.hpp"
#include "gil.hpp"

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
  m.def("meet_in_context", [](Group& g, bool begins) {
    const std::lock_guard<std::mutex> lock(g.engine->mutex);
    ContextEnds& ends = g.comm->refusals.context_ends;
    begins ? ends.begin_meeting() : ends.end_meeting();
  }, nb::arg("group"), nb::arg("begins"), "This rank is to meet others within a context, or has.");
  m.def("lose_context_end", [](Group& g) {
    const std::lock_guard<std::mutex> lock(g.engine->mutex);
    g.comm->refusals.context_ends.lose();
  }, nb::arg("group"),
     "A context of fused() ends here in which this rank has lost count of operations: asks others.");
  m.def("find_context_end", [](Group& g) {
    const std::lock_guard<std::mutex> lock(g.engine->mutex);
    const ContextEnds::End found = g.comm->refusals.context_ends.find();
    const bool is_gone = found.count == ContextEnds::Count::Gone;
    return nb::make_tuple(is_gone ? -1 : static_cast<int64_t>(found.seq),
                          found.count != ContextEnds::Count::Inside);
  }, nb::arg("group"),
     "A number of an operation, and whether it is the one that follows the context: else other ranks\n"
     "have come to it within. -1: no rank knows any more.");
  m.def("regain_context_end", [](Group& g) {
    const std::lock_guard<std::mutex> lock(g.engine->mutex);
    g.comm->refusals.context_ends.regain();
  }, nb::arg("group"), "This rank has come to that operation.");
  m.def("ask_of_device",
        [](Group& g, const std::string& reason) {
          const ReleasedGil release;
          const std::lock_guard<std::mutex> lock(g.engine->mutex);
          g.comm->refusals.on_devices->ask(reason);
        }, nb::arg("group"), nb::arg("reason"),
        "This rank refuses its next call, which others may have given to devices: asks them.");
  m.def("said_of_device", [](Group& g) {
    std::vector<DeviceRefusals::Said> said;
    {
      const ReleasedGil release;
      const std::lock_guard<std::mutex> lock(g.engine->mutex);
      g.comm->refusals.look_around();
      said = g.comm->refusals.on_devices->said();
    }
    nb::list found;
    for (const DeviceRefusals::Said& one : said) {
      found.append(nb::make_tuple(static_cast<int>(one.part), one.words));
    }
    return found;
  }, nb::arg("group"),
     "What the ranks say to that: 0 nothing yet, 1 refused, 2 given to a device, 3 another kind of\n"
     "call; and the words of its plan.");
  m.def("end_question", [](Group& g) {
    const ReleasedGil release;
    const std::lock_guard<std::mutex> lock(g.engine->mutex);
    g.comm->refusals.on_devices->end_question();
  }, nb::arg("group"), "Nothing is asked any more.");
  m.def("take_untold", [](Group& g) { return g.comm->refusals.on_devices->take_untold(); },
        nb::arg("group"),
        "Return once what the program is to hear of calls that failed unseen, by their numbers.");
  m.def("limit_end", &limit_end, nb::arg("seconds"), nb::arg("status"), nb::arg("message"),
        "Let this process end after a time, with a message, whatever its threads do.");
}

}  // namespace commrt
