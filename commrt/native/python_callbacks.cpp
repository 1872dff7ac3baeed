// SPDX-License-Identifier: Apache-2.0
// Looks up what the engine calls in Python (python_callbacks.hpp).
#include "python_callbacks.hpp"

namespace commrt {

namespace nb = nanobind;

namespace {

constexpr int kNum = static_cast<int>(Callback::Count);

const char* const kNames[] = {"as_stream", "call_site",
                              "code_of_interface_type",
                              "code_of_torch_type",
                              "cuda_devices",
                              "current_stream_of",
                              "current_streams",
                              "device_array",
                              "errors",
                              "recorder", "refuse_messages",
                              "request_failed",
                              "request_late",
                              "request_not_blocking",
                              "request_not_running",
                              "request_not_waiting",
                              "served_devices"};
static_assert(sizeof(kNames) / sizeof(kNames[0]) == kNum, "each callback has a name");

// Guarded by the GIL.
PyObject* found[kNum] = {};

}  // namespace

// A guarded static would not do: an import may let the GIL go to a thread that would then wait for
// the guard.
nb::handle callback(Callback which) {
  const int i = static_cast<int>(which);
  if (found[i] == nullptr) {
    const nb::object find = nb::module_::import_("commrt.called_by_engine").attr("find");
    found[i] = nb::object(find(kNames[i])).release().ptr();
  }
  return found[i];
}

std::vector<std::string> callback_names() { return {kNames, kNames + kNum}; }

void raise_error(const char* type, const char* text, const char* status) {
  const nb::object cls = callback(Callback::Errors).attr(type);
  const nb::object error = status == nullptr ? cls(text) : cls(text, status);
  PyErr_SetObject(cls.ptr(), error.ptr());
  throw nb::python_error();
}

}  // namespace commrt
