// SPDX-License-Identifier: Apache-2.0
// All devices share this: the names of statuses, and the text of a thread's latest failure.
#include "devices/device.hpp"

#include <vector>

#include "devices/device_error.hpp"

namespace commrt {

const char* status_name(DeviceStatus status) {
  static const char* const names[] = {"ok",          "not_ready",  "invalid",   "out_of_memory",
                                      "missing",     "unsupported", "no_kernels", "capturing",
                                      "failed",      "deadlock"};
  return names[static_cast<int>(status)];
}

namespace {
std::vector<Device*>& entered() {
  thread_local std::vector<Device*> devices;
  return devices;
}
}  // namespace

Device* current_device() { return entered().empty() ? nullptr : entered().back(); }

std::string& device_error() {
  thread_local std::string text;
  return text;
}

DeviceStatus device_fails(DeviceStatus status, std::string text) {
  device_error() = std::move(text);
  return status;
}

DeviceStatus make_current_here(Device* device, bool enter) {
  if (enter)
    entered().push_back(device);
  else if (!entered().empty())
    entered().pop_back();
  return DeviceStatus::Ok;
}

const char* last_device_error(Device*) { return device_error().c_str(); }

std::string hex(std::uint64_t number) {
  static const char digits[] = "0123456789abcdef";
  std::string text;
  do text.insert(text.begin(), digits[number % 16]);
  while (number /= 16);
  return "0x" + text;
}

}  // namespace commrt
