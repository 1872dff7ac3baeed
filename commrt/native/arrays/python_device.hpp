// SPDX-License-Identifier: Apache-2.0
// A device as Python holds it, and its errors as Python raises them.
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
