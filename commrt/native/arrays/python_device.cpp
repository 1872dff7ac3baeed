// SPDX-License-Identifier: Apache-2.0
// Raises what a device's status means (python_device.hpp).
#include "arrays/python_device.hpp"

#include <string>

#include "devices/device_error.hpp"
#include "python_callbacks.hpp"

namespace commrt {

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
  const std::string text = device_error();
  raise_error(type, text.c_str(), status == DeviceStatus::Invalid ? nullptr : status_name(status));
}

}  // namespace commrt
