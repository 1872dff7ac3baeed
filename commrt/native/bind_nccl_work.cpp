// SPDX-License-Identifier: Apache-2.0
// Binds NCCL's operations on device memory (commrt/nccl_calls.py).
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "bind_device.hpp"
#include "device_error.hpp"
#include "group.hpp"
#include "nccl_work.hpp"
#include "staging.hpp"

namespace commrt {

namespace {

[[noreturn]] void raise_nccl(const NcclFailure& failure) {
  const char* type = failure.kind == "timeout"   ? "TimeoutError_"
                     : failure.kind == "revoked" ? "RevokedError"
                     : failure.kind == "peer"    ? "PeerFailedError"
                                                 : "BackendError";
  const nb::object cls = nb::module_::import_("commrt.errors").attr(type);
  PyErr_SetString(cls.ptr(), failure.what());
  throw nb::python_error();
}

// Runs without the GIL, and raises what the device or NCCL says.
template <class F>
auto guarded(F function) -> decltype(function()) {
  DeviceStatus status = DeviceStatus::Ok;
  std::string text;
  try {
    nb::gil_scoped_release release;
    return function();
  } catch (const DeviceFailure& failure) {
    status = failure.status;
    text = failure.what();
  } catch (const NcclFailure& failure) {
    raise_nccl(failure);
  }
  check_device(device_fails(status, text));
  return decltype(function())();
}

struct PyNcclWork {
  std::shared_ptr<NcclWork> work;
  std::shared_ptr<Engine> engine;
};

struct PyNcclCall {
  std::shared_ptr<NcclCall> call;
  std::shared_ptr<Engine> engine;
  NcclWork& work() const { return *call->work; }
  void see() const {
    if (!work().simulated()) return;
    nb::gil_scoped_release release;
    work().see();
  }
};

// How a wait ended: 0 done or failed, 1 out of time, 2 with a signal.
int synchronize(const PyNcclCall& self, double timeout_s) {
  constexpr double kSignalPeriod_s = 0.05;
  constexpr unsigned kLooks = 64;
  Engine& engine = *self.engine;
  NcclWork& work = self.work();
  const double start = now_s();
  const double deadline = start + timeout_s;
  Backoff backoff(2000);
  for (;;) {
    const bool ended = guarded([&] {
      const double next = now_s() + kSignalPeriod_s;
      for (unsigned look = 1;; ++look) {
        if (self.call->ended()) return true;
        if (engine.step()) {
          backoff.reset();
        } else {
          if (work.simulated()) work.ask_device(self.call);
          if (self.call->ended()) return true;
          if (engine.wants_python()) return false;
          work.pause(backoff);
        }
        if (look % kLooks == 0 && now_s() > std::min(next, deadline)) return false;
      }
    });
    if (ended) return 0;
    if (engine.wants_python() && !run_wanted(engine)) return 2;
    guarded([&] {
      work.ask_device(self.call);
      work.give_up_late(self.call, now_s() - start);
      return 0;
    });
    if (self.call->ended()) return 0;
    if (PyErr_CheckSignals() != 0) return 2;
    if (now_s() > deadline) return 1;
  }
}

PyNcclCall start_all(const PyNcclWork& self, const std::shared_ptr<const NcclPlan>& plan,
                     const std::vector<uint64_t>& addresses, uint64_t stream, bool orders,
                     nb::handle keep_x, nb::handle keep_out, double timeout_s) {
  std::vector<unsigned char*> arrays;
  for (const uint64_t address : addresses)
    arrays.push_back(reinterpret_cast<unsigned char*>(address));
  if (arrays.size() < 2) arrays.resize(2);
  PyNcclCall made{nullptr, self.engine};
  if (self.engine->has_ended()) drop_ended(*self.engine);
  void* kept[2] = {keep_x.is_none() ? nullptr : keep_x.inc_ref().ptr(),
                   keep_out.is_none() ? nullptr : keep_out.inc_ref().ptr()};
  try {
    made.call = guarded([&] {
      return self.work->start(plan, std::move(arrays), stream, orders, kept, timeout_s);
    });
  } catch (...) {
    // Where the device had begun with it, the arrays stay alive for ever.
    if (!self.work->failed()) {
      for (void* object : kept) Py_XDECREF(static_cast<PyObject*>(object));
    }
    throw;
  }
  return made;
}

PyNcclCall start(const PyNcclWork& self, const std::shared_ptr<const NcclPlan>& plan, uint64_t in,
                 uint64_t out, uint64_t stream, bool orders, nb::handle keep_x,
                 nb::handle keep_out, double timeout_s) {
  return start_all(self, plan, {in, out}, stream, orders, keep_x, keep_out, timeout_s);
}

PyNcclCall start_arrays(const PyNcclWork& self, const std::shared_ptr<const NcclPlan>& plan,
                        const std::vector<uint64_t>& addresses, uint64_t stream, bool orders,
                        nb::handle keep, double timeout_s) {
  return start_all(self, plan, addresses, stream, orders, keep, nb::none(), timeout_s);
}

using CopyRow = std::tuple<int, size_t, int, size_t, size_t>;
using MessageRow = std::tuple<bool, int, size_t, size_t, int>;

void make_phase(NcclPhase* self, const std::vector<MessageRow>& messages,
                const std::vector<CopyRow>& copies, std::vector<StagedLaunch> packs,
                std::vector<StagedLaunch> unpacks) {
  new (self) NcclPhase;
  const auto speaks_of = [self](int array) {
    if (array < 0) throw nb::value_error("no such array");
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
  nb::class_<NcclPlan>(m, "NcclPlan", "What a call by NCCL does.")
      .def("__init__",
           [](NcclPlan* self, const std::string& operation, int coll, bool is_barrier,
              bool is_counted, bool needs_copy, size_t count, std::vector<int64_t> send_counts,
              std::vector<int64_t> recv_counts, size_t itemsize, int dtype, int op, int root,
              nb::bytes factor, size_t in_nbytes, int64_t elements, int element_type,
              int reduction) {
             new (self) NcclPlan;
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
           },
           nb::arg("operation"), nb::kw_only(), nb::arg("coll"), nb::arg("is_barrier"),
           nb::arg("is_counted"), nb::arg("needs_copy"), nb::arg("count"), nb::arg("send_counts"),
           nb::arg("recv_counts"), nb::arg("itemsize"), nb::arg("dtype"), nb::arg("op"),
           nb::arg("root"), nb::arg("factor"), nb::arg("in_nbytes"), nb::arg("elements"),
           nb::arg("element_type"), nb::arg("reduction"));

  m.def("nccl_program_plan",
        [](const std::string& operation, std::shared_ptr<StreamProgram> program, int coll,
           size_t scratch_nbytes, size_t in_nbytes, size_t out_nbytes, bool in_place, int root,
           int64_t elements, int element_type, int reduction) {
          for (size_t i = kFirstPeerBase; i < program->extents.size(); ++i) {
            if (program->extents[i] != 0)
              throw nb::value_error("a program that reads what peers publish");
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
          return plan;
        },
        nb::arg("operation"), nb::arg("program"), nb::kw_only(), nb::arg("coll"),
        nb::arg("scratch_nbytes"), nb::arg("in_nbytes"), nb::arg("out_nbytes"),
        nb::arg("in_place"), nb::arg("root"), nb::arg("elements"), nb::arg("element_type"),
        nb::arg("reduction"), "A plan that runs a schedule's rounds.");

  nb::class_<NcclPhase>(m, "NcclPhase", "Messages among neighbours that move at the same time.")
      .def("__init__", &make_phase, nb::kw_only(), nb::arg("messages"), nb::arg("copies"),
           nb::arg("packs"), nb::arg("unpacks"),
           "Rows of (whether it leaves, array, offset, bytes, peer), and of (array, offset) from "
           "and to, and bytes.");
  m.def("nccl_phases_plan",
        [](const std::string& operation, std::vector<NcclPhase> phases, int coll,
           size_t in_nbytes, size_t out_nbytes, int64_t elements, int element_type,
           int reduction) {
          auto plan = std::make_shared<NcclPlan>();
          plan->operation = operation;
          plan->phases = std::move(phases);
          plan->code = coll;
          plan->in_nbytes = in_nbytes;
          plan->out_nbytes = out_nbytes;
          plan->elements = elements;
          plan->element_type = element_type;
          plan->reduction = reduction;
          return plan;
        },
        nb::arg("operation"), nb::arg("phases"), nb::kw_only(), nb::arg("coll"),
        nb::arg("in_nbytes") = 0, nb::arg("out_nbytes") = 0, nb::arg("elements") = 0,
        nb::arg("element_type") = 0, nb::arg("reduction") = 0,
        "A plan of messages among neighbours, one phase behind the other.");

  nb::class_<PyNcclCall>(m, "NcclCall", "One started call by NCCL.")
      .def("wait_on",
           [](const PyNcclCall& self, uint64_t stream) {
             guarded([&] {
               self.work().wait_on(*self.call, stream);
               return 0;
             });
           }, nb::arg("stream"), "Let a stream wait for the end.")
      .def("synchronize",
           [](const PyNcclCall& self, double timeout_s) {
             const int how = synchronize(self, timeout_s);
             if (how == 2) throw nb::python_error();
             self.see();
             drop_ended(*self.engine);
             return how == 0;
           }, nb::arg("timeout_s"), "Block the host until the end; False where time ran out.")
      .def("test",
           [](const PyNcclCall& self) {
             if (!self.call->ended()) {
               guarded([&] {
                 if (!self.engine->step()) self.work().ask_device(self.call);
                 return 0;
               });
             }
             if (self.engine->has_ended()) drop_ended(*self.engine);
             if (!self.call->ended()) return false;
             self.see();
             return true;
           }, "Look at it; whether it has ended.")
      .def_prop_ro("ended", [](const PyNcclCall& self) {
        if (!self.call->ended()) return false;
        self.see();
        return true;
      }, "Whether it has ended, without a look.")
      .def_prop_ro("failure", [](const PyNcclCall& self) -> nb::object {
        if (!self.call->failed()) return nb::none();
        return nb::make_tuple(self.call->kind, self.call->error);
      }, "(kind, text) of what went wrong; None where nothing did.")
      .def_prop_ro("is_captured", [](const PyNcclCall& self) { return self.call->capture != 0; },
                   "Whether it was recorded in a graph, and runs as that is launched.")
      .def_prop_ro("seq", [](const PyNcclCall& self) { return self.call->seq; },
                   "Sequence number on the communicator.");

  nb::class_<NcclOrder>(m, "NcclOrder", "The order of NCCL's work on a device.")
      .def("__init__",
           [](NcclOrder* self, const PyDevice& device, uint32_t first_value) {
             guarded([&] {
               new (self) NcclOrder(device.device, device.keeps, first_value);
               return 0;
             });
           }, nb::arg("device"), nb::arg("first_value") = 0)
      .def("sweep", [](NcclOrder& self) { return self.sweep(); },
           nb::call_guard<nb::gil_scoped_release>(),
           "Go on with ending communicators; how many are left.")
      .def("close", [](NcclOrder& self, double timeout_s) { self.close(timeout_s); },
           nb::arg("abort_timeout_s"), nb::call_guard<nb::gil_scoped_release>(),
           "Abort those that are left, and give everything back.")
      .def_prop_ro("num_events", [](NcclOrder& self) { return self.num_events(); },
                   "Events that wait for the next call.");

  nb::class_<PyNcclWork>(m, "NcclWork", "A communicator's operations by NCCL.")
      .def("__init__",
           [](PyNcclWork* self, Group& group, std::shared_ptr<NcclOrder> order,
              std::shared_ptr<NcclComm> comm) {
             auto made = std::make_shared<NcclWork>(*group.comm, *group.engine, std::move(order),
                                                    std::move(comm));
             group.engine->watch(made);
             group.watched.push_back(made);
             new (self) PyNcclWork{std::move(made), group.engine};
           }, nb::arg("group"), nb::arg("order"), nb::arg("comm"))
      .def("start", &start, nb::arg("plan"), nb::arg("data_in"), nb::arg("data_out"),
           nb::arg("stream"), nb::arg("orders"), nb::arg("keep_x").none(),
           nb::arg("keep_out").none(), nb::arg("timeout_s"),
           "Give the device all that there is to do.")
      .def("start_arrays", &start_arrays, nb::arg("plan"), nb::arg("addresses"),
           nb::arg("stream"), nb::arg("orders"), nb::arg("keep"), nb::arg("timeout_s"),
           "The same of any number of arrays.")
      .def("give_up",
           [](const PyNcclWork& self, const std::string& why) {
             nb::gil_scoped_release release;
             self.work->give_up("revoked", why);
           }, nb::arg("why"), "Fail what is under way, and let its streams go.")
      .def("close", [](const PyNcclWork& self) { self.work->close(); },
           nb::call_guard<nb::gil_scoped_release>(),
           "Leave the NCCL communicator to be ended, where nothing is under way.")
      .def("plant",
           [](const PyNcclWork& self, const std::string& name) {
             for (int i = 0; i < kNumNcclPlanted; ++i) {
               if (name == kNcclPlantedNames[i]) {
                 self.work->planted = static_cast<NcclPlanted>(i);
                 return;
               }
             }
             throw nb::value_error(("no bug is called " + name).c_str());
           }, nb::arg("name"), "Plant a bug, for tests.")
      .def_prop_ro("outstanding", [](const PyNcclWork& self) { return self.work->outstanding(); },
                   "Calls whose end the host has not seen.")
      .def_prop_ro("comm_pointer", [](const PyNcclWork& self) { return self.work->comm_pointer(); },
                   "The ncclComm_t, for tests.")
      .def_prop_ro("failed", [](const PyNcclWork& self) { return self.work->failed(); },
                   "Whether something failed, so that nothing more is taken.");
  m.def("planted_nccl_bugs", [] {
    return std::vector<std::string>(kNcclPlantedNames + 1, kNcclPlantedNames + kNumNcclPlanted);
  }, "Names of the bugs that tests can plant in calls by NCCL.");
}

}  // namespace commrt
