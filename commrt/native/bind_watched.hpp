// SPDX-License-Identifier: Apache-2.0
// What the bindings of calls share that a device ends by itself (watched.hpp): of NCCL's and of
// those over memory of peers.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <memory>

#include "bind_device.hpp"
#include "device_error.hpp"
#include "device_work.hpp"
#include "engine.hpp"
#include "group.hpp"
#include "user_reduction.hpp"

namespace commrt {

// Runs without the GIL, and raises what the device says.
template <class F>
auto guarded_by_device(F function) -> decltype(function()) {
  DeviceStatus status = DeviceStatus::Ok;
  std::string text;
  try {
    nb::gil_scoped_release release;
    return function();
  } catch (const DeviceFailure& failure) {
    status = failure.status;
    text = failure.what();
  }
  check_device(device_fails(status, text));
  return decltype(function())();
}

// One started call, as Python holds it.
template <class Work, class Call>
struct PyWatchedCall {
  std::shared_ptr<Call> call;
  std::shared_ptr<Engine> engine;
  Work& work() const { return *call->work; }
  void see() const {
    if (!work().simulated()) return;
    nb::gil_scoped_release release;
    work().see();
  }
};

// How a wait ended: 0 done or failed, 1 out of time, 2 with a signal.
template <class Work, class Call, class Guard>
int synchronize_watched(const PyWatchedCall<Work, Call>& self, double timeout_s, Guard guarded) {
  constexpr double kSignalPeriod_s = 0.05;
  constexpr unsigned kLooks = 64;
  Engine& engine = *self.engine;
  Work& work = self.work();
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

// The methods of such a call. `guarded` runs a function without the GIL and raises what went wrong.
template <class Work, class Call, class Guard>
void bind_watched_call(nb::class_<PyWatchedCall<Work, Call>>& bound, Guard guarded) {
  using Py = PyWatchedCall<Work, Call>;
  bound
      .def("wait_on",
           [guarded](const Py& self, uint64_t stream) {
             guarded([&] {
               self.work().wait_on(*self.call, stream);
               return 0;
             });
           }, nb::arg("stream"), "Let a stream wait for the end.")
      .def("synchronize",
           [guarded](const Py& self, double timeout_s) {
             const int how = synchronize_watched(self, timeout_s, guarded);
             if (how == 2) throw nb::python_error();
             self.see();
             drop_ended(*self.engine);
             return how == 0;
           }, nb::arg("timeout_s"), "Block the host until the end; False where time ran out.")
      .def("test",
           [guarded](const Py& self) {
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
      .def_prop_ro("ended", [](const Py& self) {
        if (!self.call->ended()) return false;
        self.see();
        return true;
      }, "Whether it has ended, without a look.")
      .def_prop_ro("failure", [](const Py& self) -> nb::object {
        if (!self.call->failed()) return nb::none();
        return nb::make_tuple(self.call->kind, self.call->error);
      }, "(kind, text) of what went wrong; None where nothing did.")
      .def_prop_ro("seq", [](const Py& self) { return self.call->seq; },
                   "Sequence number on the communicator.");
}

}  // namespace commrt
