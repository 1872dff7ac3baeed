// SPDX-License-Identifier: Apache-2.0
// Binds the staging of device memory (device_calls/collectives.py).
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>

#include "bindings/bind_staged_work.hpp"
#include "bindings/stand_in_words.hpp"
#include "engine/p2p.hpp"
#include "gil.hpp"
#include "staging/staged_messages.hpp"
#include "staging/staging.hpp"

namespace commrt {

namespace {

using PyStager = PyWork<Stager>;
using PyMessageStager = PyWork<MessageStager>;

PyDeviceCall start(const PyStager& self, const std::shared_ptr<const StagedPlan>& plan,
                   uint64_t in, uint64_t out, uint64_t stream, bool orders, nb::handle keep_x,
                   nb::handle keep_out, double timeout_s) {
  return started(self, keep_x, keep_out, timeout_s, [&](void* const* kept) {
    return self.own().start(plan, {as_memory(in), as_memory(out)}, stream, orders, kept,
                            timeout_s);
  });
}

PyDeviceCall start_arrays(const PyStager& self, const std::shared_ptr<const StagedPlan>& plan,
                          const std::vector<uint64_t>& addresses, uint64_t stream, bool orders,
                          nb::handle keep, double timeout_s) {
  return started(self, keep, nb::none(), timeout_s, [&](void* const* kept) {
    return self.own().start(plan, as_memory(addresses), stream, orders, kept, timeout_s);
  });
}

using MessageRow = std::tuple<uint64_t, uint64_t, int, int, TypeCode>;

PyDeviceCall start_messages(const PyMessageStager& self, const std::vector<MessageRow>& sends,
                            const std::vector<MessageRow>& recvs, uint64_t stream, bool orders,
                            nb::handle keep, double timeout_s) {
  MessageLists lists;
  auto fill = [](const std::vector<MessageRow>& rows, std::vector<Message>& list) {
    for (const auto& [address, nbytes, peer, tag, type] : rows) {
      list.push_back({reinterpret_cast<void*>(address), nbytes, peer, tag, type, false});
    }
  };
  fill(sends, lists.sends);
  fill(recvs, lists.recvs);
  return started(self, keep, nb::none(), timeout_s, [&](void* const* kept) {
    return self.own().start(lists, stream, orders, kept, timeout_s);
  });
}

using CopyRow = std::tuple<int, size_t, size_t, size_t, size_t>;

std::vector<StagedCopy> copies_of(const std::vector<CopyRow>& rows) {
  std::vector<StagedCopy> copies;
  copies.reserve(rows.size());
  for (const auto& [array, at, stride, nbytes, pinned] : rows) {
    if (nbytes != 0) copies.push_back({array, at, stride, nbytes, pinned});
  }
  return copies;
}

// Makes a launch. `buffer` and `arrays` are numbers of the call's arrays.
StagedLaunch launch_of(int kind, int op, int dtype, int buffer, size_t buffer_nbytes,
                       const std::vector<int>& arrays, uint64_t table, size_t table_nbytes,
                       size_t terms_at, uint32_t num_boxes, uint64_t units) {
  if (arrays.size() > static_cast<size_t>(kMostLaunchArrays)) {
    throw nb::value_error(("StagedLaunch was given " + std::to_string(arrays.size()) +
                           " arrays; a launch takes at most " + std::to_string(kMostLaunchArrays) +
                           ": use several launches")
                              .c_str());
  }
  StagedLaunch made;
  made.launch.kind = static_cast<BoxKind>(kind);
  made.launch.op = static_cast<RedOp>(op);
  made.launch.dtype = static_cast<DType>(dtype);
  made.launch.buffer_nbytes = buffer_nbytes;
  made.launch.table = reinterpret_cast<const unsigned char*>(table);
  made.launch.table_nbytes = table_nbytes;
  made.launch.terms_at = terms_at;
  made.launch.num_boxes = num_boxes;
  made.launch.units = units;
  made.buffer = buffer;
  made.arrays = arrays;
  if (const char* why = why_no_launch(made.launch)) {
    throw nb::value_error(("StagedLaunch of reduction code " + std::to_string(op) +
                           " and dtype code " + std::to_string(dtype) + ": " + why)
                              .c_str());
  }
  return made;
}

}  // namespace

void bind_staging(nb::module_& m) {
  nb::class_<StagedLaunch>(m, "StagedLaunch", "A launch of boxes that is part of a call.")
      .def("__init__",
           [](StagedLaunch* self, int kind, int op, int dtype, int buffer, size_t buffer_nbytes,
              const std::vector<int>& arrays, uint64_t table, size_t table_nbytes,
              size_t terms_at, uint32_t num_boxes, uint64_t units) {
             new (self) StagedLaunch(launch_of(kind, op, dtype, buffer, buffer_nbytes, arrays,
                                               table, table_nbytes, terms_at, num_boxes, units));
           },
           nb::kw_only(), nb::arg("kind"), nb::arg("op"), nb::arg("dtype"), nb::arg("buffer"),
           nb::arg("buffer_nbytes"), nb::arg("arrays"), nb::arg("table"),
           nb::arg("table_nbytes"), nb::arg("terms_at"), nb::arg("num_boxes"), nb::arg("units"));

  nb::class_<StagedPart>(m, "StagedPart",
                         "Copies of a piece, and the plan that the host runs for it.")
      .def("__init__",
           [](StagedPart* self, PlanPtr runs, const std::vector<CopyRow>& in,
              const std::vector<CopyRow>& out, size_t out_at,
              std::optional<std::vector<size_t>> table, std::vector<StagedLaunch> packs,
              std::vector<StagedLaunch> unpacks) {
             const bool has_table = table.has_value();
             new (self) StagedPart{std::move(runs),  std::move(packs), std::move(unpacks),
                                   copies_of(in),    copies_of(out),   out_at,
                                   table ? *table : std::vector<size_t>{}, has_table};
           },
           nb::arg("runs"), nb::arg("copies_in"), nb::arg("copies_out"), nb::kw_only(),
           nb::arg("out_at") = 0, nb::arg("table") = nb::none(),
           nb::arg("packs") = std::vector<StagedLaunch>{},
           nb::arg("unpacks") = std::vector<StagedLaunch>{},
           "Rows are (array, offset there, stride there from piece to piece, bytes, offset in "
           "pinned memory); `table` are offsets of the host's arrays.");

  nb::class_<StagedPlan> staged_plan(m, "StagedPlan",
                                     "Plan of a call on device memory, by its pieces.");
  bind_words(staged_plan)
      .def_prop_ro("nbytes", &StagedPlan::memory_nbytes,
                   "Bytes of memory that it takes, with the plans that it runs on the host.")
      .def("agreeing",
           [](const StagedPlan& self, PlanPtr runs, std::vector<uint64_t> words,
              std::vector<std::string> names) {
             if (words.size() != names.size()) {
               throw nb::value_error(("agreeing() was given " + std::to_string(words.size()) +
                                      " words and " + std::to_string(names.size()) +
                                      " names: pass one name for each word")
                                         .c_str());
             }
             auto made = std::make_shared<StagedPlan>(self);
             made->agreement = std::make_shared<const StagedAgreement>(
                 StagedAgreement{std::move(runs), std::move(words), std::move(names)});
             return made;
           },
           nb::arg("runs"), nb::arg("words"), nb::arg("names"),
           "The same, with facts that the ranks compare on the way: a word for each, 0 for what "
           "this rank knows nothing of; `runs` is a maximum of twice as many.")
      .def_rw("by_kernel", &StagedPlan::by_kernel,
              "Whether kernels copy to pinned memory and back; set before a start.")
      .def_prop_ro("pieces", [](const StagedPlan& p) { return p.pieces; },
                   "Parts that are copied and combined one after the other.")
      .attr("backend") = "staged";
  m.def("staged_plan",
        [](std::vector<StagedPart> parts, int64_t pieces, size_t slot_nbytes,
           bool serial) {
          const size_t given = parts.size();
          if (pieces < 1 || given == 0 || (given > 2 && given != static_cast<size_t>(pieces))) {
            throw nb::value_error(("staged_plan() was given " + std::to_string(given) +
                                   " parts for " + std::to_string(pieces) + " pieces: pass one "
                                   "part for each piece, or one for all, or one for all but the "
                                   "last and one for the last")
                                      .c_str());
          }
          auto made = std::make_shared<StagedPlan>();
          made->parts = std::move(parts);
          made->pieces = pieces;
          made->slot_nbytes = (slot_nbytes + 63) / 64 * 64;
          made->serial = serial;
          return made;
        },
        nb::arg("parts"), nb::arg("pieces"), nb::arg("slot_nbytes"),
        nb::arg("serial") = false,
        "Make a plan of as many parts as pieces, or of the first ones and the last.");

  nb::class_<PyStager, PyDeviceWork> stager(m, "Stager",
                                            "A communicator's collectives on one device.");
  bind_staged_work(stager);
  stager
      .def("start", &start, nb::arg("plan"), nb::arg("data_in"), nb::arg("data_out"),
           nb::arg("stream"), nb::arg("orders"), nb::arg("keep_x").none(),
           nb::arg("keep_out").none(), nb::arg("timeout_s"),
           "Give the device and the engine all that there is to do.")
      .def("start_arrays", &start_arrays, nb::arg("plan"), nb::arg("addresses"),
           nb::arg("stream"), nb::arg("orders"), nb::arg("keep"), nb::arg("timeout_s"),
           "The same of any number of arrays.")
      .def("plant",
           [](const PyStager& self, const std::string& name) {
             self.own().planted.plant(name);
           }, nb::arg("name"), "Plant a bug, for tests.");

  nb::class_<PyMessageStager, PyDeviceWork> messages(m, "MessageStager",
                                                     "A communicator's messages on one device.");
  bind_staged_work(messages);
  messages
      .def("start", &start_messages, nb::arg("sends"), nb::arg("recvs"), nb::arg("stream"),
           nb::arg("orders"), nb::arg("keep"), nb::arg("timeout_s"),
           "Start messages, rows of (address, bytes, peer, tag), as one operation.")
      .def("plant",
           [](const PyMessageStager& self, const std::string& name) {
             self.own().planted.plant(name);
           }, nb::arg("name"), "Plant a bug, for tests.")
      .def_prop_ro("num_leaving",
                   [](const PyMessageStager& self) {
                     ReleasedGil release;
                     return self.own().num_leaving();
                   }, "Calls whose copy to the host is not seen.");

  m.def("planted_bugs", &PlantedBug<Planted>::names,
        "Names of the bugs that tests can plant in the staging of device memory.");
  m.def("planted_message_bugs", &PlantedBug<PlantedMessage>::names,
        "The same, of messages of device memory.");
}

}  // namespace commrt
