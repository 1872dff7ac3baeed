// SPDX-License-Identifier: Apache-2.0
// Binds the staging of device memory (commrt/staging.py).
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>

#include "bind_device.hpp"
#include "device_error.hpp"
#include "group.hpp"
#include "staging.hpp"

namespace commrt {

namespace {

// Runs without the GIL, and raises what the device says.
template <class F>
auto guarded(F function) {
  DeviceStatus status = DeviceStatus::Ok;
  std::string text;
  {
    nb::gil_scoped_release release;
    try {
      return function();
    } catch (const DeviceFailure& failure) {
      status = failure.status;
      text = failure.what();
    }
  }
  check_device(device_fails(status, text));
  return decltype(function())();
}

struct PyStager {
  std::shared_ptr<Stager> stager;
  std::shared_ptr<Engine> engine;
};

struct PyStagedCall {
  std::shared_ptr<StagedCall> call;
  std::shared_ptr<Engine> engine;
  Stager& stager() const { return *call->stager; }
};

// How a wait ended: 0 done or failed, 1 out of time, 2 with a signal.
int synchronize(const PyStagedCall& self, double timeout_s) {
  constexpr double kSignalPeriod_s = 0.05;
  constexpr unsigned kLooks = 64;
  Engine& engine = *self.engine;
  Stager& stager = self.stager();
  const double deadline = now_s() + timeout_s;
  Backoff backoff(2000);
  for (;;) {
    const bool ended = guarded([&] {
      const double next = now_s() + kSignalPeriod_s;
      for (unsigned look = 1;; ++look) {
        if (self.call->ended()) return true;
        if (engine.step()) {
          backoff.reset();
        } else {
          if (stager.simulated() || look % (kLooks * 64) == 0) stager.ask_device(self.call);
          if (self.call->ended()) return true;
          if (engine.wants_python()) return false;
          stager.pause(backoff);
        }
        if (look % kLooks == 0 && now_s() > std::min(next, deadline)) return false;
      }
    });
    if (ended) return 0;
    if (engine.wants_python() && !run_wanted(engine)) return 2;
    guarded([&] {
      stager.ask_device(self.call);
      return 0;
    });
    if (self.call->ended()) return 0;
    if (PyErr_CheckSignals() != 0) return 2;
    if (now_s() > deadline) return 1;
  }
}

PyStagedCall start(const PyStager& self, const std::shared_ptr<const StagedPlan>& plan,
                   uint64_t in, uint64_t out, uint64_t stream, bool orders, nb::handle keep_x,
                   nb::handle keep_out, double timeout_s) {
  PyStagedCall made{nullptr, self.engine};
  if (self.engine->has_ended()) drop_ended(*self.engine);
  void* kept[2] = {keep_x.is_none() ? nullptr : keep_x.inc_ref().ptr(),
                   keep_out.is_none() ? nullptr : keep_out.inc_ref().ptr()};
  try {
    made.call = guarded([&] {
      return self.stager->start(plan, reinterpret_cast<const unsigned char*>(in),
                                reinterpret_cast<unsigned char*>(out), stream, orders, kept,
                                timeout_s);
    });
  } catch (...) {
    // Where the device had begun with it, the arrays stay alive for ever.
    if (!self.stager->failed()) {
      for (void* object : kept) Py_XDECREF(static_cast<PyObject*>(object));
    }
    throw;
  }
  return made;
}

}  // namespace

void bind_staging(nb::module_& m) {
  nb::class_<StagedPlan>(m, "StagedPlan", "What a call on device memory does, by its pieces.")
      .def("__init__",
           [](StagedPlan* self, PlanPtr piece, PlanPtr last, int64_t pieces, size_t in_nbytes,
              size_t out_nbytes, size_t last_in_nbytes, size_t last_out_nbytes, bool shared) {
             new (self) StagedPlan{std::move(piece), std::move(last), pieces,         in_nbytes,
                                   out_nbytes,       last_in_nbytes,  last_out_nbytes, shared};
           },
           nb::arg("piece"), nb::arg("last"), nb::arg("pieces"), nb::arg("in_nbytes"),
           nb::arg("out_nbytes"), nb::arg("last_in_nbytes"), nb::arg("last_out_nbytes"),
           nb::arg("shared"))
      .def_prop_ro("pieces", [](const StagedPlan& p) { return p.pieces; },
                   "Parts that are copied and combined one after the other.");

  nb::class_<PyStagedCall>(m, "StagedCall", "One started call on device memory.")
      .def("wait_on",
           [](const PyStagedCall& self, uint64_t stream) {
             guarded([&] {
               self.stager().refuse_capture(stream);
               self.stager().wait_on(self.call, stream);
               return 0;
             });
           }, nb::arg("stream"), "Let a stream wait for the end.")
      .def("synchronize",
           [](const PyStagedCall& self, double timeout_s) {
             const int how = synchronize(self, timeout_s);
             if (how == 2) throw nb::python_error();
             drop_ended(*self.engine);
             return how == 0;
           }, nb::arg("timeout_s"), "Block the host until the end; False where time ran out.")
      .def("test",
           [](const PyStagedCall& self) {
             if (!self.call->ended()) {
               guarded([&] {
                 if (!self.engine->step()) self.stager().ask_device(self.call);
                 return 0;
               });
             }
             if (self.engine->has_ended()) drop_ended(*self.engine);
             return self.call->ended();
           }, "Run a little progress; whether it has ended.")
      .def_prop_ro("ended", [](const PyStagedCall& self) { return self.call->ended(); },
                   "Whether it has ended, without progress.")
      .def_prop_ro("failure", [](const PyStagedCall& self) -> nb::object {
        if (!self.call->failed()) return nb::none();
        return nb::make_tuple(self.call->kind, self.call->error);
      }, "(kind, text) of what went wrong; None where nothing did.")
      .def_prop_ro("seq", [](const PyStagedCall& self) { return self.call->seq; },
                   "Sequence number of its first piece.");

  nb::class_<PyStager>(m, "Stager", "A communicator's work on one device.")
      .def("__init__",
           [](PyStager* self, Group& group, const PyDevice& device, int slots,
              size_t first_nbytes, size_t most_nbytes, uint32_t first_value) {
             const StagerOptions options{slots, first_nbytes, most_nbytes, first_value};
             Device* const native = device.device;
             const std::shared_ptr<void> keeps = device.keeps;
             auto made = guarded([&] {
               return std::make_shared<Stager>(*group.comm, *group.engine, native, keeps,
                                               options);
             });
             group.engine->add_stager(made);
             group.stagers.push_back(made);
             new (self) PyStager{std::move(made), group.engine};
           },
           nb::arg("group"), nb::arg("device"), nb::arg("slots"), nb::arg("first_nbytes"),
           nb::arg("most_nbytes"), nb::arg("first_value") = 0)
      .def("start", &start, nb::arg("plan"), nb::arg("data_in"), nb::arg("data_out"),
           nb::arg("stream"), nb::arg("orders"), nb::arg("keep_x").none(),
           nb::arg("keep_out").none(), nb::arg("timeout_s"),
           "Give the device and the engine all that there is to do.")
      .def("give_up",
           [](const PyStager& self, const std::string& why) {
             nb::gil_scoped_release release;
             self.stager->give_up("revoked", why);
           }, nb::arg("why"), "Fail what is under way, and let its streams go.")
      .def("refuse_capture",
           [](const PyStager& self, uint64_t stream) {
             guarded([&] {
               self.stager->refuse_capture(stream);
               return 0;
             });
           }, nb::arg("stream"), "Raise CaptureError where a stream is captured.")
      .def("close", [](const PyStager& self) { self.stager->close(); },
           nb::call_guard<nb::gil_scoped_release>(), "Give everything back that is not in use.")
      .def("plant",
           [](const PyStager& self, const std::string& name) {
             for (int i = 0; i < kNumPlanted; ++i) {
               if (name == kPlantedNames[i]) {
                 self.stager->planted = static_cast<Planted>(i);
                 return;
               }
             }
             throw nb::value_error(("no bug is called " + name).c_str());
           }, nb::arg("name"), "Plant a bug, for tests.")
      .def_prop_ro("outstanding", [](const PyStager& self) { return self.stager->outstanding(); },
                   "Calls whose end the host has not seen.")
      .def_prop_ro("num_events", [](const PyStager& self) { return self.stager->num_events(); },
                   "Events that wait for the next call.")
      .def_prop_ro("pinned_nbytes",
                   [](const PyStager& self) {
                     nb::gil_scoped_release release;
                     return self.stager->pinned_nbytes();
                   }, "Pinned memory for data.")
      .def_prop_ro("failed", [](const PyStager& self) { return self.stager->failed(); },
                   "Whether something failed, so that nothing more is taken.");
  m.def("planted_bugs", [] {
    return std::vector<std::string>(kPlantedNames + 1, kPlantedNames + kNumPlanted);
  }, "Names of the bugs that tests can plant in the staging of device memory.");
}

}  // namespace commrt
