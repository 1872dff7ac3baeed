// SPDX-License-Identifier: Apache-2.0
// The text of a device's last error on this thread, and the exception that carries it.
#pragma once

#include <stdexcept>
#include <string>

#include "devices/device.hpp"

namespace commrt {

std::string& device_error();  // of this thread
// Keeps the text for last_error(), and returns the status.
DeviceStatus device_fails(DeviceStatus status, std::string text);
const char* last_device_error(Device*);  // for the table
// An entry for the tables of devices that are not hardware.
DeviceStatus make_current_here(Device*, bool enter);

// A call of the device that failed.
struct DeviceFailure : std::runtime_error {
  DeviceFailure(DeviceStatus status_, const std::string& text)
      : std::runtime_error(text), status(status_) {}
  DeviceStatus status;
};

// The base of classes that call a device: a call that fails throws.
class DeviceUser {
 public:
  explicit DeviceUser(Device* on) : device_(on) {}
  Device* device() const { return device_; }

 protected:
  static void check(DeviceStatus status) {
    if (status != DeviceStatus::Ok) throw DeviceFailure(status, device_error());
  }
  template <class... Parameters, class... Arguments>
  void call(DeviceStatus (*DeviceApi::*entry)(Device*, Parameters...),
            Arguments... arguments) const {
    check((device_->api->*entry)(device_, arguments...));
  }

  Device* const device_;
};

std::string hex(std::uint64_t number);
inline std::string hex(const void* ptr) { return hex(reinterpret_cast<std::uint64_t>(ptr)); }

}  // namespace commrt
