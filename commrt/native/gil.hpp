// SPDX-License-Identifier: Apache-2.0
// Python's lock, for threads that may still wait when Python ends.
#pragma once

#include <cxxabi.h>
#include <nanobind/nanobind.h>
#include <unistd.h>

namespace commrt {

// Where a daemon thread stays that asks for the lock after Python's end; the process ends soon.
[[noreturn]] inline void stay_for_ever() {
  for (;;) ::pause();
}

// Before 3.14, Python ends such a thread by pthread_exit(), which unwinds its stack. The first
// destructor on the way would end the process by std::terminate().
template <class Take>
auto taken(Take take) {
  try {
    return take();
  } catch (const abi::__forced_unwind&) {
    stay_for_ever();
  }
}

// The lock is released in a scope, as by nb::gil_scoped_release.
class ReleasedGil {
 public:
  ReleasedGil() : state_(PyEval_SaveThread()) {}
  ~ReleasedGil() {
    taken([this] { PyEval_RestoreThread(state_); });
  }
  ReleasedGil(const ReleasedGil&) = delete;
  ReleasedGil& operator=(const ReleasedGil&) = delete;

 private:
  PyThreadState* state_;
};

// The lock is held in a scope of a thread that had released it.
class TakenGil {
 public:
  TakenGil() : state_(taken([] { return PyGILState_Ensure(); })) {}
  ~TakenGil() { PyGILState_Release(state_); }
  TakenGil(const TakenGil&) = delete;
  TakenGil& operator=(const TakenGil&) = delete;

 private:
  PyGILState_STATE state_;
};

}  // namespace commrt
