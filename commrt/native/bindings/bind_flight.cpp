// SPDX-License-Identifier: Apache-2.0
// Binds what ranks do, and the files of their last operations.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cerrno>
#include <cstring>
#include <mutex>

#include "bindings/bindings.hpp"
#include "calls/group.hpp"
#include "engine/addresses.hpp"
#include "engine/bell.hpp"
#include "engine/engine.hpp"
#include "engine/flight_files.hpp"
#include "engine/rank_states.hpp"
#include "engine/told_afar.hpp"
#include "gil.hpp"

namespace commrt {

namespace {

nb::object describe(const ToldWait& wait) {
  return nb::make_tuple(wait.code == kNoCode ? "" : name_of_operation(wait.code), wait.seq, wait.on,
                        wait.peer, wait.for_s);
}

}  // namespace

nb::object described(const RankState& state) {
  return nb::make_tuple(state.rank, word_for(state.does), state.started,
                        state.started != 0 ? name_of_operation(state.code) : "", state.age_s,
                        state.waits ? describe(state.wait) : nb::none());
}

void bind_flight(nb::module_& m) {
  nb::class_<ToldByTag>(m, "ToldByTag", "A rank's words on itself for ranks of other nodes.")
      .def(nb::init<int, int>(), nb::arg("rank"), nb::arg("size"))
      .def("watch", &ToldByTag::watch, nb::arg("liveness"),
           "Ask the kernel about other ranks of the node.")
      .def("answer",
           [](const ToldByTag& told, int tag, int about) -> nb::object {
             const auto state = told.answer(tag, about);
             return state ? described(*state) : nb::object(nb::tuple());
           }, nb::arg("tag"), nb::arg("about"),
           "Return what a rank of this node does on a communicator, as rank_states does; empty: "
           "no such communicator.");
  m.def("rank_states",
        [](const Group& group) {
          nb::list found;
          const std::lock_guard<std::mutex> lock(group.engine->mutex);
          for (int rank = 0; rank < group.comm->size; ++rank) {
            found.append(described(group.comm->state_of(rank)));
          }
          return found;
        }, nb::arg("group"),
        "For each rank: (rank, what it does, collectives that it has started, the latest of them, its "
        "age in s, what it waits for). The last one is None, or (operation, number, communicator, "
        "peer, s). Of ranks of other nodes only the first two are known.");
  m.def("describe_flight",
        [](Group& group, uint64_t world, uint64_t id, const std::string& key,
           const std::string& members) { group.comm->flight.describe(world, id, key, members); },
        nb::arg("group"), nb::arg("world"), nb::arg("id"), nb::arg("key"), nb::arg("members"),
        "Say how files of last operations call a group, and its ranks in the world of this number.");
  m.def("write_flight",
        [](Engine& engine, uint64_t world, const std::string& path, const std::string& facts,
           const std::string& reason, const std::string& message) {
          if (flight::write({world, path, facts}, &engine, reason.c_str(), message.c_str())) return;
          const int why = errno;
          PyErr_SetObject(PyExc_OSError,
                          nb::make_tuple(why, std::strerror(why), path).ptr());
          throw nb::python_error();
        }, nb::arg("engine"), nb::arg("world"), nb::arg("path"), nb::arg("facts"), nb::arg("reason"),
        nb::arg("message"),
        "Write the last operations of a world's groups; `facts` are fields of its JSON. OSError "
        "where that cannot be done.");
  m.def("keep_flight",
        [](uint64_t world, const std::string& path, const std::string& facts) {
          flight::keep({world, path, facts});
        }, nb::arg("world"), nb::arg("path"), nb::arg("facts"),
        "Write such a file when a signal comes, too (write_flight_at_signals).");
  m.def("forget_flight", &flight::forget, nb::arg("world"), "Do not, any more.");
  m.def("write_flight_when_asked",
        [](std::shared_ptr<Bells> bells) { flight::write_when_asked(std::move(bells)); },
        nb::arg("bells").none(),
        "Write kept files when another rank of the job asks for it: of the node by the bells, if "
        "there are any, or of another node.");
  m.def("ask_for_flights",
        [](Bells& bells, const std::vector<int>& members, uint32_t by, double limit_s) {
          for (const int member : members) bells.ask_beside(member, by);
          const double deadline = now_s() + limit_s;
          for (const int member : members) bells.is_answered(member, deadline - now_s());
        }, nb::arg("bells"), nb::arg("members"), nb::arg("by"), nb::arg("limit_s"),
        nb::call_guard<ReleasedGil>(),
        "Ask other ranks of the node to write kept files, and wait until they have, at most so long.");
  m.def("own_addresses", &own_addresses,
        "Return the addresses at which other machines may reach this one.");
  m.def("ask_flight_here", &flight::ask_here, nb::arg("by"), nb::call_guard<ReleasedGil>(),
        "Have a thread of this process write kept files, as another rank of the job asks.");
  m.def("finish_flights", &flight::finish, nb::call_guard<ReleasedGil>(),
        "Wait until no file is half written, at most for a moment.");
  m.def("write_flight_at_signals", &flight::write_at_signals,
        "Write kept files at SIGTERM, SIGUSR1 and crashes, where nobody else handles these.");
}

}  // namespace commrt
