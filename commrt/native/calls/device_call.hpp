// SPDX-License-Identifier: Apache-2.0
// Python's handles of device calls: start one, wait for it, and release it.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "arrays/python_device.hpp"
#include "calls/group.hpp"
#include "engine/device_work.hpp"
#include "engine/engine.hpp"
#include "gil.hpp"

namespace commrt {

// Raises what a call that could not be made says.
[[noreturn]] void raise_call_failure(const CallFailure& failure);

// Runs without the GIL, and raises what went wrong.
template <class F>
auto guarded(F function) -> decltype(function()) {
  DeviceStatus status = DeviceStatus::Ok;
  std::string text;
  try {
    ReleasedGil release;
    return function();
  } catch (const DeviceFailure& failure) {
    status = failure.status;
    text = failure.what();
  } catch (const CallFailure& failure) {
    raise_call_failure(failure);
  }
  check_device(device_fails(status, text));
  return decltype(function())();
}

// Any communicator's work of a kind on a device.
struct PyDeviceWork {
  std::shared_ptr<DeviceWork> work;
  std::shared_ptr<Engine> engine;
};

template <class Work>
struct PyWork : PyDeviceWork {
  Work& own() const { return static_cast<Work&>(*work); }
};

// Drops a call, without the GIL: dropping the last reference takes locks, and a thread that has
// them may wait for the GIL.
inline void let_go(std::shared_ptr<DeviceCall>& call) {
  if (call == nullptr) return;
  ReleasedGil release;
  call.reset();
}

// One started call.
struct PyDeviceCall {
  PyDeviceCall(std::shared_ptr<DeviceCall> call_, std::shared_ptr<Engine> engine_)
      : call(std::move(call_)), engine(std::move(engine_)) {}
  PyDeviceCall(const PyDeviceCall&) = default;
  PyDeviceCall(PyDeviceCall&&) = default;
  ~PyDeviceCall() { let_go(call); }

  DeviceWork& work() const { return *call->work; }
  // Lets a stream wait for the end.
  void wait_on(Stream stream) const;
  // Blocks the host until the end; false where time ran out.
  bool synchronize(double timeout_s) const;
  // Runs a little progress; whether it has ended.
  bool test() const;
  // The same without progress.
  bool ended() const;

  std::shared_ptr<DeviceCall> call;
  std::shared_ptr<Engine> engine;
};

// Makes the work of a communicator, which counts as its own from here on.
template <class Work, class Make>
void make_work(PyWork<Work>* self, Group& group, Make make) {
  std::shared_ptr<Work> made = guarded(make);
  group.engine->add_device_work(made);
  const bool is_watched = made->holds_streams() || made->may_stick();
  if (is_watched && group.engine->has_thread() && !made->simulated()) {
    group.engine->start_watch();
  }
  // Work that is over is held by those who wait for its rest (deferred_release.py), and by nobody else.
  std::vector<std::shared_ptr<DeviceWork>> all{made};
  std::copy_if(group.device_work.begin(), group.device_work.end(), std::back_inserter(all),
               [](const auto& one) { return !one->is_over(); });
  group.device_work.swap(all);  // what is dropped with the old ones may let other threads run
  new (self) PyWork<Work>{{std::move(made), group.engine}};
}

// Waits until a call may be given to the device.
void await_turn(const PyDeviceWork& self, double timeout_s);

// Starts a call, which takes references to what it is to keep.
template <class F>
PyDeviceCall started(const PyDeviceWork& self, nb::handle first, nb::handle second,
                     double timeout_s, F start) {
  PyDeviceCall made{nullptr, self.engine};
  if (self.engine->has_ended()) drop_ended(*self.engine);
  await_turn(self, timeout_s);
  void* kept[2] = {first.is_none() ? nullptr : first.inc_ref().ptr(),
                   second.is_none() ? nullptr : second.inc_ref().ptr()};
  try {
    made.call = guarded([&] { return start(kept); });
  } catch (...) {
    // If the device has begun with it, the arrays stay alive for ever.
    if (!self.work->failed()) {
      for (void* object : kept) Py_XDECREF(static_cast<PyObject*>(object));
    }
    throw;
  }
  return made;
}

inline unsigned char* as_memory(uint64_t address) {
  return reinterpret_cast<unsigned char*>(address);
}
std::vector<unsigned char*> as_memory(const std::vector<uint64_t>& addresses);

}  // namespace commrt
