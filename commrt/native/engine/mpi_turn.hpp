// SPDX-License-Identifier: Apache-2.0
// A guard around each call of an MPI library that works on device memory: any call may continue
// earlier work on that memory, and so call the CUDA driver.
#pragma once

#include <optional>

#include "devices/device.hpp"
#include "devices/device_stores.hpp"

namespace commrt {

// While it lives, the device is the thread's current one: libraries that are told no device use
// that. Calls of this thread end no capture, whoever began it. With a null device, nothing
// changes.
class MpiTurn {
 public:
  explicit MpiTurn(Device* device) : current_(device) {
    // A simulated device would let other threads go on, which may want what the caller holds.
    if (device != nullptr && device->api->lock == nullptr) relaxed_.emplace(device);
  }

 private:
  const CurrentDevice current_;
  std::optional<RelaxedCapture> relaxed_;
};

}  // namespace commrt
