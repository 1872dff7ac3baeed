// SPDX-License-Identifier: Apache-2.0
// Python's handle of a device, and the Python exceptions for its errors.
#pragma once

#include <memory>

#include "devices/device.hpp"

namespace commrt {

struct PyDevice {
  Device* device = nullptr;
  std::shared_ptr<void> keeps;  // alive what the device lies in
};

// Raises what the status means, with the text of device_error().
void check_device(DeviceStatus status);

}  // namespace commrt
