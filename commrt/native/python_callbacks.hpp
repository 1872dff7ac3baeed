// SPDX-License-Identifier: Apache-2.0
// Objects of the package's Python code that the engine calls. The table in
// commrt/called_by_engine.py says where each is.
#pragma once

#include <nanobind/nanobind.h>

#include <string>
#include <vector>

namespace commrt {

enum class Callback : int {
  AsStream,
  CallSite,
  CodeOfInterfaceType,
  CodeOfTorchType,
  CudaDevices,
  CurrentStreamOf,
  CurrentStreams,
  DeviceArray,
  Errors,  // the module
  Recorder,
  RefuseMessages,
  RequestFailed,
  RequestLate,
  RequestNotBlocking,
  RequestNotRunning,
  RequestNotWaiting,
  ServedDevices,
  Count,
};

// Returns the object, which is kept for ever. Throws Python's error where it is not to be found.
nanobind::handle callback(Callback which);

// The names that the table must have, and no others.
std::vector<std::string> callback_names();

// Raises an error of a class in commrt.errors; with `status`, that is its second argument.
[[noreturn]] void raise_error(const char* type, const char* text, const char* status = nullptr);

}  // namespace commrt
