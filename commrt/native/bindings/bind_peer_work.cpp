// SPDX-License-Identifier: Apache-2.0
// Binds operations over memory of peers (backends/ipc/attached.py).
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.hpp"
#include "bindings/stand_in_words.hpp"
#include "calls/device_call.hpp"
#include "gil.hpp"
#include "peer_memory/peer_work.hpp"

namespace commrt {

namespace {

using PyPeerWork = PyWork<PeerWork>;

PyDeviceCall start(const PyPeerWork& self, const std::shared_ptr<const PeerPlan>& plan, uint64_t in,
                   uint64_t out, uint64_t stream, bool orders, nb::handle keep_x,
                   nb::handle keep_out, double timeout_s) {
  const StreamProgram& program = *plan->program;
  const PeerExchange& exchange = self.own().exchange();
  if (program.size != exchange.size)
    throw std::invalid_argument("the program is for " + std::to_string(program.size) +
                                " ranks, and the exchange memory for " +
                                std::to_string(exchange.size) +
                                ": make the program for the ranks of the exchange");
  for (std::size_t i = kFirstPeerBase; i < program.extents.size(); ++i)
    if (program.extents[i] > exchange.half_nbytes)
      throw std::invalid_argument(
          "the program publishes " + std::to_string(program.extents[i]) + " bytes in a part, and " +
          "half of the exchange memory has " + std::to_string(exchange.half_nbytes) +
          ": make the exchange memory larger, or the parts shorter");
  return started(self, keep_x, keep_out, timeout_s, [&](void* const* kept) {
    return self.own().start(plan, as_memory(in), as_memory(out), stream, orders, kept, timeout_s);
  });
}

std::shared_ptr<PeerExchange> make_exchange(const PyDevice& device, int rank,
                                            const std::vector<uint64_t>& memory,
                                            std::size_t half_nbytes) {
  if (rank < 0 || rank >= static_cast<int>(memory.size()))
    throw nb::value_error(("rank " + std::to_string(rank) + " has no exchange memory: there is " +
                           "memory for " + std::to_string(memory.size()) +
                           " ranks, which count from 0")
                              .c_str());
  std::vector<unsigned char*> places = as_memory(memory);
  DeviceStatus status = DeviceStatus::Ok;
  std::shared_ptr<PeerExchange> made;
  {
    ReleasedGil release;
    made = std::make_shared<PeerExchange>(device.device, device.keeps, rank, std::move(places),
                                          half_nbytes, &status);
  }
  check_device(status);
  return made;
}

}  // namespace

void bind_peer_work(nb::module_& m) {
  nb::class_<PeerExchange>(m, "PeerExchange", "Exchange memory that peers have opened.")
      .def_ro("half_nbytes", &PeerExchange::half_nbytes)
      .def("end",
           [](PeerExchange& self) {
             DeviceStatus status;
             {
               ReleasedGil release;
               status = self.end();
             }
             check_device(status);
           }, "Give streams and events back; nothing was ever given to them.")
      .def("count_from", &PeerExchange::count_from, nb::arg("value"),
           "Begin with flags that hold this value.");
  m.def("peer_exchange_flags_nbytes", &PeerExchange::flags_nbytes, nb::arg("size"),
        "Bytes of flags that exchange memory begins with.");
  m.def("make_peer_exchange", &make_exchange, nb::arg("device"), nb::arg("rank"),
        nb::arg("memory"), nb::arg("half_nbytes"),
        "One rank's exchange; `memory` is where each rank's is mapped here.");

  m.def("book_store",
        [](uint64_t line, uint32_t value) {
          __atomic_store_n(reinterpret_cast<uint32_t*>(line), value, __ATOMIC_RELEASE);
        }, nb::arg("line"), nb::arg("value"),
        "Write a word of memory that ranks share, after all this thread did before.");
  m.def("book_load",
        [](uint64_t line) {
          return __atomic_load_n(reinterpret_cast<const uint32_t*>(line), __ATOMIC_ACQUIRE);
        }, nb::arg("line"), "Return it; what its writer did before has been done then.");

  nb::class_<PeerPlan> peer_plan(m, "PeerPlan", "Plan of a call over memory of peers.");
  bind_words(peer_plan)
      .def_prop_ro("nbytes", &PeerPlan::memory_nbytes, "Bytes of memory that it takes.")
      .attr("backend") = "ipc";
  m.def("peer_plan",
        [](std::shared_ptr<StreamProgram> program, size_t scratch_nbytes,
           size_t in_nbytes, size_t out_nbytes, bool in_place, int coll, int root,
           int64_t elements, int element_type, int reduction, int facts, uint64_t length) {
          auto self = std::make_shared<PeerPlan>();
          self->program = std::move(program);
          self->scratch_nbytes = scratch_nbytes;
          self->in_nbytes = in_nbytes;
          self->out_nbytes = out_nbytes;
          self->in_place = in_place;
          self->code = coll;
          self->root = root;
          self->elements = elements;
          self->element_type = element_type;
          self->reduction = reduction;
          self->facts = facts;
          self->length = length;
          return self;
        },
        nb::arg("program"), nb::kw_only(), nb::arg("scratch_nbytes"), nb::arg("in_nbytes"),
        nb::arg("out_nbytes"), nb::arg("in_place"), nb::arg("coll"), nb::arg("root"),
        nb::arg("elements"), nb::arg("element_type"), nb::arg("reduction"), nb::arg("facts"),
        nb::arg("length"),
        "Make the plan of a call over memory of peers.");

  nb::class_<PyPeerWork, PyDeviceWork>(m, "PeerWork",
                                       "A communicator's operations over memory of peers.")
      .def("__init__",
           [](PyPeerWork* self, Group& group, std::shared_ptr<PeerExchange> exchange,
              uint32_t first_value) {
             make_work(self, group, [&] {
               return std::make_shared<PeerWork>(*group.comm, *group.engine, std::move(exchange),
                                                 first_value);
             });
           }, nb::arg("group"), nb::arg("exchange"), nb::arg("first_value") = 0)
      .def("start", &start, nb::arg("plan"), nb::arg("data_in"), nb::arg("data_out"),
           nb::arg("stream"), nb::arg("orders"), nb::arg("keep_x").none(),
           nb::arg("keep_out").none(), nb::arg("timeout_s"),
           "Give the device all that there is to do.")
      .def("has_run",
           [](const PyPeerWork& self) {
             return guarded([&] { return self.own().has_run(); });
           }, "Whether all that the device was given has run; after close().")
      .def("end",
           [](const PyPeerWork& self) {
             guarded([&] {
               self.own().end();
               return 0;
             });
           }, "Give back what the device has of this, but for the exchange memory.")
      .def("plant",
           [](const PyPeerWork& self, const std::string& name) {
             self.own().exchange().planted.plant(name);
           }, nb::arg("name"), "Plant a bug, for tests.");
  m.def("planted_peer_bugs", &PlantedBug<PlantedInExchange>::names,
        "Names of the bugs that tests can plant in calls over memory of peers.");
}

}  // namespace commrt
