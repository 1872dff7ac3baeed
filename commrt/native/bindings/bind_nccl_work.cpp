// SPDX-License-Identifier: Apache-2.0
// Binds NCCL's operations on device memory (backends/nccl/attached.py).
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.hpp"
#include "bindings/stand_in_words.hpp"
#include "calls/device_call.hpp"
#include "gil.hpp"
#include "library_calls/nccl_work.hpp"

namespace commrt {

namespace {

using PyNcclWork = PyWork<NcclWork>;

PyDeviceCall start(const PyNcclWork& self, const std::shared_ptr<const NcclPlan>& plan, uint64_t in,
                   uint64_t out, uint64_t stream, bool orders, nb::handle keep_x,
                   nb::handle keep_out, double timeout_s) {
  return started(self, keep_x, keep_out, timeout_s, [&](void* const* kept) {
    return self.own().start(plan, {as_memory(in), as_memory(out)}, stream, orders, kept,
                            timeout_s);
  });
}

PyDeviceCall start_arrays(const PyNcclWork& self, const std::shared_ptr<const NcclPlan>& plan,
                          const std::vector<uint64_t>& addresses, uint64_t stream, bool orders,
                          nb::handle keep, double timeout_s) {
  std::vector<unsigned char*> arrays = as_memory(addresses);
  if (arrays.size() < 2) arrays.resize(2);
  return started(self, keep, nb::none(), timeout_s, [&](void* const* kept) {
    return self.own().start(plan, std::move(arrays), stream, orders, kept, timeout_s);
  });
}

using CopyRow = std::tuple<int, size_t, int, size_t, size_t>;
using MessageRow = std::tuple<bool, int, size_t, size_t, int>;

void make_phase(NcclPhase* self, const std::vector<MessageRow>& messages,
                const std::vector<CopyRow>& copies, std::vector<StagedLaunch> packs,
                std::vector<StagedLaunch> unpacks) {
  new (self) NcclPhase;
  const auto speaks_of = [self](int array) {
    if (array < 0) {
      throw nb::value_error(("array number " + std::to_string(array) +
                             " is negative: the arrays of a call count from 0")
                                .c_str());
    }
    self->num_arrays = std::max(self->num_arrays, array + 1);
    return array;
  };
  for (const auto& [is_send, array, at, nbytes, peer] : messages)
    self->messages.push_back({is_send, speaks_of(array), at, nbytes, peer});
  for (const auto& [from, from_at, to, to_at, nbytes] : copies)
    self->copies.push_back({speaks_of(from), from_at, speaks_of(to), to_at, nbytes});
  for (const auto* list : {&packs, &unpacks}) {
    for (const StagedLaunch& one : *list) {
      speaks_of(one.buffer);
      for (const int array : one.arrays) speaks_of(array);
    }
  }
  self->packs = std::move(packs);
  self->unpacks = std::move(unpacks);
}

}  // namespace

void bind_nccl_work(nb::module_& m) {
  nb::class_<NcclPlan> nccl_plan(m, "NcclPlan", "Plan of a call by NCCL.");
  bind_words(nccl_plan)
      .def_prop_ro("nbytes", &NcclPlan::memory_nbytes, "Bytes of memory that it takes.")
      .attr("backend") = "nccl";
  m.def("nccl_plan",
        [](const std::string& operation, int coll, bool is_barrier, bool is_counted,
           bool needs_copy, size_t count, std::vector<int64_t> send_counts,
           std::vector<int64_t> recv_counts, size_t itemsize, int dtype, int op,
           int root, nb::bytes factor, size_t in_nbytes, int64_t elements,
           int element_type, int reduction, int facts, uint64_t length) {
          auto self = std::make_shared<NcclPlan>();
          self->operation = operation;
          self->coll = static_cast<NcclColl>(coll);
          self->code = coll;
          self->is_barrier = is_barrier;
          self->is_counted = is_counted;
          self->needs_copy = needs_copy;
          self->count = count;
          self->send_counts = std::move(send_counts);
          self->recv_counts = std::move(recv_counts);
          self->itemsize = itemsize;
          self->dtype = dtype;
          self->op = op;
          self->root = root;
          self->factor.assign(factor.c_str(), factor.size());
          // A factor is read as its type, of at most 8 bytes.
          if (!self->factor.empty()) self->factor.resize(8);
          self->in_nbytes = in_nbytes;
          self->elements = elements;
          self->element_type = element_type;
          self->reduction = reduction;
          self->facts = facts;
          self->length = length;
          return self;
        },
        nb::arg("operation"), nb::kw_only(), nb::arg("coll"), nb::arg("is_barrier"),
        nb::arg("is_counted"), nb::arg("needs_copy"), nb::arg("count"), nb::arg("send_counts"),
        nb::arg("recv_counts"), nb::arg("itemsize"), nb::arg("dtype"), nb::arg("op"),
        nb::arg("root"), nb::arg("factor"), nb::arg("in_nbytes"), nb::arg("elements"),
        nb::arg("element_type"), nb::arg("reduction"), nb::arg("facts"), nb::arg("length"),
        "Make the plan of a call by NCCL.");

  m.def("nccl_program_plan",
        [](const std::string& operation, std::shared_ptr<StreamProgram> program, int coll,
           size_t scratch_nbytes, size_t in_nbytes, size_t out_nbytes, bool in_place, int root,
           int64_t elements, int element_type, int reduction, int facts, uint64_t length) {
          for (size_t i = kFirstPeerBase; i < program->extents.size(); ++i) {
            if (program->extents[i] != 0)
              throw nb::value_error(
                  "nccl_program_plan() was given a program that reads what peers publish, which "
                  "NCCL cannot run: pass a program of messages");
          }
          auto plan = std::make_shared<NcclPlan>();
          plan->operation = operation;
          plan->program = std::move(program);
          plan->code = coll;
          plan->scratch_nbytes = scratch_nbytes;
          plan->in_nbytes = in_nbytes;
          plan->out_nbytes = out_nbytes;
          plan->in_place = in_place;
          plan->root = root;
          plan->elements = elements;
          plan->element_type = element_type;
          plan->reduction = reduction;
          plan->facts = facts;
          plan->length = length;
          return plan;
        },
        nb::arg("operation"), nb::arg("program"), nb::kw_only(), nb::arg("coll"),
        nb::arg("scratch_nbytes"), nb::arg("in_nbytes"), nb::arg("out_nbytes"),
        nb::arg("in_place"), nb::arg("root"), nb::arg("elements"), nb::arg("element_type"),
        nb::arg("reduction"), nb::arg("facts"), nb::arg("length"),
        "A plan that runs a schedule's rounds.");

  nb::class_<NcclPhase>(m, "NcclPhase", "Messages among neighbours that move at the same time.")
      .def("__init__", &make_phase, nb::kw_only(), nb::arg("messages"), nb::arg("copies"),
           nb::arg("packs"), nb::arg("unpacks"),
           "Rows of (whether it leaves, array, offset, bytes, peer), and of (array, offset) from "
           "and to, and bytes.");
  m.def("nccl_phases_plan",
        [](const std::string& operation, std::vector<NcclPhase> phases, int coll,
           size_t in_nbytes, size_t out_nbytes, int64_t elements, int element_type,
           int reduction, int facts) {
          auto plan = std::make_shared<NcclPlan>();
          plan->operation = operation;
          plan->phases = std::move(phases);
          plan->code = coll;
          plan->in_nbytes = in_nbytes;
          plan->out_nbytes = out_nbytes;
          plan->elements = elements;
          plan->element_type = element_type;
          plan->reduction = reduction;
          plan->facts = facts;
          return plan;
        },
        nb::arg("operation"), nb::arg("phases"), nb::kw_only(), nb::arg("coll"),
        nb::arg("in_nbytes") = 0, nb::arg("out_nbytes") = 0, nb::arg("elements") = 0,
        nb::arg("element_type") = 0, nb::arg("reduction") = 0, nb::arg("facts") = 0,
        "A plan of messages among neighbours, one phase behind the other.");

  nb::class_<NcclOrder>(m, "NcclOrder", "The order of NCCL's work on a device.")
      .def("sweep", [](NcclOrder& self) { return self.sweep(); },
           nb::call_guard<ReleasedGil>(),
           "Go on with ending communicators; how many are left.")
      .def("close", [](NcclOrder& self, double timeout_s) { self.close(timeout_s); },
           nb::arg("abort_timeout_s"), nb::call_guard<ReleasedGil>(),
           "Abort those that are left, and give everything back.")
      .def_prop_ro("num_events", [](NcclOrder& self) { return self.events.size(); },
                   "Events that wait for the next call.");
  m.def("make_nccl_order",
        [](const PyDevice& device, uint32_t first_value) {
          return guarded([&] {
            return std::make_shared<NcclOrder>(device.device, device.keeps, first_value);
          });
        },
        nb::arg("device"), nb::arg("first_value") = 0, "Make the order of NCCL's work on a device.");

  nb::class_<PyNcclWork, PyDeviceWork>(m, "NcclWork", "A communicator's operations by NCCL.")
      .def("__init__",
           [](PyNcclWork* self, Group& group, std::shared_ptr<NcclOrder> order,
              std::shared_ptr<NcclComm> comm) {
             make_work(self, group, [&] {
               return std::make_shared<NcclWork>(*group.comm, *group.engine, std::move(order),
                                                 std::move(comm));
             });
           }, nb::arg("group"), nb::arg("order"), nb::arg("comm"))
      .def("start", &start, nb::arg("plan"), nb::arg("data_in"), nb::arg("data_out"),
           nb::arg("stream"), nb::arg("orders"), nb::arg("keep_x").none(),
           nb::arg("keep_out").none(), nb::arg("timeout_s"),
           "Give the device all that there is to do.")
      .def("start_arrays", &start_arrays, nb::arg("plan"), nb::arg("addresses"),
           nb::arg("stream"), nb::arg("orders"), nb::arg("keep"), nb::arg("timeout_s"),
           "The same of any number of arrays.")
      .def("plant",
           [](const PyNcclWork& self, const std::string& name) {
             self.own().planted.plant(name);
           }, nb::arg("name"), "Plant a bug, for tests.")
      .def_prop_ro("comm_pointer", [](const PyNcclWork& self) { return self.own().comm_pointer(); },
                   "The ncclComm_t, for tests.");
  m.def("planted_nccl_bugs", &PlantedBug<NcclPlanted>::names,
        "Names of the bugs that tests can plant in calls by NCCL.");
}

}  // namespace commrt
