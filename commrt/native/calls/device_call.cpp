// SPDX-License-Identifier: Apache-2.0
// Waits for calls on devices, and raises what went wrong (device_call.hpp).
#include "calls/device_call.hpp"

#include <algorithm>

#include "engine/backoff.hpp"
#include "engine/rank_states.hpp"
#include "engine/user_reduction.hpp"
#include "gil.hpp"
#include "python_callbacks.hpp"

namespace commrt {

void raise_call_failure(const CallFailure& failure) {
  const char* type = failure.kind == "timeout"     ? "TimeoutError_"
                     : failure.kind == "revoked"   ? "RevokedError"
                     : failure.kind == "refused"   ? "RefusedError"
                     : failure.kind == "peer"      ? "PeerFailedError"
                     : failure.kind == "integrity" ? "IntegrityError"
                     : failure.kind == "calls" || failure.kind == "mismatch" ? "MismatchError"
                                                   : "BackendError";
  raise_error(type, failure.what());
}

std::vector<unsigned char*> as_memory(const std::vector<uint64_t>& addresses) {
  std::vector<unsigned char*> places;
  places.reserve(addresses.size());
  for (const uint64_t address : addresses) places.push_back(as_memory(address));
  return places;
}

namespace {

constexpr double kSignalPeriod_s = 0.05;

// Returns how the wait ended: 0 done or failed, 1 out of time, 2 with a signal.
int wait_for_end(const PyDeviceCall& self, double timeout_s) {
  constexpr unsigned kLooks = 64;
  Engine& engine = *self.engine;
  DeviceWork& work = self.work();
  const double start = now_s();
  const double deadline = start + timeout_s;
  Backoff backoff(engine, 2000);
  WaitTeller teller(&engine);
  for (;;) {
    const bool ended = guarded([&] {
      const double end = std::min(now_s() + kSignalPeriod_s, deadline);
      for (unsigned look = 1;; ++look) {
        bool looks_at_clock = look % kLooks == 0;
        if (work.has_ended(*self.call)) return true;
        if (engine.step()) {
          backoff.reset();
        } else {
          work.advance(self.call);
          if (work.simulated() || look % (kLooks * 64) == 0) work.ask_device(self.call);
          if (work.has_ended(*self.call)) return true;
          if (wants_gil(engine)) return false;
          looks_at_clock = work.pause(backoff, end) || looks_at_clock;
        }
        if (looks_at_clock && (backoff.take_interrupt() || now_s() >= end)) return false;
      }
    });
    if (ended) return 0;
    if (wants_gil(engine) && !run_wanted(engine)) return 2;
    const bool has_failed = guarded([&] {
      work.ask_device(self.call);
      work.give_up_late(self.call, now_s() - start);
      return work.has_ended(*self.call);
    });
    if (has_failed) return 0;
    teller.tell(now_s());
    if (PyErr_CheckSignals() != 0) return 2;
    if (now_s() > deadline) return 1;
  }
}

}  // namespace

void await_turn(const PyDeviceWork& self, double timeout_s) {
  if (!self.work->may_have_to_wait()) return;
  const double deadline = now_s() + timeout_s;
  Engine& engine = *self.engine;
  const auto may_start = [&] {
    return self.work->may_start(std::min(now_s() + kSignalPeriod_s, deadline), deadline);
  };
  while (!guarded(may_start)) {
    if (wants_gil(engine) && !run_wanted(engine)) throw nb::python_error();
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  }
}

void PyDeviceCall::wait_on(Stream stream) const {
  guarded([&] {
    work().wait_on(call, stream);
    return 0;
  });
}

bool PyDeviceCall::synchronize(double timeout_s) const {
  const int how = wait_for_end(*this, timeout_s);
  if (how == 2) throw nb::python_error();
  drop_ended(*engine);
  return how == 0;
}

bool PyDeviceCall::test() const {
  if (!call->ended()) {
    guarded([&] {
      if (!engine->step()) work().ask_device(call);
      work().advance(call);
      return 0;
    });
  }
  if (engine->has_ended()) drop_ended(*engine);
  return guarded([&] { return work().has_ended(*call); });
}

bool PyDeviceCall::ended() const {
  if (!call->ended()) return false;
  ReleasedGil release;
  return work().has_ended(*call);
}

}  // namespace commrt
