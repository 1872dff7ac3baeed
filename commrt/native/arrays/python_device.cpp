// SPDX-License-Identifier: Apache-2.0
// Raises what a device's status means (python_device.hpp).
#include "arrays/python_device.hpp"

#include <nanobind/nanobind.h>

#include <string>

#include "devices/device_error.hpp"

namespace commrt {

namespace nb = nanobind;

void check_device(DeviceStatus status) {
  if (status == DeviceStatus::Ok) return;
  const char* type = "DeviceError";
  switch (status) {
    case DeviceStatus::Invalid: type = "UsageError"; break;
    case DeviceStatus::Missing: type = "DeviceMissingError"; break;
    case DeviceStatus::Capturing: type = "CaptureError"; break;
    case DeviceStatus::Failed: type = "DeviceFailedError"; break;
    case DeviceStatus::Deadlock: type = "OrderingError"; break;
    default: break;
  }
  const nb::object cls = nb::module_::import_("commrt.errors").attr(type);
  const std::string text = device_error();
  const nb::object error = status == DeviceStatus::Invalid
                               ? cls(text.c_str())
                               : cls(text.c_str(), status_name(status));
  PyErr_SetObject(cls.ptr(), error.ptr());
  throw nb::python_error();
}

}  // namespace commrt
